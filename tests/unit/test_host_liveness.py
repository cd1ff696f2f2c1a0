"""Which processes are asked for a sign of life, and how often: a sleeping one is left to sleep."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from monarch_nb.host.procs import liveness
from monarch_nb.host.procs.children import Child
from monarch_nb.host.procs.liveness import LivenessMonitor
from monarch_nb.host.protocol import ProcSpec, Responsiveness
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
            timer = min(due, key=lambda item: item.when)
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
    """Procs, which answer at once unless deaf or slow, and their watchers: an owner, and each other."""

    count: int = 1
    delay: float = 0.0

    clock: Clock = field(default_factory=Clock)
    ran: float | None = 1.0
    deaf: bool = False
    unread: bool = False  # an answer is unread in the channel: the agent was busy
    pings: int = 0
    looks: int = 0
    verbs: list[str] = field(default_factory=list)
    messages: list[tuple[str, str, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        addresses = [f"h/p.{rank}.0" for rank in range(self.count)]
        self.children = []
        for rank, address in enumerate(addresses):
            spec = ProcSpec(
                address=address, agent="h/agent", host="h", run_folder="", mesh="p", rank=rank,
                incarnation=0, owner="h/c",
            )  # fmt: skip
            child = Child(spec, {"h/c", *addresses}, state="running", pid=1 + rank)
            child.channel = Channel(self, child)  # type: ignore[assignment]
            self.children.append(child)
        self.reaper = self
        self.on_stopped: Any = None
        self.monitor = LivenessMonitor(self.clock, self, self)  # type: ignore[arg-type]
        self.monitor.start()

    @property
    def child(self) -> Child:
        return self.children[0]

    def alive(self) -> list[Child]:
        return self.children

    def look(self) -> None:
        self.looks += 1

    def pinged(self, child: Child) -> None:
        self.pings += 1
        if not self.deaf:
            self.clock.call_later(self.delay, lambda: self.monitor.pong(child))

    def post(self, receiver: str, verb: Verb[Any, None], body: Responsiveness) -> None:
        self.verbs += [verb.name for _ in body.since]
        self.messages.append((receiver, verb.name, len(body.since)))


@dataclass
class Channel:
    world: World
    child: Child

    def ping(self) -> None:
        self.world.pinged(self.child)

    def drain(self) -> None:
        if self.world.unread:
            self.world.monitor.pong(self.child)


def make_world(monkeypatch: pytest.MonkeyPatch, count: int = 1) -> World:
    world = World(count=count)
    monkeypatch.setattr(liveness, "time", world.clock)
    monkeypatch.setattr(liveness, "processor_time", lambda pid: world.ran)
    return world


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return make_world(monkeypatch)


def test_one_that_sleeps_is_hardly_asked_and_the_looks_become_rare(world: World) -> None:
    world.clock.run(60)
    assert world.pings <= 7
    looks = world.looks
    world.clock.run(60)
    assert world.looks - looks <= 15


def test_one_that_runs_is_asked_each_second(world: World) -> None:
    for _ in range(20):
        world.ran = (world.ran or 0.0) + 0.1
        world.clock.run(1)
    assert world.pings >= 19


def test_where_processor_time_cannot_be_told_it_is_asked_each_second(world: World) -> None:
    world.ran = None
    world.clock.run(20)
    assert world.pings >= 19


def test_a_process_that_wakes_and_does_not_answer_is_reported(world: World) -> None:
    world.clock.run(60)
    world.deaf, world.ran = True, 2.0
    world.clock.run(7)
    assert world.verbs == ["proc.unresponsive"]
    world.deaf = False
    world.monitor.pong(world.child)
    world.clock.run(0)
    assert world.verbs == ["proc.unresponsive", "proc.responsive"]


def test_one_that_is_stopped_while_it_sleeps_is_told_soon(world: World) -> None:
    world.clock.run(60)
    world.deaf = True
    world.on_stopped({1})
    world.clock.run(3)
    assert world.verbs == ["proc.unresponsive"]


def test_a_silent_process_without_a_signal_is_reported_in_the_end(world: World) -> None:
    world.clock.run(60)
    world.deaf = True
    world.clock.run(20)
    assert world.verbs == ["proc.unresponsive"]


def test_many_silent_processes_are_one_message_to_their_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world(monkeypatch, 256)
    world.deaf = True
    world.clock.run(30)
    assert world.messages == [("h/c", "proc.unresponsive", 256)]
    for child in world.children:
        world.monitor.pong(child)
    world.clock.run(0)
    assert world.messages[1:] == [("h/c", "proc.responsive", 256)]


def test_a_machine_that_delays_all_answers_makes_none_unresponsive(monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world(monkeypatch, 64)
    world.ran = None
    for delay in (0.2, 0.5, 1.0, 1.5, 2.5, 4.0, 4.0, 4.0):
        world.delay = delay
        world.clock.run(15)
    assert world.messages == []
    world.delay = 0.0
    world.clock.run(30)
    world.deaf = True
    world.clock.run(5)
    assert [name for _, name, _ in world.messages] == ["proc.unresponsive"], "patience is as short as before"


def test_an_answer_that_a_busy_agent_has_not_read_yet_counts(world: World) -> None:
    world.deaf = world.unread = True
    world.clock.run(60)
    assert world.verbs == []


def test_procs_that_sleep_are_not_all_asked_at_one_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world(monkeypatch, 256)
    world.clock.run(60)
    pings = []
    for _ in range(16):
        before = world.pings
        world.clock.run(1)
        pings.append(world.pings - before)
    assert max(pings) < 200
