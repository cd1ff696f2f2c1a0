"""Who holds a mesh that may outlive its owner, and until when: no I/O, times are given."""

import pytest

from monarch_nb.host.mesh_leases import HeldError, MeshLease, MeshLeases
from monarch_nb.host.protocol import Exited, Hold, MeshHolder

pytestmark = pytest.mark.timeout(10)

FIRST = MeshHolder(address="h1/c1.0.0", pid=1, machine="here", what="the kernel of train.ipynb", since=0.0)
SECOND = MeshHolder(address="h2/c2.0.0", pid=2, machine="there")
THIRD = MeshHolder(address="h3/c3.0.0", pid=3, machine="there")


def wanted(uid: str = "p1", *, keep: bool = False, holder: MeshHolder = FIRST, **more: object) -> Hold:
    given = {"uid": uid, "name": "trainers", "secret": "s", "seconds": 10.0, "keep": keep, "holder": holder, **more}
    return Hold(**given)  # type: ignore[arg-type]


def held(*, keep: bool = False) -> MeshLeases:
    holdings = MeshLeases()
    holdings.hold(wanted(keep=keep), FIRST.address)
    return holdings


def left(at: float = 0.0) -> MeshLeases:
    holdings = held()
    holdings.leave("p1", FIRST.address, at, 1000.0, "it was detached")
    return holdings


def one(holdings: MeshLeases) -> MeshLease:
    found = holdings.get("p1")
    assert found is not None
    return found


def test_a_mesh_to_be_kept_is_left_when_its_owner_ends() -> None:
    holdings = held(keep=True)
    kept, over = holdings.owner_gone(FIRST.address, 5.0, 1000.0, "it was killed")
    assert [mesh.uid for mesh in kept] == ["p1"]
    assert over == []
    assert one(holdings).detached
    assert one(holdings).why == "it was killed"


def test_without_that_it_ends_with_its_owner() -> None:
    holdings = held()
    kept, over = holdings.owner_gone(FIRST.address, 5.0, 1000.0, "it was killed")
    assert (kept, [mesh.uid for mesh in over]) == ([], ["p1"])
    assert not holdings


def test_the_end_of_somebody_else_changes_nothing() -> None:
    holdings = held(keep=True)
    assert holdings.owner_gone(SECOND.address, 5.0, 1000.0, "") == ([], [])
    assert not one(holdings).detached


def test_a_lease_runs_from_the_detach_and_ends_once() -> None:
    holdings = left(at=100.0)
    assert holdings.due(103.0) == 7.0
    assert holdings.expired(109.9) == []
    assert [mesh.uid for mesh in holdings.expired(110.0)] == ["p1"]
    assert holdings.expired(200.0) == []
    assert holdings.due(200.0) is None


def test_no_lease_runs_while_somebody_has_the_mesh() -> None:
    holdings = left()
    holdings.attach("p1", "s", SECOND)
    assert holdings.due(0.0) is None
    assert holdings.expired(1e9) == []


def test_of_two_simultaneous_claimants_one_succeeds_and_the_other_learns_who() -> None:
    holdings = left()
    assert holdings.attach("p1", "s", FIRST) is None
    with pytest.raises(HeldError, match=r"held by the kernel of train.ipynb \(process 1 on here\) since .*--steal"):
        holdings.attach("p1", "s", SECOND)
    assert one(holdings).holder == FIRST


def test_the_new_owner_learns_who_had_the_mesh() -> None:
    holdings = left()
    holdings.attach("p1", "s", FIRST)
    assert holdings.attach("p1", "s", SECOND, steal=True) == FIRST
    assert one(holdings).holder == SECOND


def test_to_attach_again_what_one_has_is_no_theft() -> None:
    holdings = left()
    holdings.attach("p1", "s", FIRST)
    assert holdings.attach("p1", "s", FIRST) is None


def test_a_wrong_secret_and_an_unknown_mesh_are_refused() -> None:
    holdings = left()
    with pytest.raises(HeldError, match="secret"):
        holdings.attach("p1", "another", SECOND)
    with pytest.raises(HeldError, match="not there any more"):
        holdings.attach("p2", "s", SECOND)
    assert one(holdings).detached


def test_other_hosts_follow_the_latest_grant_of_the_first() -> None:
    holdings = left()
    holdings.attach("p1", "s", SECOND, grant=5)
    with pytest.raises(HeldError, match="later"):
        holdings.attach("p1", "s", FIRST, grant=4)
    assert holdings.attach("p1", "s", THIRD, grant=6) == SECOND
    assert one(holdings).holder == THIRD


def test_a_restarted_first_host_resumes_from_the_owners_record() -> None:
    other = left()
    other.attach("p1", "s", FIRST, grant=5, turn=9)
    anew = MeshLeases()
    anew.hold(wanted(grant=5, turn=9), FIRST.address)
    anew.attach("p1", "s", SECOND, steal=True)
    assert (one(anew).grant, one(anew).turn) == (6, 10)
    assert other.attach("p1", "s", SECOND, grant=6, turn=10) == FIRST
    assert one(other).turn == one(anew).turn


def test_only_the_owner_may_detach_a_mesh_or_change_its_lease() -> None:
    holdings = held()
    holdings.attach("p1", "s", SECOND, steal=True)
    with pytest.raises(HeldError, match="cannot be left"):
        holdings.leave("p1", FIRST.address, 0.0, 0.0, "")
    with pytest.raises(HeldError, match="not yours any more"):
        holdings.hold(wanted(), FIRST.address)
    with pytest.raises(HeldError, match="not known"):
        holdings.leave("p2", FIRST.address, 0.0, 0.0, "")


def test_each_change_of_hands_has_a_later_number() -> None:
    holdings = held()
    turns = [one(holdings).turn]
    for holder in (FIRST, SECOND, THIRD):
        if not one(holdings).detached:
            now = one(holdings).holder
            assert now is not None
            holdings.leave("p1", now.address, 0.0, 0.0, "")
            turns.append(one(holdings).turn)
        holdings.attach("p1", "s", holder)
        turns.append(one(holdings).turn)
    assert turns == sorted(set(turns))


def test_ends_of_procs_are_kept_while_nobody_has_the_mesh() -> None:
    holdings = held()
    gone = Exited(address="h1/p1.0.0", host="h1", reason="it was killed")
    holdings.exited("p1", gone)
    assert list(one(holdings).exits) == []
    holdings.leave("p1", FIRST.address, 0.0, 0.0, "")
    holdings.exited("p1", gone)
    assert list(one(holdings).exits) == [gone]


def test_parts_are_replaced_by_name_and_empty_ones_taken_out() -> None:
    holdings = MeshLeases()
    holdings.hold(wanted(parts={"procs": b"1", "a": b"2"}), FIRST.address)
    holdings.hold(wanted(parts={"a": b"", "b": b"3"}), FIRST.address)
    assert one(holdings).parts == {"procs": b"1", "b": b"3"}


def test_meshes_given_up_with_a_host_are_kept_there_no_more() -> None:
    holdings = left()  # as the agent took its owner for dead
    with pytest.raises(HeldError, match="secret"):
        holdings.drop("p1", "another", FIRST.address)
    holdings.drop("p1", "s", FIRST.address)
    assert not holdings
    holdings.drop("p1", "s", FIRST.address)


def test_nobody_drops_what_another_controller_holds() -> None:
    holdings = left()
    holdings.attach("p1", "s", SECOND)
    with pytest.raises(HeldError, match=r"trainers is held by .*process 2 on there"):
        holdings.drop("p1", "s", FIRST.address)
    assert one(holdings).holder == SECOND
