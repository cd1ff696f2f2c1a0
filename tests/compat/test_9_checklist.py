"""Section 9: what is easily missed. Most of the list is in the modules of its sections; these are whole programs.

Elsewhere: counts of `__supervise__` (tests/memory_network/test_supervision.py), exit codes (test_actor_main.py),
killed clients (test_worker_loop.py, test_faults_kill.py), host stop and reconnect (test_worker_loop.py).
"""

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from monarch.actor import Actor, Channel, Port, context, endpoint, this_host

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("faults")]

HEAD = "import asyncio, atexit, os, sys\nfrom monarch.actor import *\n"


class Keeper(Actor):
    """Lives in processes that a bootstrap made, and in nested ones."""

    def __init__(self, port: "Port[Any] | None" = None) -> None:
        self.children: Any = None
        if port is not None:
            port.send(os.getpid())

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def nested(self) -> list[int]:
        procs = this_host().spawn_procs(per_host={"gpus": 2})
        self.children = procs.spawn("children", Keeper)
        return list(self.children.pid.call().get(30).values())


def run(tmp_path: Path, source: str, code: int = 0) -> str:
    script = tmp_path / "script.py"
    script.write_text(HEAD + textwrap.dedent(source))
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=50, cwd=tmp_path, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_actors_that_a_bootstrap_spawns_live_on() -> None:
    port, receiver = Channel[int].open()

    def bootstrap() -> None:
        actor: Any = context().actor_instance.proc.spawn("early", Keeper, port)
        actor.pid.call_one().get(20)  # which it may call, too

    procs = this_host().spawn_procs(per_host={"gpus": 1}, bootstrap=bootstrap)
    keeper = procs.spawn("keeper", Keeper)
    assert receiver.recv().get(30) == keeper.pid.call_one().get(30)
    procs.stop().get(20)


@pytest.mark.slow
def test_processes_end_as_python_does_when_they_are_stopped(tmp_path: Path) -> None:
    (tmp_path / "last_words.py").write_text(
        "import atexit, os, sys\n"
        "class Last:\n"
        "    def __del__(self): os.write(1, b'deleted\\n')\n"
        "LAST = Last()\n"
        "atexit.register(lambda: print('at exit', flush=True))\n"
    )
    output = run(
        tmp_path,
        """
        class A(Actor):
            @endpoint
            async def load(self): import last_words
        if __name__ == "__main__":
            procs = this_host().spawn_procs(per_host={"gpus": 1})
            procs.spawn("a", A).load.call_one().get(30)
            procs.stop().get(20)
        """,
    )
    assert "at exit" in output
    assert "deleted" in output


def test_a_program_that_awaits_everything(tmp_path: Path) -> None:
    output = run(
        tmp_path,
        """
        class Counter(Actor):
            def __init__(self, start): self.value = start
            @endpoint
            async def increment(self, by=1): self.value += by
            @endpoint
            async def get(self): return self.value

        async def main():
            async with this_host().spawn_procs(per_host={"gpus": 2}) as procs:
                counters = procs.spawn("counters", Counter, 5)
                counters.increment.broadcast(by=2)
                await counters.slice(gpus=0).increment.call_one()
                values = await counters.get.call()
                print("values", list(values.values()), str(values.extent))
                async_total = await Accumulator(counters.get, 0, lambda a, b: a + b).accumulate()
                print("total", async_total)
            await shutdown_context()

        if __name__ == "__main__":
            asyncio.run(main())
        """,
    )
    assert "values [8, 7]" in output
    assert "total 15" in output
