"""Walks of a death and of a breakpoint, recorded on the memory network, are those that the architecture page draws."""

import re
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from monarch_nb import debug
from monarch_nb.actor import Actor, SupervisionError, endpoint
from monarch_nb.debug.prompt import DebugPrompt
from monarch_nb.debug.render import short
from monarch_nb.debug.service import controller_of
from monarch_nb.runtime import breakpoints, pending_future, runtime
from monarch_nb.testing import Cluster, cluster
from tests.cluster.fault_tools import until
from tests.unit.test_architecture_page import section

pytestmark = pytest.mark.timeout(60)

MOST = 18  # modules of a walk
# What is on every thread's stack and holds nothing: the table of verbs, and what keeps Ctrl-C away for a moment.
PASSING_ON = {"wire/handlers", "transport/interrupts"}
MODULE = re.compile(r"(\d+)  ([a-z_]+(?:/[a-z_]+)*)")
SECOND = 52  # where the second column of the pictures begins
NETWORK = ("transport/", "engine/")  # here in memory


class Recorder:
    """The modules on the stack of a thread when it comes to a function."""

    def __init__(self) -> None:
        self.on = False
        self.walks: dict[str, list[str]] = {}

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        name = frame.f_globals.get("__name__", "")
        if self.on and event == "call" and name.startswith("monarch_nb."):
            self.walks[f"{_path(name)}:{frame.f_code.co_name}"] = self._walk(frame)

    @staticmethod
    def _walk(frame: FrameType | None) -> list[str]:
        walk: list[str] = []
        while frame is not None:
            name = _path(frame.f_globals.get("__name__", ""))
            if name and name not in PASSING_ON and not name.startswith(NETWORK) and name not in walk[-1:]:
                walk.append(name)
            frame = frame.f_back
        return walk[::-1]


def _path(name: str) -> str:
    return name.removeprefix("monarch_nb.").replace(".", "/") if name.startswith("monarch_nb.") else ""


class Halting(Actor):
    @endpoint
    def halt(self, value: int) -> int:
        breakpoint()
        return value


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    recorder = Recorder()
    threading.setprofile(recorder)
    sys.setprofile(recorder)
    yield recorder
    threading.setprofile(None)
    sys.setprofile(None)


@pytest.fixture
def made(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setattr(sys, "breakpointhook", sys.breakpointhook)
    breakpoints.install_breakpoints()
    with cluster() as made:
        yield made


def legs(title: str) -> Iterator[list[tuple[int, str]]]:
    """The legs of the pictures of a section, one side after the other: the rows and names of their modules, from above.

    Where a side has no module for a line, a leg ends.
    """
    for side in (0, 1):
        for picture in re.findall(r"```\n(.*?)```", section(title), re.DOTALL):
            leg: list[tuple[int, str]] = []
            for line in picture.splitlines():
                if found := MODULE.match((line[:SECOND], line[SECOND:])[side]):
                    leg.append((int(found[1]), found[2]))
                elif leg and (side or not line[:SECOND].strip()):
                    yield leg
                    leg = []
            yield leg


def is_drawn(walk: list[str], title: str) -> bool:
    """Whether the modules of a walk are drawn in that order."""
    names = iter([name for leg in legs(title) for _, name in leg])
    return all(module in names for module in walk)


def assert_drawn(recorder: Recorder, title: str, *ends: str) -> None:
    for end in ends:
        assert is_drawn(recorder.walks[end], title), (end, recorder.walks[end])


def test_a_death_passes_the_modules_that_are_drawn(made: Cluster, recorder: Recorder) -> None:
    procs = made.this_host().spawn_procs(per_host={"gpus": 2})
    waits = procs.spawn("waits", Waiting)
    call = waits.forever.call()
    made.settle()
    recorder.on = True
    made.kill(procs.slice(gpus=1))
    with pytest.raises(SupervisionError):
        made.result(call)
    recorder.on = False
    assert_drawn(recorder, "A death", "supervision/machine:proc_exited", "runtime/calls:fail")


class Waiting(Actor):
    @endpoint
    async def forever(self) -> None:
        await pending_future()


def test_a_breakpoint_and_a_command_pass_the_modules_that_are_drawn(made: Cluster, recorder: Recorder) -> None:
    halting = made.this_host().spawn_procs().spawn("halting", Halting)
    for on in (False, True):  # the debugger is loaded at the first stop
        recorder.on = on
        call = halting.halt.call_one(1)
        until(lambda: bool(debug.sessions()), "a stop")
        controller = controller_of(runtime())
        prompt = DebugPrompt(controller, controller.stopped.records, short, everybody=True)
        assert prompt.do("p value").text == "1"
        prompt.do("c")
        assert made.result(call) == 1
    recorder.on = False
    assert_drawn(
        recorder,
        "A breakpoint",
        "debug/session/machine:stops",
        "debug/control/stopped:add",
        "mesh/requests:request",
        "debug/session/thread:post",
        "debug/session/commands:carry_out",
        "debug/session/machine:go",
    )


@pytest.mark.parametrize("title", ["A call and its reply", "A death", "A breakpoint"])
def test_a_walk_rises_once_and_falls_once_in_a_process_and_passes_few_modules(title: str) -> None:
    for leg in legs(title):
        way = [row for row, _ in leg]
        top = way.index(max(way, default=0)) if way else 0
        assert way[: top + 1] == sorted(way[: top + 1]), leg
        assert way[top:] == sorted(way[top:], reverse=True), leg
    for picture in re.findall(r"```\n(.*?)```", section(title), re.DOTALL):
        assert len(set(re.findall(r"(?<!\w)\d+  ([a-z_]+(?:/[a-z_]+)*)", picture))) <= MOST
