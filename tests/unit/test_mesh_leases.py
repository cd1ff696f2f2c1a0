"""The holder and lease of a mesh that may outlive its owner: no I/O, times are arguments."""

import pytest

from monarch_nb.host.mesh_leases import HeldError, MeshLease, MeshLeases
from monarch_nb.host.protocol import Exited, Hold, MeshHolder

pytestmark = pytest.mark.timeout(10)

FIRST = MeshHolder(address="h1/c1.0.0", pid=1, machine="here", what="the kernel of train.ipynb", since=0.0)
SECOND = MeshHolder(address="h2/c2.0.0", pid=2, machine="there")
THIRD = MeshHolder(address="h3/c3.0.0", pid=3, machine="there")


def make_hold(uid: str = "p1", *, keep: bool = False, holder: MeshHolder = FIRST, **more: object) -> Hold:
    fields = {"uid": uid, "name": "trainers", "secret": "s", "seconds": 10.0, "keep": keep, "holder": holder, **more}
    return Hold(**fields)  # type: ignore[arg-type]


def held_leases(*, keep: bool = False) -> MeshLeases:
    holdings = MeshLeases()
    holdings.hold(make_hold(keep=keep), FIRST.address)
    return holdings


def detached_leases(now: float = 0.0) -> MeshLeases:
    holdings = held_leases()
    holdings.leave("p1", FIRST.address, now, 1000.0, "it was detached")
    return holdings


def lease_of(holdings: MeshLeases) -> MeshLease:
    lease = holdings.get("p1")
    assert lease is not None
    return lease


def test_a_mesh_to_be_kept_is_left_when_its_owner_ends() -> None:
    holdings = held_leases(keep=True)
    remaining, ended = holdings.owner_gone(FIRST.address, 5.0, 1000.0, "it was killed")
    assert [mesh.uid for mesh in remaining] == ["p1"]
    assert ended == []
    assert lease_of(holdings).detached
    assert lease_of(holdings).why == "it was killed"


def test_without_that_it_ends_with_its_owner() -> None:
    holdings = held_leases()
    remaining, ended = holdings.owner_gone(FIRST.address, 5.0, 1000.0, "it was killed")
    assert (remaining, [mesh.uid for mesh in ended]) == ([], ["p1"])
    assert not holdings


def test_the_end_of_somebody_else_changes_nothing() -> None:
    holdings = held_leases(keep=True)
    assert holdings.owner_gone(SECOND.address, 5.0, 1000.0, "") == ([], [])
    assert not lease_of(holdings).detached


def test_a_lease_runs_from_the_detach_and_ends_once() -> None:
    holdings = detached_leases(now=100.0)
    assert holdings.due(103.0) == 7.0
    assert holdings.expired(109.9) == []
    assert [mesh.uid for mesh in holdings.expired(110.0)] == ["p1"]
    assert holdings.expired(200.0) == []
    assert holdings.due(200.0) is None


def test_no_lease_runs_while_somebody_has_the_mesh() -> None:
    holdings = detached_leases()
    holdings.attach("p1", "s", SECOND)
    assert holdings.due(0.0) is None
    assert holdings.expired(1e9) == []


def test_of_two_simultaneous_claimants_one_succeeds_and_the_other_learns_who() -> None:
    holdings = detached_leases()
    with pytest.raises(HeldError, match="not yours any more: trainers was left"):
        holdings.check("p1", FIRST.address)
    assert holdings.attach("p1", "s", FIRST) is None
    holdings.check("p1", FIRST.address)
    with pytest.raises(HeldError, match=r"held by the kernel of train.ipynb \(process 1 on here\) since .*--steal"):
        holdings.attach("p1", "s", SECOND)
    assert lease_of(holdings).holder == FIRST


def test_the_new_owner_learns_who_had_the_mesh() -> None:
    holdings = detached_leases()
    holdings.attach("p1", "s", FIRST)
    assert holdings.attach("p1", "s", SECOND, steal=True) == FIRST
    assert lease_of(holdings).holder == SECOND


def test_to_attach_again_what_one_has_is_no_theft() -> None:
    holdings = detached_leases()
    holdings.attach("p1", "s", FIRST)
    assert holdings.attach("p1", "s", FIRST) is None


