"""A feature with a verb of its own is one object and one line of registration, also from outside the package."""

from collections.abc import Iterator

import msgspec
import pytest

from monarch_nb.engine.compose import FEATURES, register
from monarch_nb.mesh.handle import state_of
from monarch_nb.mesh.requests import request
from monarch_nb.runtime import Feature, Runtime, current_runtime
from monarch_nb.testing import cluster
from monarch_nb.wire import Asker, Done, Verb

pytestmark = pytest.mark.timeout(30)


class Place(msgspec.Struct, frozen=True):
    address: str


WHERE = Verb("atlas.where", Done, Place, doc="where a process is")
ATLAS: Feature["Atlas"] = Feature("atlas")
loaded: list[str] = []


class Atlas:
    """A feature that an extension adds to each process that is asked for it."""

    def __init__(self, runtime: Runtime) -> None:
        loaded.append(runtime.address)
        self._runtime = runtime
        runtime.verbs.handle(WHERE, self._locate)

    def _locate(self, _: Done, asker: Asker[Place]) -> Place:
        return Place(self._runtime.address)


@pytest.fixture
def atlas() -> Iterator[None]:
    loaded.clear()
    register("atlas", Atlas)
    yield
    del FEATURES["atlas"]


def test_an_external_feature_is_loaded_at_the_first_of_its_verbs(atlas: None) -> None:
    with cluster() as simulation:
        procs = simulation.this_host().spawn_procs(per_host={"gpus": 2})
        procs.initialized.get(10)
        address = state_of(procs).address(1)
        assert loaded == []
        for _ in range(2):
            assert simulation.result(request(current_runtime(), address, WHERE, Done())) == Place(address)
        assert loaded == [address]
        assert isinstance(current_runtime().feature(ATLAS), Atlas)
        assert loaded == [address, current_runtime().address]


def test_a_name_is_given_once(atlas: None) -> None:
    with pytest.raises(ValueError, match="there is a feature 'atlas' already"):
        register("atlas", Atlas)
