"""The stack of a rank in one long C call, whose process can run no Python meanwhile."""

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_nb import debug
from monarch_nb.actor import Actor, ProcMesh, endpoint
from monarch_nb.debug.control import whereabouts
from tests.cluster.actor_tools import SECONDS, spawned
from tests.polling import until

pytestmark = pytest.mark.timeout(120)


class Holder(Actor):
    @endpoint
    def hold(self, pipe: str, begun: str) -> int:
        """Blocks until the test writes into the pipe."""
        fd = os.open(pipe, os.O_RDWR)
        try:
            byte = ctypes.create_string_buffer(1)
            Path(begun).touch()  # no message: sending it might need the GIL
            return int(ctypes.PyDLL(None).read(fd, byte, 1))  # PyDLL: nobody else in the process gets the GIL
        finally:
            os.close(fd)

    @endpoint
    def ping(self) -> str:
        return "pong"


@pytest.fixture(scope="module")
def holders() -> Iterator[Any]:
    procs: Iterator[ProcMesh] = spawned(2, "held")
    mesh: Any = next(procs).spawn("holders", Holder)
    mesh.ping.call().get(SECONDS)
    yield mesh
    next(procs, None)


@pytest.mark.parametrize("with_py_spy", [False, True])
def test_the_stack_of_a_rank_that_sits_in_c_is_shown(
    holders: Any, with_py_spy: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if with_py_spy and whereabouts.py_spy() is None:
        pytest.skip("py-spy is not installed")
    if not with_py_spy:
        monkeypatch.setattr(whereabouts, "py_spy", lambda: None)
    pipe, begun = tmp_path / "pipe", tmp_path / "begun"
    os.mkfifo(pipe)
    future = holders.slice(gpus=1).hold.call_one(str(pipe), str(begun))
    until(begun.exists, "it has begun")
    try:
        text = debug.stacks(holders)
    finally:
        pipe.write_bytes(b"x")
    assert "Holder.hold" in text or "hold" in text
    assert "test_debug_stuck.py" in text
    assert "1  idle  [gpus=0]" in text
    assert future.get(SECONDS) == 1
    assert list(holders.ping.call().get(SECONDS).values()) == ["pong"] * 2


def test_processes_that_cannot_be_inspected_are_reported(holders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(address: str, pid: int) -> Any:
        raise OSError("no")

    monkeypatch.setattr(whereabouts, "stacks_from_outside", fails)
    procs = holders._state.procs
    lines = whereabouts.inspect_stacks(debug.controller(), procs, [0, 1], lambda ranks: "gpus=0-1")
    assert lines[0].startswith("2  do not answer  [gpus=0-1]: in one long call in C")


def test_a_process_without_the_handler_is_never_signalled(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        whereabouts.signalled(tmp_path / "nothing", 1)


def test_the_words_of_faulthandler_are_understood() -> None:
    root = Path(whereabouts.__file__).parents[2]
    text = f"""Thread 0x00007f (most recent call first):
  File "/usr/lib/python3/threading.py", line 320 in wait

Current thread 0x00008a (most recent call first):
  File "/home/me/train.py", line 7 in deeper
  File "/home/me/train.py", line 3 in step
  File "{root}/runtime/actors/cell.py", line 200 in run_sync
  File "{root}/runtime/actors/executors.py", line 66 in run
"""
    (stack,) = whereabouts.parsed(text)
    assert [(frame.function, frame.line) for frame in stack] == [("step", 3), ("deeper", 7)]