def test_a_wrong_secret_and_an_unknown_mesh_are_refused() -> None:
    holdings = detached_leases()
    with pytest.raises(HeldError, match="secret"):
        holdings.attach("p1", "another", SECOND)
    with pytest.raises(HeldError, match="not there any more"):
        holdings.attach("p2", "s", SECOND)
    assert lease_of(holdings).detached


def test_other_hosts_follow_the_latest_grant_of_the_first() -> None:
    holdings = detached_leases()
    holdings.attach("p1", "s", SECOND, grant=5)
    with pytest.raises(HeldError, match="later"):
        holdings.attach("p1", "s", FIRST, grant=4)
    assert holdings.attach("p1", "s", THIRD, grant=6) == SECOND
    assert lease_of(holdings).holder == THIRD


def test_a_restarted_first_host_resumes_from_the_owners_record() -> None:
    second_host = detached_leases()
    second_host.attach("p1", "s", FIRST, grant=5, turn=9)
    first_host = MeshLeases()
    first_host.hold(make_hold(grant=5, turn=9), FIRST.address)
    first_host.attach("p1", "s", SECOND, steal=True)
    assert (lease_of(first_host).grant, lease_of(first_host).turn) == (6, 10)
    assert second_host.attach("p1", "s", SECOND, grant=6, turn=10) == FIRST
    assert lease_of(second_host).turn == lease_of(first_host).turn


def test_only_the_owner_may_detach_a_mesh_or_change_its_lease() -> None:
    holdings = held_leases()
    holdings.attach("p1", "s", SECOND, steal=True)
    with pytest.raises(HeldError, match="cannot be left"):
        holdings.leave("p1", FIRST.address, 0.0, 0.0, "")
    with pytest.raises(HeldError, match="not yours any more"):
        holdings.hold(make_hold(), FIRST.address)
    with pytest.raises(HeldError, match="not known"):
        holdings.leave("p2", FIRST.address, 0.0, 0.0, "")


def test_each_change_of_hands_has_a_later_number() -> None:
    holdings = held_leases()
    turns = [lease_of(holdings).turn]
    for holder in (FIRST, SECOND, THIRD):
        if not lease_of(holdings).detached:
            now = lease_of(holdings).holder
            assert now is not None
            holdings.leave("p1", now.address, 0.0, 0.0, "")
            turns.append(lease_of(holdings).turn)
        holdings.attach("p1", "s", holder)
        turns.append(lease_of(holdings).turn)
    assert turns == sorted(set(turns))


def test_ends_of_procs_are_kept_while_nobody_has_the_mesh() -> None:
    holdings = held_leases()
    death = Exited(address="h1/p1.0.0", host="h1", reason="it was killed")
    holdings.exited("p1", death)
    assert list(lease_of(holdings).exits) == []
    holdings.leave("p1", FIRST.address, 0.0, 0.0, "")
    holdings.exited("p1", death)
    assert list(lease_of(holdings).exits) == [death]


def test_parts_are_replaced_by_name_and_empty_ones_taken_out() -> None:
    holdings = MeshLeases()
    holdings.hold(make_hold(parts={"procs": b"1", "a": b"2"}), FIRST.address)
    holdings.hold(make_hold(parts={"a": b"", "b": b"3"}), FIRST.address)
    assert lease_of(holdings).parts == {"procs": b"1", "b": b"3"}


def test_meshes_given_up_with_a_host_are_kept_there_no_more() -> None:
    holdings = detached_leases()  # the agent took its owner for dead
    with pytest.raises(HeldError, match="secret"):
        holdings.drop("p1", "another", FIRST.address)
    holdings.drop("p1", "s", FIRST.address)
    assert not holdings
    holdings.drop("p1", "s", FIRST.address)


def test_nobody_drops_what_another_controller_holds() -> None:
    holdings = detached_leases()
    holdings.attach("p1", "s", SECOND)
    with pytest.raises(HeldError, match=r"trainers is held by .*process 2 on there"):
        holdings.drop("p1", "s", FIRST.address)
    assert lease_of(holdings).holder == SECOND
