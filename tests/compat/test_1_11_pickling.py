"""Section 1.11: pickling.

Elsewhere: code (tests/unit/test_wire_code.py), tensors (test_wire_tensors.py), errors (test_wire_errors.py),
references (memory_network/test_references.py), copies (memory_network/test_values.py), scripts (test_actor_main.py).
"""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch.actor import Actor, ProcMesh, endpoint, this_host

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("faults")]


class Taker(Actor):
    @endpoint
    async def take(self, value: Any) -> Any:
        return value

    @endpoint
    async def kind(self, value: Any) -> str:
        return f"{type(value).__name__} {len(value)}"


@contextlib.contextmanager
def watching() -> Iterator[list[str]]:
    """The torch operations that this thread dispatches."""
    from torch.utils._python_dispatch import TorchDispatchMode

    operations: list[str] = []

    class Watches(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            operations.append(str(func))
            return func(*args, **(kwargs or {}))

    with Watches():
        yield operations


@pytest.fixture(scope="module")
def taker(quad: ProcMesh) -> Any:
    return quad.slice(gpus=0).spawn("taker", Taker)


def test_meshes_are_sent_before_they_are_there(taker: Any) -> None:
    procs = this_host().spawn_procs(per_host={"gpus": 2}, name="pending")
    actors = procs.spawn("actors", Taker)
    futures = [taker.kind.call_one(mesh) for mesh in (procs, actors)]
    assert [future.get(30) for future in futures] == ["ProcMesh 2", "ActorMesh 2"]
    procs.stop().get(20)


def test_objects_of_native_modules_at_the_top_of_a_script_travel(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import datetime, decimal, re\n"
        "from array import array\n"
        "from collections import OrderedDict, deque\n"
        "from monarch.actor import *\n"
        "pattern, zone, cents = re.compile('a+'), datetime.timezone.utc, decimal.Decimal('0.01')\n"
        "class Price(decimal.Decimal): pass\n"
        "class A(Actor):\n"
        "    @endpoint\n"
        "    async def use(self, *values):\n"
        "        result = pattern.match('aab').group(), str(zone), str(cents + values[0]), type(values[0]).__name__\n"
        "        return result, *values[1:]\n"
        "if __name__ == '__main__':\n"
        "    time = datetime.datetime(2026, 1, 1, tzinfo=zone)\n"
        "    values = Price(1), OrderedDict(a=1), deque([1]), array('i', [1]), time\n"
        "    texts, *copies = this_host().spawn_procs().spawn('a', A).use.call_one(*values).get(30)\n"
        "    assert texts == ('aa', 'UTC', '1.01', 'Price'), texts\n"
        "    assert tuple(copies) == values[1:], copies\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_unpickling_runs_outside_of_torch_modes(quad: ProcMesh) -> None:
    torch = pytest.importorskip("torch")

    class InModes(Actor):
        @endpoint
        async def sums(self, peer: Any, tensor: Any) -> Any:
            with watching() as operations:
                copy = await peer.take.call_one(tensor)
            return operations, float(copy.sum())

    peer = quad.slice(gpus=1).spawn("taker", Taker)
    actor = quad.slice(gpus=0).spawn("in_modes", InModes)
    assert actor.sums.call_one(peer, torch.ones(100_000)).get(40) == ([], 100_000.0)
