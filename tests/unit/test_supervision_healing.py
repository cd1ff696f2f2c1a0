"""Heals: which ranks come back, in which order, who is answered, and their limit."""

from typing import Any

import pytest

from monarch_nb.supervision import (
    Action,
    Cause,
    Healed,
    HealRefused,
    MeshSpec,
    Recreate,
    Respawn,
    RootFault,
    StopOwnedMesh,
    Supervise,
    SupervisionMachine,
)

KILLED = Cause(kind="signal", signal=9)
RAISED = Cause(kind="exception", text="ValueError: no")

pytestmark = pytest.mark.timeout(10)


def spec(uid: str, on: str | None = None) -> MeshSpec:
    return MeshSpec(
        uid=uid,
        name=uid.lower(),
        kind="procs" if on is None else "actors",
        ranks=range(4),
        extent=(("gpus",), (4,)),
        on=on,
    )


def machine(**options: Any) -> SupervisionMachine:
    """Procs P with actors A, then B, all the root's."""
    supervised = SupervisionMachine(root="root", **options)
    for uid, on in (("P", None), ("A", "P"), ("B", "P")):
        supervised.own("root", spec(uid, on))
    return supervised


def heals(actions: list[Action]) -> list[Action]:
    return [a for a in actions if isinstance(a, Respawn | Recreate | Healed | HealRefused | StopOwnedMesh)]


def heal_all(supervised: SupervisionMachine, uid: str, now: float, request: int = 0) -> Action:
    """Carries a heal to its end; everything starts."""
    (action,) = heals(supervised.heal_requested(uid, now, request))
    while isinstance(action, Respawn | Recreate):
        event = supervised.respawned if isinstance(action, Respawn) else supervised.recreated
        (action,) = heals(event(action.mesh_uid, action.incarnations))
    return action


def test_procs_are_healed_first_then_actors_in_spawn_order() -> None:
    supervised = machine()
    supervised.proc_exited("P", 1, 0, KILLED)
    supervised.proc_exited("P", 3, 0, KILLED)
    both = ((1, 1), (3, 1))
    assert supervised.heal_requested("P", 0, 7) == [Respawn("P", both)]
    assert supervised.respawned("P", both[:1]) == []
    assert supervised.respawned("P", both[1:]) == [Recreate("A", both)]
    assert supervised.check("B", {1}) is not None
    assert supervised.recreated("A", both) == [Recreate("B", both)]
    assert supervised.recreated("B", both) == [Healed((7,), (("P", both), ("A", both), ("B", both)))]
    assert [supervised.check(uid) for uid in "PAB"] == [None, None, None]
    assert supervised.incarnations("B") == {1: 1, 3: 1}


def test_an_actor_whose_process_lives_is_only_created_again() -> None:
    supervised = machine()
    supervised.actor_failed("B", 2, 0, RAISED)
    assert supervised.heal_requested("B", 0, 1) == [Recreate("B", ((2, 1),))]
    assert supervised.recreated("B", [(2, 1)]) == [Healed((1,), (("B", ((2, 1),)),))]


def test_healing_an_actor_mesh_restores_everything_its_dead_processes_held() -> None:
    supervised = machine()
    supervised.proc_exited("P", 1, 0, KILLED)
    supervised.actor_failed("A", 3, 0, RAISED)
    healed = heal_all(supervised, "B", 0)
    assert isinstance(healed, Healed)
    assert dict(healed.incarnations) == {"P": ((1, 1),), "A": ((1, 1),), "B": ((1, 1),)}
    assert supervised.check("A", {3}) is not None, "that is not what was asked for"


def test_a_slice_can_be_healed_alone() -> None:
    supervised = machine()
    for rank in (0, 2):
        supervised.proc_exited("P", rank, 0, KILLED)
    assert supervised.heal_requested("A", 0, 1, frozenset({2})) == [Respawn("P", ((2, 1),))]


def test_nothing_failed_means_nothing_to_do() -> None:
    assert machine().heal_requested("A", 0, 5) == [Healed((5,))]


def test_old_lives_are_not_heard_any_more() -> None:
    supervised = machine()
    supervised.proc_exited("P", 1, 0, KILLED)
    heal_all(supervised, "P", 0)
    assert supervised.proc_exited("P", 1, 0, KILLED) == []
    assert supervised.actor_failed("A", 1, 0, RAISED) == []
    assert supervised.respawned("P", [(1, 1)]) == []
    assert any(isinstance(action, RootFault) for action in supervised.actor_failed("A", 1, 1, RAISED))


