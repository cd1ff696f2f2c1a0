"""Arguments and results are snapshots: later changes in one process do not show in another."""

import threading
from typing import Any

import numpy as np
import pytest

from monarch_nb.actor import Actor, ActorError, Channel, Port, ProcMesh, endpoint, this_proc

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("faults")]

SMALL, LARGE = 1 << 10, 8 << 20
FORMS = ["numpy", "torch", "bytearray"]


def make(form: str, nbytes: int) -> Any:
    if form == "torch":
        import torch  # here, since it takes as long as all other imports

        return torch.zeros(nbytes, dtype=torch.uint8)
    return np.zeros(nbytes, np.uint8) if form == "numpy" else bytearray(nbytes)


def total(value: Any) -> int:
    return int(np.frombuffer(value, np.uint8).sum()) if isinstance(value, bytearray) else int(value.sum())


def fill(value: Any, x: int) -> None:
    if isinstance(value, bytearray):
        value[:] = bytes([x]) * len(value)
    else:
        value[:] = x


class Keeper(Actor):
    def __init__(self, value: Any = None) -> None:
        self.value = value

    @endpoint
    def hold(self, port: Port[Port[None]]) -> None:
        key, receiver = Channel[None].open()
        port.send(key)
        receiver.recv().get(60)

    @endpoint
    def keep(self, value: Any) -> None:
        self.value = value

    @endpoint
    def fill(self, x: int) -> None:
        fill(self.value, x)

    @endpoint
    def total(self) -> int:
        return total(self.value)

    @endpoint
    def give(self) -> Any:
        return self.value


@pytest.fixture(scope="module")
def keepers(quad: ProcMesh) -> Any:
    return quad.slice(gpus=slice(0, 2)).spawn("keepers", Keeper)  # each imports torch


@pytest.mark.parametrize("nbytes", [SMALL, LARGE])
@pytest.mark.parametrize("form", FORMS)
def test_later_changes_by_the_caller_to_an_argument_are_not_seen(keepers: Any, form: str, nbytes: int) -> None:
    keeper = keepers.slice(gpus=0)
    port, receiver = Channel[Port[None]].open()
    hold = keeper.hold.call_one(port)  # so that the argument is read only after its change here
    value = make(form, nbytes)
    call = keeper.keep.call_one(value)
    fill(value, 1)
    receiver.recv().get(60).send(None)
    hold.get(60)
    call.get(60)
    assert keeper.total.call_one().get(60) == 0


@pytest.mark.parametrize("nbytes", [SMALL, LARGE])
@pytest.mark.parametrize("form", FORMS)
def test_each_receiver_of_a_cast_may_write_to_its_own(keepers: Any, form: str, nbytes: int) -> None:
    value = make(form, nbytes)
    keepers.keep.call(value).get(60)
    for rank in range(2):
        keepers.slice(gpus=rank).fill.call_one(rank + 1).get(60)
    assert keepers.total.call().get(60).values() == [nbytes * (rank + 1) for rank in range(2)]
    assert total(value) == 0


@pytest.mark.parametrize("nbytes", [SMALL, LARGE])
@pytest.mark.parametrize("form", FORMS)
def test_a_result_belongs_to_the_caller(keepers: Any, form: str, nbytes: int) -> None:
    keeper = keepers.slice(gpus=1)
    keeper.keep.call_one(make(form, nbytes)).get(60)
    future = keeper.give.call_one()
    keeper.fill.call_one(1).get(60)
    result = future.get(60)
    assert total(result) == 0
    fill(result, 2)
    assert keeper.total.call_one().get(60) == nbytes


@pytest.mark.parametrize("nbytes", [SMALL, LARGE])
@pytest.mark.parametrize("form", FORMS)
def test_actors_of_the_callers_own_process_get_copies_too(form: str, nbytes: int) -> None:
    keeper: Any = this_proc().spawn("here", Keeper)
    value = make(form, nbytes)
    keeper.keep.call_one(value).get(60)
    fill(value, 1)
    assert keeper.total.call_one().get(60) == 0
    keeper.fill.call_one(3).get(60)
    assert total(value) == nbytes
    keeper.stop().get(60)


def test_constructor_arguments_are_kept_for_a_heal_as_they_were(quad: ProcMesh) -> None:
    value = np.zeros(1000, np.uint8)
    keeper: Any = quad.slice(gpus=0).spawn("one", Keeper, value)
    fill(value, 1)
    assert keeper.total.call_one().get(60) == 0


def test_values_sent_through_ports_are_snapshots() -> None:
    port, receiver = Channel[Any].open()
    value = np.zeros(LARGE, np.uint8)
    port.send(value)
    fill(value, 1)
    assert total(receiver.recv().get(60)) == 0


def test_results_are_decoded_when_they_are_looked_at(keepers: Any) -> None:
    keepers.keep.call(Picky()).get(60)
    values = keepers.give.call().get(60)
    with pytest.raises(ActorError, match=r"result of keepers.give could not be unpickled in the calling process"):
        values.get(0)
    keepers.slice(gpus=1).keep.call_one(5).get(60)
    values = keepers.give.call().get(60)
    assert values.item(gpus=1) == 5
    with pytest.raises(ActorError, match="not here"):
        values.item(gpus=0)


class Picky:
    """Can be unpickled everywhere except where tests run."""

    def __reduce__(self) -> Any:
        return _refuse_in_tests, ()


def _refuse_in_tests() -> Picky:
    import sys

    if "pytest" in sys.modules and threading.current_thread() is threading.main_thread():
        raise ValueError("not here")
    return Picky()
