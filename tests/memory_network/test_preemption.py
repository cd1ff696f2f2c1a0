"""A host is about to be taken away: its owners get notice before anything fails."""

import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from monarch_nb.actor import Actor, HostMesh, MeshFailure, ProcMesh, endpoint
from monarch_nb.host.protocol import PreemptionNotice
from monarch_nb.lifecycle.watching import HostNotices
from monarch_nb.runtime import current_runtime
from monarch_nb.testing import Cluster

pytestmark = [pytest.mark.timeout(60)]
HOSTS = 3


class Trainer(Actor):
    def __init__(self) -> None:
        self.steps = 0

    @endpoint
    def step(self) -> int:
        self.steps += 1
        return self.steps

    @endpoint
    def save(self) -> int:
        return self.steps


class Keeper(Actor):
    """Owns trainers, and saves those that are about to end."""

    def __init__(self, hosts: HostMesh, how: str) -> None:
        self.how = how
        self.procs = hosts.spawn_procs(name="trained")
        self.trainers = self.procs.spawn("trainers", Trainer)
        self.reports: list[tuple[bool, list[int], str, float | None]] = []
        self.saved: list[int] = []
        self.last = ""

    @endpoint
    def step(self) -> list[int]:
        return list(self.trainers.step.call().get(20).values())

    @endpoint
    def heard(self) -> tuple[list[tuple[bool, list[int], str, float | None]], list[int]]:
        return self.reports, self.saved

    @endpoint
    def text(self) -> str:
        return self.last

    def __supervise__(self, failure: MeshFailure) -> bool:
        exact = failure.seconds_left
        seconds = None if exact is None else round(exact)
        self.reports.append((failure.preempted, failure.crashed_ranks, failure.where, seconds))
        self.last = failure.report()
        if self.how == "raises":
            raise ValueError("no")
        if failure.preempted:
            self.saved += self.trainers.slice(hosts=1).save.call().get(20).values()
        return self.how == "handles"


@pytest.fixture
def hosts(simulated: Cluster) -> HostMesh:
    return simulated.hosts().slice(hosts=slice(0, 2))


@pytest.fixture
def shown(simulated: Cluster) -> Iterator[list[str]]:
    lines: list[str] = []
    notices = current_runtime().part(HostNotices)
    notices.present(lambda event: lines.append(event.text))
    yield lines
    notices.present(None)


@pytest.fixture
def keeper(simulated: Cluster) -> Iterator[Callable[[HostMesh, str], Any]]:
    """Makes an owner of trainers on some hosts."""
    meshes: list[ProcMesh] = []

    def make(hosts: HostMesh, how: str) -> Any:
        meshes.append(simulated.this_host().spawn_procs({"one": 1}, name="beside"))
        return meshes[-1].spawn("keeper", Keeper, hosts, how).slice(one=0)

    yield make
    for procs in meshes:
        procs.stop().get(20)


@pytest.mark.parametrize("how", ["handles", "does not handle", "raises"])
def test_the_owner_gets_notice_with_the_seconds_left_and_nothing_fails(
    simulated: Cluster, keeper: Callable[[HostMesh, str], Any], hosts: HostMesh, how: str
) -> None:
    owner = keeper(hosts, how)
    assert owner.step.call_one().get(20) == [1, 1]
    simulated.preempt_host(1, 30)
    reports, saved = owner.heard.call_one().get(20)
    assert reports == [(True, [], "hosts=1", 30)]
    assert saved == ([1] if how != "raises" else [])
    assert owner.step.call_one().get(20) == [2, 2]
    assert simulated.failures == []


def test_a_failure_after_a_notice_says_how_long_ago_it_was(
    simulated: Cluster, keeper: Callable[[HostMesh, str], Any], shown: list[str]
) -> None:
    owner = keeper(simulated.hosts().slice(hosts=slice(0, 3, 2)), "handles")
    owner.step.call_one().get(20)
    simulated.preempt_host(2, 30, "the night")
    simulated.kill_host(2)
    reports, _ = owner.heard.call_one().get(20)
    assert [(preempted, ranks) for preempted, ranks, _, _ in reports] == [(True, []), (False, [1])]
    assert re.search(r"its machine is gone, 0 s after the notice of that \(the night\)", owner.text.call_one().get(20))
    simulated.keep_host(2)  # too late
    assert len(shown) == 1


def test_the_notice_names_the_host_its_time_and_the_remedy(
    simulated: Cluster, hosts: HostMesh, shown: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    procs = hosts.spawn_procs(name="trained")
    procs.spawn("trainers", Trainer).step.call().get(20)
    simulated.preempt_host(1, 30, "Slurm job 7 has reached its time limit")
    simulated.preempt_host(0)
    assert shown == [
        """Host m1 is about to be taken away (Slurm job 7 has reached its time limit), in 30 s:
  trained, hosts=1 with trainers
  next: save what is there; trained.shrink(hosts=[1]) goes on without it; once it is lost, heal_mesh(trained, \
replace=True) takes another host""",
        """Host m0 is about to be taken away (SIGTERM), soon; nobody knows when:
  trained, hosts=0 with trainers
  next: save what is there; trained.shrink(hosts=[0]) goes on without it; once it is lost, heal_mesh(trained, \
replace=True) takes another host""",
    ]
    seconds = procs.preempted
    assert (list(seconds), seconds["m0"], round(seconds["m1"] or 0)) == (["m0", "m1"], None, 30)
    assert list(procs.slice(hosts=1).preempted) == ["m1"]
    simulated.keep_host(1)
    assert list(procs.preempted) == ["m0"]
    assert shown[2:] == ["Host m1 was to be taken away (Slurm job 7 has reached its time limit), and is still there: "
                         "it is as before"]  # fmt: skip
    simulated.keep_host(1)  # reported only once
    assert len(shown) == 3
    current_runtime().part(HostNotices).present(None)
    with caplog.at_level(logging.WARNING):
        simulated.preempt_host(1, 5)
    assert "Host m1 is about to be taken away (SIGTERM), in 5 s" in caplog.text
    procs.stop().get(20)


def test_notices_for_all_hosts_of_a_job_at_once_are_one(
    simulated: Cluster, keeper: Callable[[HostMesh, str], Any], hosts: HostMesh, shown: list[str]
) -> None:
    owner = keeper(hosts, "handles")
    owner.step.call_one().get(20)
    for number in (0, 1):
        simulated._hosts[f"m{number}"].warn(PreemptionNotice(by="Slurm", seconds=30.0 - number, at=1.0), "m0/c0.0.0")
    simulated.settle()
    simulated.advance(1)
    reports, _ = owner.heard.call_one().get(20)
    assert reports == [(True, [], "all 2 ranks", 29)]
    assert owner.text.call_one().get(20).startswith("2 hosts (m0, m1) are about to be taken away (Slurm), in 29 s\n")
    assert len(shown) == 1
    assert "shrink" not in shown[0], "nothing would stay"