def test_a_rank_dying_during_the_heal_is_reported_by_it() -> None:
    supervised = machine()
    for rank in (1, 2):
        supervised.proc_exited("P", rank, 0, KILLED)
    supervised.heal_requested("P", 0, 1)
    assert heals(supervised.proc_exited("P", 1, 1, KILLED)) == []
    assert heals(supervised.respawned("P", [(1, 1), (2, 1)])) == [Recreate("A", ((2, 1),))]
    assert heals(supervised.recreated("A", [(2, 1)])) == [Recreate("B", ((2, 1),))]
    died = supervised.proc_exited("P", 2, 1, KILLED)
    assert not any(isinstance(action, RootFault) for action in died)
    (healed,) = heals(died)
    assert isinstance(healed, Healed)
    assert healed.incarnations == ()
    assert [failure.crashed_ranks for failure in healed.again] == [[1], [2]]
    assert supervised.check("A", {2}) is not None


def test_a_start_that_fails_is_raised_by_the_heal() -> None:
    supervised = machine()
    supervised.actor_failed("A", 0, 0, RAISED)
    supervised.heal_requested("A", 0, 1)
    (healed,) = heals(supervised.heal_failed("A", [(0, 1)], Cause(kind="init", text="ValueError: still")))
    assert isinstance(healed, Healed)
    assert "ValueError: still" in healed.again[0].report()


def test_requests_for_what_is_being_healed_join() -> None:
    supervised = machine()
    supervised.proc_exited("P", 1, 0, KILLED)
    assert supervised.heal_requested("P", 0, 1) == [Respawn("P", ((1, 1),))]
    assert supervised.heal_requested("A", 1, 2) == []
    assert supervised.heal_requested("P", 2, 3) == []
    supervised.respawned("P", [(1, 1)])
    supervised.recreated("A", [(1, 1)])
    (healed,) = supervised.recreated("B", [(1, 1)])
    assert isinstance(healed, Healed)
    assert healed.requests == (1, 2, 3)


def test_a_request_for_more_waits_for_the_heal_under_way() -> None:
    supervised = machine()
    supervised.actor_failed("A", 1, 0, RAISED)
    supervised.heal_requested("A", 0, 1)
    supervised.actor_failed("A", 2, 0, RAISED)
    assert supervised.heal_requested("A", 1, 2) == []
    first, second = supervised.recreated("A", [(1, 1)])
    assert first == Healed((1,), (("A", ((1, 1),)),))
    assert second == Recreate("A", ((2, 1),))


def test_a_call_on_a_rank_being_healed_says_so() -> None:
    supervised = machine()
    supervised.actor_failed("A", 1, 0, RAISED)
    supervised.heal_requested("A", 0, 1)
    failure = supervised.check("A")
    assert failure is not None
    assert "being healed" in failure.next_step


def test_a_rank_that_keeps_failing_is_not_healed_for_ever() -> None:
    supervised = machine()
    for incarnation in range(3):
        supervised.actor_failed("A", 1, incarnation, RAISED)
        assert isinstance(heal_all(supervised, "A", 10.0 * incarnation), Healed)
    supervised.actor_failed("A", 1, 3, RAISED)
    refused = heal_all(supervised, "A", 25.0)
    assert isinstance(refused, HealRefused)
    assert refused.retry_after == pytest.approx(35.0)
    for part in ("a at gpus=1", "3 times within 60 s", "ValueError: no", "in 35 s"):
        assert part in refused.text
    assert isinstance(heal_all(supervised, "A", 61.0), Healed)


def test_how_often_is_a_setting() -> None:
    supervised = machine(max_restarts=1, window=5.0)
    supervised.actor_failed("A", 1, 0, RAISED)
    assert isinstance(heal_all(supervised, "A", 0.0), Healed)
    supervised.actor_failed("A", 1, 1, RAISED)
    assert isinstance(heal_all(supervised, "A", 4.0), HealRefused)
    assert isinstance(heal_all(supervised, "A", 5.5), Healed)


