"""Who is asked whether it still answers, and how often: what sleeps is left to sleep."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from monarch_nb.host.procs import liveness
from monarch_nb.host.procs.child import Child
from monarch_nb.host.procs.liveness import LivenessMonitor
from monarch_nb.host.protocol import ProcSpec
from monarch_nb.wire import Verb


class Clock:
    """A loop of timers, on a time of its own."""

    def __init__(self) -> None:
        self.now = 100.0
        self.timers: list[Any] = []

    def monotonic(self) -> float:
        return self.now

    time = monotonic

    def call_later(self, seconds: float, callback: Any) -> Any:
        timer = Timer(self.now + seconds, callback)
        self.timers.append(timer)
        return timer

    def run(self, seconds: float) -> int:
        """Lets time pass; how many timers rang."""
        end, rang = self.now + seconds, 0
        while due := [timer for timer in self.timers if timer.callback and timer.when <= end]:
            timer = min(due, key=lambda each: each.when)
            self.timers.remove(timer)
            self.now = timer.when
            timer.callback()
            rang += 1
        self.now = end
        return rang


@dataclass
class Timer:
    when: float
    callback: Any

    def cancel(self) -> None:
        self.callback = None


@dataclass
class World:
    """One proc, which answers at once unless it is deaf, and what watches it."""

    clock: Clock = field(default_factory=Clock)
    ran: float | None = 1.0
    deaf: bool = False
    pings: int = 0
    looks: int = 0
    told: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        spec = ProcSpec(
            address="h/p.0.0", agent="h/agent", host="h", run_folder="", mesh="p", rank=0,
            incarnation=0, owner="h/c",
        )  # fmt: skip
        self.child = Child(spec, {"h/c"}, state="running", pid=1)
        self.child.channel = self  # type: ignore[assignment]
        self.reaper = self
        self.on_signal: Any = None
        self.monitor = LivenessMonitor(self.clock, self, self)  # type: ignore[arg-type]
        self.monitor.start()

    def alive(self) -> list[Child]:
        return [self.child]

    def look(self) -> None:
        self.looks += 1

    def ping(self) -> None:
        self.pings += 1
        if not self.deaf:
            self.monitor.pong(self.child)

    def tell_all(self, _: Any, verb: Verb[Any, None], body: Any) -> None:
        self.told.append(verb.name)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    monkeypatch.setattr(liveness, "time", made.clock)
    monkeypatch.setattr(liveness, "processor_time", lambda pid: made.ran)
    return made


def test_one_that_sleeps_is_hardly_asked_and_the_looks_become_rare(world: World) -> None:
    world.clock.run(60)
    assert world.pings <= 6
    assert world.clock.run(60) <= 15


def test_one_that_runs_is_asked_each_second(world: World) -> None:
    for _ in range(20):
        world.ran = (world.ran or 0.0) + 0.1
        world.clock.run(1)
    assert world.pings >= 19


def test_where_processor_time_cannot_be_told_it_is_asked_each_second(world: World) -> None:
    world.ran = None
    world.clock.run(20)
    assert world.pings >= 19


def test_one_that_begins_to_run_after_a_long_sleep_and_does_not_answer_is_told(world: World) -> None:
    world.clock.run(60)
    world.deaf, world.ran = True, 2.0
    world.clock.run(7)
    assert world.told == ["proc.unresponsive"]
    world.deaf = False
    world.monitor.pong(world.child)
    assert world.told == ["proc.unresponsive", "proc.responsive"]


def test_one_that_is_stopped_while_it_sleeps_is_told_soon(world: World) -> None:
    world.clock.run(60)
    world.deaf = True
    world.on_signal()
    world.clock.run(3)
    assert world.told == ["proc.unresponsive"]


def test_one_that_holds_still_without_a_signal_is_told_in_the_end(world: World) -> None:
    world.clock.run(60)
    world.deaf = True
    world.clock.run(20)
    assert world.told == ["proc.unresponsive"]
