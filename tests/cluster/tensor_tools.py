"""One host for all modules of tensor meshes, one for others whose processes import torch: they are forked with it."""

from collections.abc import Iterator

import pytest

from monarch_nb.connect import shutdown
from monarch_nb.runtime import current_runtime
from tests.effort import AS_LATER, WITH_TORCH

_PRELOAD = "MONARCH_NB_PRELOAD"
_hosts: list[str] = []  # hosts of this process that started like this; the last one may still run


@pytest.fixture(scope="module", autouse=True)
def born_for_tensors(request: pytest.FixtureRequest) -> Iterator[None]:
    """Modules of a line of WITH_TORCH share a host."""
    if not any(modules.search(request.path.as_posix()) for modules in WITH_TORCH):
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(_PRELOAD, AS_LATER)
        if current_runtime().host not in _hosts[-1:]:
            shutdown()  # the host of an earlier module
            _hosts.append(current_runtime().host)
        yield
