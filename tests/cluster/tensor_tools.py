"""Processes of tensor meshes are forked with all imported that sharded tensors need: one host for all such modules."""

from collections.abc import Iterator

import pytest

from monarch_nb.connect import shutdown
from monarch_nb.runtime import current_runtime
from tests.effort import AS_LATER

_PRELOAD = "MONARCH_NB_PRELOAD"
_hosts: list[str] = []  # of this process, whose agents began so; the last one may still be there


@pytest.fixture(scope="module", autouse=True)
def born_for_tensors(request: pytest.FixtureRequest) -> Iterator[None]:
    """The modules called test_tensor_… have a host of their own, the same one if they come one after the other."""
    if not request.module.__name__.rpartition(".")[2].startswith("test_tensor_"):
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(_PRELOAD, AS_LATER)
        if current_runtime().host not in _hosts[-1:]:
            shutdown()  # that of an earlier module
            _hosts.append(current_runtime().host)
        yield