def test_stopping_a_mesh_ends_its_heal() -> None:
    supervised = machine()
    supervised.proc_exited("P", 1, 0, KILLED)
    supervised.heal_requested("A", 0, 1)
    (refused,) = supervised.stopping("P")
    assert isinstance(refused, HealRefused)
    assert "stopped while it was being healed" in refused.text
    assert supervised.respawned("P", [(1, 1)]) == [StopOwnedMesh("P")]


def test_a_heal_goes_on_without_a_mesh_that_is_stopped() -> None:
    supervised = machine()
    supervised.proc_exited("P", 1, 0, KILLED)
    supervised.heal_requested("P", 0, 1)
    supervised.respawned("P", [(1, 1)])
    assert supervised.stopping("A") == [Recreate("B", ((1, 1),))]
    assert supervised.recreated("A", [(1, 1)]) == [StopOwnedMesh("A")]


def test_an_impossible_heal_is_refused_with_the_reason() -> None:
    supervised = machine()
    supervised.know("h9/c", spec("K", "L"))
    supervised.stopping("B")
    for uid, part in (("nothing", "no mesh"), ("K", "another process"), ("B", "spawn a new one")):
        (refused,) = supervised.heal_requested(uid, 0, 1)
        assert isinstance(refused, HealRefused)
        assert part in refused.text


def test_actors_on_procs_owned_elsewhere_follow_when_those_are_healed() -> None:
    supervised = SupervisionMachine()
    supervised.own("owner", spec("A", "far"))
    supervised.own("owner", spec("B", "far"))
    supervised.proc_exited("far", 1, 0, KILLED)
    (refused,) = supervised.heal_requested("A", 0, 1)
    assert isinstance(refused, HealRefused)
    assert "processes that have failed" in refused.text
    assert supervised.respawned("far", [(1, 1)]) == [Recreate("A", ((1, 1),))]
    assert supervised.recreated("A", [(1, 1)]) == [Recreate("B", ((1, 1),))]
    assert isinstance(supervised.recreated("B", [(1, 1)])[0], Healed)
    assert supervised.check("A") is None


def test_a_replaced_process_elsewhere_took_its_actors_along() -> None:
    supervised = SupervisionMachine()
    supervised.own("owner", spec("A", "far"))
    actions = supervised.respawned("far", [(1, 1)])  # that it had died was never told
    assert any(isinstance(action, Supervise) for action in actions)
    assert heals(actions) == [Recreate("A", ((1, 1),))]


def test_an_owner_that_did_not_heal_learns_of_the_second_failure() -> None:
    supervised = machine()
    supervised.own("other", spec("C", "P"))
    (first,) = [a for a in supervised.proc_exited("P", 1, 0, KILLED) if isinstance(a, Supervise)]
    supervised.owner_result(first.failure.failure_id, True)
    supervised.heal_requested("P", 0, 1)
    actions = supervised.heal_failed("P", [(1, 1)], Cause(kind="spawn", text="no room"))
    assert [(a.owner, a.failure.mesh_name) for a in actions if isinstance(a, Supervise)] == [("other", "c")]
    (healed,) = heals(actions)
    assert isinstance(healed, Healed)
    assert [failure.mesh_name for failure in healed.again] == ["a"]


def test_no_heal_goes_on_when_its_owner_ends() -> None:
    supervised = machine()
    supervised.proc_exited("P", 1, 0, KILLED)
    supervised.heal_requested("P", 0, 1)
    supervised.respawned("P", [(1, 1)])
    refused, *stops = supervised.owner_stopped("root")
    assert isinstance(refused, HealRefused)
    assert stops == [StopOwnedMesh("B"), StopOwnedMesh("A"), StopOwnedMesh("P")]


def test_a_second_failure_is_reported_though_nobody_awaits_the_heal() -> None:
    supervised = machine()
    supervised.proc_exited("P", 1, 0, KILLED)
    supervised.heal_requested("A", 0, 1)
    supervised.respawned("P", [(1, 1)])
    supervised.recreated("A", [(1, 1)])
    assert heals(supervised.proc_exited("P", 1, 1, KILLED)), "the heal is over, and says so"
    supervised.actor_failed("B", 2, 0, RAISED)
    supervised.actor_failed("B", 3, 0, RAISED)
    supervised.heal_requested("B", 1, 2, frozenset({2, 3}))
    supervised.heal_failed("B", [(2, 1)], RAISED)
    (refused, *rest) = supervised.stopping("B")
    assert isinstance(refused, HealRefused)
    assert [type(action) for action in rest] == [RootFault]
