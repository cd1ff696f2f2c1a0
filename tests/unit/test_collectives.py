"""Which waits in process groups will not end by themselves, and ports for the next groups."""

import os
import socket
import sys

import pytest

from monarch_nb.collectives.environment import _interface_to, free_port, fresh_number, gloo_interface, of_rank
from monarch_nb.collectives.service import deserted
from monarch_nb.collectives.verbs import GroupKey, ThreadWaits

pytestmark = pytest.mark.timeout(20)

ALL = GroupKey.of("0", (0, 1, 2), "h:1")
FIRST = GroupKey.of("1", (0, 1), "h:1")
LAST = GroupKey.of("2", (1, 2), "h:1")


def test_only_groups_left_by_a_rank_are_deserted() -> None:
    waits = {
        0: ThreadWaits(True, (FIRST,), member_of=(ALL, FIRST)),
        1: ThreadWaits(True, (LAST,), member_of=(ALL, FIRST, LAST)),
        2: ThreadWaits(member_of=(ALL, LAST)),
    }
    assert deserted(waits, {0, 1}) == {1: ((LAST,), False)}
    waits[1] = ThreadWaits(member_of=(ALL, FIRST, LAST))  # freed by an exception
    assert deserted(waits, {0}) == {0: ((FIRST,), False)}


def test_ranks_of_another_world_with_the_same_names_are_no_members() -> None:
    foreign_group = GroupKey.of("0", (0, 1, 2), "h:2")
    waits = {0: ThreadWaits(True, (ALL,), member_of=(ALL,)), 1: ThreadWaits(member_of=(foreign_group,))}
    assert deserted(waits, {0}) == {}


def test_a_rank_that_computes_leaves_groups_that_its_call_has_used() -> None:
    waits = {0: ThreadWaits(True, used=(ALL,), member_of=(ALL, FIRST)), 1: ThreadWaits(member_of=(ALL, FIRST))}
    assert deserted(waits, {0}) == {0: ((ALL,), False)}
    assert deserted({**waits, 0: ThreadWaits(True, member_of=(ALL,))}, {0}) == {}


def test_joining_after_somebody_has_answered_waits_in_vain() -> None:
    assert deserted({0: ThreadWaits(True, joins=True), 1: ThreadWaits()}, {0}) == {0: ((), True)}
    assert deserted({0: ThreadWaits(True, joins=True), 1: ThreadWaits(True)}, {0, 1}) == {}
    assert deserted({1: ThreadWaits()}, {0}) == {}  # it has not answered yet


def test_the_environment_is_torchruns() -> None:
    env = of_rank(5, 8, 1, 4, ("h", 15001))
    assert (env["GROUP_RANK"], env["GROUP_WORLD_SIZE"], env["LOCAL_WORLD_SIZE"]) == ("1", "2", "4")
    assert all(isinstance(value, str) for value in env.values())
    port = free_port()
    assert free_port((port,)) != port
    assert fresh_number() < fresh_number()


@pytest.mark.parametrize("members", [(), (3,), (0, 1, 2, 3), (1, 5), (0, 8, 16, 24), (0, 1, 2, 8, 9, 10, 40)])
def test_the_key_of_a_group_is_short_and_has_all_members(members: tuple[int, ...]) -> None:
    key = GroupKey.of("0", members, "h:1")
    assert (tuple(key.members), key.size) == (members, len(members))
    assert len(GroupKey.of("0", range(0, 10_000, 8), "").runs) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="gloo is given interfaces on Linux alone")
@pytest.mark.parametrize(
    ("hosts", "own_name", "named", "expected"),
    [
        ("2", "127.0.0.1", None, "ours"),
        ("1", "127.0.0.1", None, None),
        ("2", "192.0.2.7", None, None),
        ("2", "127.0.0.1", "eth7", "eth7"),
    ],
)
def test_gloo_listens_where_other_machines_reach_it(
    monkeypatch: pytest.MonkeyPatch, hosts: str, own_name: str, named: str | None, expected: str | None
) -> None:
    names, lookup = {"own": own_name, "store": "192.0.2.7"}, socket.getaddrinfo
    monkeypatch.setattr(socket, "gethostname", lambda: "own")
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *rest, **more: lookup(names[host], *rest, **more))
    interface = {"store": "ours"}.__getitem__
    monkeypatch.setattr("monarch_nb.collectives.environment._interface_to", interface)
    monkeypatch.setenv("GROUP_WORLD_SIZE", hosts)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    if named:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", named)
    with gloo_interface("store"):
        assert os.environ.get("GLOO_SOCKET_IFNAME") == expected
    assert os.environ.get("GLOO_SOCKET_IFNAME") == named


@pytest.mark.skipif(sys.platform != "linux", reason="gloo is given interfaces on Linux alone")
def test_the_interface_to_this_machine_itself_is_the_loopback_one() -> None:
    assert _interface_to("127.0.0.1") == "lo"
