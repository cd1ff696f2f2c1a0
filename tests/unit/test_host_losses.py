"""Hosts that are lost by one event are reported together."""

import threading
from collections.abc import Mapping

import pytest

from monarch_nb.connect.routes import HostLosses
from tests.polling import until

pytestmark = [pytest.mark.timeout(30)]


class Reports:
    """Collects the reports about hosts, whose jobs are the first letters of their names."""

    def __init__(self, *cut_off: str, seconds: float = 20.0) -> None:
        self.entries: list[tuple[dict[str, int], str]] = []
        self.losses = HostLosses(lambda host: host[0], self._take, seconds)
        for host in cut_off:
            self.losses.suspect(host)

    def _take(self, agents: Mapping[str, int], reason: str) -> None:
        self.entries.append((dict(agents), reason))

    def lose(self, host: str, reason: str, incarnation: int = 1, *, explained: bool = True) -> None:
        def run() -> None:
            self.losses.lost(host, reason, incarnation, explained=explained)

        threading.Thread(target=run, daemon=True).start()

    def wait(self, count: int) -> list[tuple[dict[str, int], str]]:
        until(lambda: len(self.entries) == count, "the reports")
        return self.entries


def test_hosts_of_one_job_are_one_report() -> None:
    reports = Reports("a1", "a2", "a3", "b1")
    for number in (1, 2, 3):
        reports.lose(f"a{number}", "the job was cancelled", number)
    [(agents, reason)] = reports.wait(1)
    assert (agents, reason) == ({"a1": 1, "a2": 2, "a3": 3}, "the job was cancelled")


@pytest.mark.parametrize("reconnects", [True, False], ids=["back", "cut off"])
def test_a_loss_waits_briefly_for_hosts_out_of_touch(reconnects: bool) -> None:
    reports = Reports("a2", seconds=20.0 if reconnects else 0.2)
    reports.lose("a1", "its node failed")
    if reconnects:
        reports.losses.clear("a2")
    assert reports.wait(1) == [({"a1": 1}, "its node failed")]
    reports.lose("a2", "no connection for 60 s")
    assert reports.wait(2)[1] == ({"a2": 1}, "no connection for 60 s")


def test_the_engine_replaces_a_reason_and_different_ones_are_listed() -> None:
    reports = Reports("a1", "a2")
    reports.lose("a1", "its agent has ended", explained=False)
    reports.lose("a2", "its agent has ended")
    until(lambda: reports.losses.awaits("a1") and "a2" not in reports.losses._uncertain, "both losses")
    reports.losses.explain("a1", "out of memory")
    [(agents, reason)] = reports.wait(1)
    assert set(agents) == {"a1", "a2"}
    assert sorted(reason.splitlines()) == ["  a1: out of memory", "  a2: its agent has ended", "for several reasons"]


def test_a_host_given_up_before_the_report_is_no_loss() -> None:
    reports = Reports("a1")
    reports.lose("a2", "its agent has ended")
    until(lambda: "a" in reports.losses._events, "it waits for the other host")
    reports.losses.clear("a2")
    reports.losses.clear("a1")
    until(lambda: not reports.losses._events, "the end of the wait")
    assert reports.entries == []
