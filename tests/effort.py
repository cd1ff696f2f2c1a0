"""The effort of tests of random histories: enough for every day, or MONARCH_TEST_EFFORT times as much.

Every day the same histories are tried, so that a failure is of what was changed and not of luck; those of more effort
are others each time, and a failure prints how to meet it again.
"""

import os
import re
from collections.abc import Iterable
from typing import Any

import pytest

# Modules that procs have from birth once their host has idled for a while; at once, or each would import them itself.
AS_LATER = (
    "numpy,torch,sympy,torch.distributed.tensor,torch._inductor.config,torch._functorch.aot_autograd,torch._dynamo"
)
# Modules of tests/cluster whose processes are forked with these imports; those of one line share a host.
WITH_TORCH = (
    re.compile(r"tests/cluster/test_tensor_"),
    re.compile(r"tests/cluster/test_(actor_interrupts|diagnosis_hangs|gpu_values|memory_growth|nonfinite)\.py"),
    re.compile(r"tests/cluster/test_(planted_faults|rdma_gpu|replicas|reproduce|stragglers)\.py"),
)

EFFORT = int(os.environ.get("MONARCH_TEST_EFFORT", "1"))


def daily(values: Iterable[Any], count: int) -> list[Any]:
    """Parameters of which the first `count` are for every day, and the others, which go the same way, are slow."""
    return [value if i < count else pytest.param(value, marks=pytest.mark.slow) for i, value in enumerate(values)]


def tries(count: int) -> int:
    """`count` times the effort: of examples, or of seconds that they may take."""
    return count * EFFORT
