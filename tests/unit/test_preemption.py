"""Notices of preemption: how an agent handles them, and how many seconds an engine leaves."""

from collections.abc import Callable
from datetime import datetime
from typing import Any

import msgspec
import pytest

from monarch_nb.host import preemption
from monarch_nb.host.preemption import BURST_S, LATE_S, UNKNOWN_S, Preemption, grace
from monarch_nb.host.protocol import PreemptionNotice
from monarch_nb.job.worker import of_slurm

pytestmark = pytest.mark.timeout(10)


class Host:
    """The agent around it: its users, their notices, and whether it has ended."""

    def __init__(self) -> None:
        self.now = 100.0
        self.using = {"c/1", "h1/p"}
        self.notices: list[tuple[str, float | None, bool]] = []
        self.ended: list[str] = []
        self.due: list[tuple[float, Callable[[], None]]] = []
        sender: Any = self
        self.preemption = Preemption(
            sender, service=self, call_later=self.later, give_up=self.ended.append, now=lambda: self.now
        )

    @property
    def used(self) -> bool:
        return bool(self.using)

    def users(self) -> set[str]:
        return set(self.using)

    def post_all(self, addresses: set[str], verb: Any, notice: PreemptionNotice) -> None:
        self.notices += [(address, notice.seconds, notice.over) for address in sorted(addresses)]

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        self.due.append((self.now + seconds, call))

    def advance(self, seconds: float) -> None:
        end = self.now + seconds
        while due := [entry for entry in self.due if entry[0] <= end]:
            first = min(due, key=lambda entry: entry[0])
            self.due.remove(first)
            self.now = max(self.now, first[0])
            first[1]()
        self.now = end


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    monkeypatch.delenv(preemption.GRACE, raising=False)
    return Host()


def line(**fields: Any) -> bytes:
    return msgspec.json.encode(PreemptionNotice(by="Slurm", **fields)) + b"\n"


def test_all_who_use_a_host_are_told_and_it_goes_on(host: Host) -> None:
    host.preemption.receive(line(seconds=30.0))
    assert host.notices == [("c/1", 30, False), ("h1/p", 30, False)]
    host.advance(29)
    assert host.ended == []
    assert len(host.notices) == 2


def test_late_subscribers_learn_the_remaining_time(host: Host) -> None:
    host.preemption.receive(line(seconds=30.0))
    host.notices.clear()
    host.using.add("c/2")
    host.advance(10)
    assert host.notices == [("c/2", 29.5, False)]


def test_a_preempted_host_without_users_ends_at_once(host: Host) -> None:
    host.preemption.receive(line())
    host.using.clear()
    host.advance(1)
    assert len(host.ended) == 1
    idle = Host()
    idle.using.clear()
    idle.preemption.terminated()
    assert len(idle.ended) == 1
    assert host.notices[2:] == idle.notices == []


def test_a_second_sigterm_ends_it_at_once(host: Host) -> None:
    host.preemption.terminated()
    assert host.ended == []
    host.advance(BURST_S)
    host.preemption.terminated()
    assert host.ended == ["the host agent was terminated"]


def test_signals_of_one_burst_are_one_notice(host: Host) -> None:
    for _ in range(3):
        host.preemption.terminated()
    host.advance(1)
    host.preemption.terminated()
    assert host.ended == []
    assert host.notices == [("c/1", None, False), ("h1/p", None, False)]


@pytest.mark.parametrize(("seconds", "passed"), [(30.0, 30 + LATE_S), (None, UNKNOWN_S)])
def test_a_notice_without_consequences_passes_and_the_host_is_normal(
    host: Host, seconds: float | None, passed: float
) -> None:
    host.preemption.terminated()
    host.preemption.handle(PreemptionNotice(by="spot", seconds=seconds))
    host.notices.clear()
    host.advance(passed - 1)
    assert host.notices == []
    host.advance(2)
    assert host.notices == [("c/1", seconds, True), ("h1/p", seconds, True)]
    host.notices.clear()
    [final] = host.preemption.since(0.0)
    assert (final.by, final.over) == ("spot", True)
    assert host.preemption.since(final.at + 1) == ()
    host.preemption.terminated()  # the first again
    host.advance(1)
    assert [notice.over for notice in host.preemption.since(0.0)] == [True, False]
    assert host.ended == []
    assert host.notices == [("c/1", None, False), ("h1/p", None, False)]


def test_two_notices_at_once_are_one_and_the_better_word_counts(host: Host) -> None:
    host.preemption.terminated()
    host.advance(0.1)
    host.preemption.receive(line(seconds=20.0))
    host.preemption.receive(line())
    host.advance(1)
    assert [seconds for _, seconds, _ in host.notices] == [20, 20]
    host.preemption.receive(line(seconds=10.0))
    assert [seconds for _, seconds, _ in host.notices[2:]] == [10, 10]
    host.advance(4)
    assert [notice.seconds for notice in host.preemption.since(0.0)] == [6]


def test_garbage_on_the_pipe_is_no_notice(host: Host) -> None:
    host.preemption.receive(b'\xff{}\n[]\n{"by": 3}\n')
    assert host.notices == []
    host.advance(UNKNOWN_S + 1)
    assert host.ended == []


@pytest.mark.parametrize(("text", "seconds"), [("30", 30), ("1.5", 1.5), ("", None), ("soon", None), ("-3", None),
                                               ("inf", None), ("nan", None)])  # fmt: skip
def test_an_agents_environment_may_set_how_long_its_engine_waits(text: str, seconds: float | None) -> None:
    assert grace({preemption.GRACE: text} if text else {}) == seconds


NOW = datetime.fromisoformat("2024-05-06T10:00:00").timestamp()
CONFIG = "Configuration data as of 2024-05-06T10:00:00\nKillOnBadExit           = 0\nKillWait                = 30 sec\n"


@pytest.mark.parametrize(
    ("job", "by", "seconds"),
    [
        ("JobState=RUNNING EndTime=2024-05-06T10:02:00 PreemptTime=None", "ends soon", 120),
        ("JobState=RUNNING EndTime=2024-05-06T10:00:45 PreemptTime=2024-05-06T09:59:45", "is preempted", 45),
        ("JobState=RUNNING EndTime=Unknown", "ends soon", None),
        ("JobState=COMPLETING EndTime=2024-05-06T10:00:00", "is being ended", 30),
        ("JobState=TIMEOUT EndTime=2024-05-06T10:00:00", "has reached its time limit", 30),
        ("JobState=CANCELLED EndTime=2024-05-06T10:00:00", "was cancelled", 30),
    ],
)
def test_slurm_says_how_long_a_job_has(job: str, by: str, seconds: float | None) -> None:
    assert of_slurm("17", f"JobId=17 JobName=m {job} Requeue=0", CONFIG, NOW) == PreemptionNotice(
        by=f"Slurm job 17 {by}", seconds=seconds
    )


def test_where_slurm_does_not_answer_nobody_knows_how_long() -> None:
    assert of_slurm("17", "", "", NOW) == PreemptionNotice(by="Slurm job 17 is being ended", seconds=None)
