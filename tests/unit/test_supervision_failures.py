"""Failures: their spread, who is notified, and how calls are answered."""

from typing import Any

import pytest

from monarch_nb.supervision import (
    Cause,
    FailActor,
    FailCalls,
    MeshSpec,
    Respawn,
    RootFault,
    ShowFailure,
    StopOwnedMesh,
    Supervise,
    SupervisionMachine,
)
from monarch_nb.wire.header import Layout, Run

KILLED = Cause(kind="signal", signal=9)
RAISED = Cause(kind="exception", text="ValueError: no")
LAYOUT = Layout(uid="P", hosts=("h0", "h1"), per_host=2)

pytestmark = pytest.mark.timeout(10)


def spec(uid: str, on: str | None = None, ranks: Any = range(4), layout: Layout | None = None) -> MeshSpec:
    return MeshSpec(
        uid=uid,
        name=uid.lower(),
        kind="procs" if on is None else "actors",
        ranks=ranks,
        extent=(("gpus",), (len(ranks),)),
        on=on,
        layout=layout,
    )


def machine(owner: str = "owner", **options: Any) -> SupervisionMachine:
    """Procs P with actors A, then B, all of one owner."""
    supervised = SupervisionMachine(root="root", **options)
    supervised.own(owner, spec("P", layout=LAYOUT))
    supervised.own(owner, spec("A", "P", layout=LAYOUT))
    supervised.own(owner, spec("B", "P", layout=LAYOUT))
    return supervised


def pick(actions: list[Any], kind: type) -> Any:
    matches = [action for action in actions if isinstance(action, kind)]
    assert len(matches) == 1, actions
    return matches[0]


def test_a_failed_actor_is_reported_to_owner_and_waiters() -> None:
    actions = machine().actor_failed("A", 2, 0, RAISED)
    calls, supervise = actions
    assert isinstance(calls, FailCalls)
    assert (calls.mesh_uid, calls.incarnations) == ("A", ((2, 0),))
    assert isinstance(supervise, Supervise)
    assert supervise.owner == "owner"
    assert supervise.failure.mesh_name == "a"
    assert supervise.failure.crashed_ranks == [2]


def test_a_dead_process_fails_every_mesh_on_it_once() -> None:
    supervised = machine()
    actions = supervised.proc_exited("P", 1, 0, KILLED)
    assert [action.mesh_uid for action in actions if isinstance(action, FailCalls)] == ["P", "A", "B"]
    failure = pick(actions, Supervise).failure
    assert failure.mesh_name == "a", "the first actor mesh names it"
    assert set(failure.also) == {"p", "b"}
    assert {uid: supervised.status(uid)[1].state for uid in "PAB"} == dict.fromkeys("PAB", "failed")
    assert {uid: supervised.status(uid)[0].state for uid in "PAB"} == dict.fromkeys("PAB", "alive")


def test_a_dead_process_is_reported_for_the_mesh_somebody_waits_for() -> None:
    assert pick(machine().proc_exited("P", 1, 0, KILLED, {"B"}), Supervise).failure.mesh_name == "b"


def test_a_dead_process_is_reported_for_the_called_mesh_without_waiters() -> None:
    failure = pick(machine().proc_exited("P", 1, 0, KILLED, (), {"B"}), Supervise).failure
    assert failure.mesh_name == "b"
    assert pick(machine().proc_exited("P", 1, 0, KILLED, (), {"P"}), Supervise).failure.procs


def test_a_dead_process_without_actors_is_told_as_itself() -> None:
    supervised = SupervisionMachine()
    supervised.own("owner", spec("P"))
    failure = pick(supervised.proc_exited("P", 3, 0, KILLED), Supervise).failure
    assert (failure.mesh_name, failure.crashed_ranks, failure.procs) == ("p", [3], True)


def test_each_owner_of_something_on_a_dead_process_is_told() -> None:
    supervised = machine()
    supervised.own("other", spec("C", "P"))
    reports = [action for action in supervised.proc_exited("P", 0, 0, KILLED) if isinstance(action, Supervise)]
    assert {(action.owner, action.failure.mesh_name) for action in reports} == {("owner", "a"), ("other", "c")}


def test_actors_on_procs_of_another_process_fail_with_them() -> None:
    supervised = SupervisionMachine()
    supervised.own("owner", spec("A", "elsewhere", layout=LAYOUT))
    assert pick(supervised.proc_exited("elsewhere", 0, 0, KILLED), Supervise).failure.mesh_name == "a"
    supervised.disown("A")
    with pytest.raises(KeyError):
        supervised.status("elsewhere")


def test_news_that_came_twice_or_of_an_old_life_change_nothing() -> None:
    supervised = machine()
    assert supervised.actor_failed("A", 2, 0, RAISED)
    assert supervised.actor_failed("A", 2, 0, RAISED) == []
    assert supervised.actor_failed("A", 1, 7, RAISED) == []
    assert supervised.actor_failed("A", 99, 0, RAISED) == []
    assert supervised.actor_failed("nobody", 0, 0, RAISED) == []


def test_a_lost_host_is_told_once_with_all_its_ranks() -> None:
    supervised = machine()
    failure = pick(supervised.host_lost({"h1"}, Cause(kind="host")), Supervise).failure
    assert (failure.mesh_name, failure.crashed_ranks, failure.host) == ("a", [2, 3], "h1")
    assert supervised.check("A", range(2)) is None
    assert supervised.host_lost({"h1"}, Cause(kind="host")) == []
    both = pick(machine().host_lost(("h1", "h0"), Cause(kind="host", text="the job ended")), Supervise).failure
    assert (both.crashed_ranks, both.host) == ([0, 1, 2, 3], "h0, h1")
    assert "2 hosts (h0, h1) were lost: the job ended" in both.report()
    assert "once these hosts are back, heal_mesh(a) brings them back" in both.report()


def test_a_host_loss_known_after_the_heal_affects_only_unhealed_ranks() -> None:
    holder = SupervisionMachine()  # elsewhere: the procs and actors are another process's
    for uid, on in (("P", None), ("A", "P"), ("Q", None)):
        holder.know("owner", spec(uid, on, layout=LAYOUT if on is None else None))
    holder.came_after("P", {2: 7, 3: 7})
    holder.respawned("P", [(2, 1), (3, 1)])
    holder.recreated("A", [(2, 1), (3, 1)])
    holder.host_lost({"h1"}, Cause(kind="host"), loss=7)
    assert holder.check("P") is None
    assert holder.check("A") is None
    assert holder.check("Q", {2}) is not None
    holder.host_lost({"h1"}, Cause(kind="host"), loss=8)
    assert holder.check("P", {2}) is not None
    assert holder.check("A", {3}) is not None


def test_a_returning_controller_learns_the_ends_of_ranks_healed_before() -> None:
    back = SupervisionMachine(root="root")
    back.own("root", spec("P", layout=LAYOUT), {3: 2})
    back.own("root", spec("A", "P"), {3: 2})
    assert back.proc_exited("P", 3, 1, KILLED) == []
    assert pick(back.proc_exited("P", 3, 2, KILLED), RootFault).failure.crashed_ranks == [3]
    assert pick(back.heal_requested("A", 0.0, 1), Respawn).incarnations == ((3, 3),)


def test_an_early_holder_believes_the_owner_that_a_rank_started() -> None:
    holder = SupervisionMachine()
    holder.know("owner", spec("P", layout=LAYOUT), {2: 1})
    holder.know("owner", spec("A", "P"), {2: 1})
    holder.proc_exited("P", 2, 1, Cause(kind="spawn", text="never started here"))
    assert holder.check("A", {2}) is not None
    holder.respawned("P", [(2, 1)])
    holder.recreated("A", [(2, 1)])
    assert holder.check("P") is holder.check("A") is None
    holder.proc_exited("P", 2, 1, KILLED)
    holder.respawned("P", [(2, 1)])  # late
    assert holder.check("P", {2}) is not None


def test_an_owner_tells_after_which_loss_its_healed_ranks_came() -> None:
    supervised = machine()
    supervised.host_lost({"h1"}, Cause(kind="host"), loss=7)
    assert supervised.since("A") == {}
    supervised.heal_requested("P", 0.0, 1)
    supervised.respawned("P", [(2, 1), (3, 1)])
    assert supervised.since("P") == supervised.since("A") == {2: 7, 3: 7}
    assert supervised.host_lost({"h1"}, Cause(kind="host"), loss=7) == []


def test_only_calls_that_touch_failed_ranks_are_refused() -> None:
    supervised = machine()
    supervised.actor_failed("A", 2, 0, RAISED)
    assert supervised.check("A", range(2)) is None
    assert supervised.check("A", (Run(0, 2, 3),)) is None
    assert supervised.check("A", (Run(0, 2), Run(2, 1))) is not None
    assert supervised.check("A", ()) is None
    assert supervised.check("B") is None
    failure = supervised.check("A")
    assert failure is not None
    assert failure.crashed_ranks == [2]
    assert failure.cause.text == RAISED.text


def test_ranks_of_a_slice_count_from_its_own_start() -> None:
    supervised = SupervisionMachine()
    supervised.own("owner", spec("P"))
    supervised.own("owner", spec("A", "P", ranks=(1, 3)))
    assert pick(supervised.proc_exited("P", 3, 0, KILLED), Supervise).failure.crashed_ranks == [1]
    assert [a.mesh_uid for a in supervised.proc_exited("P", 0, 0, KILLED) if isinstance(a, FailCalls)] == ["P"]
    assert supervised.check("A", {1}) is None


def test_a_mesh_spawned_on_broken_procs_is_broken_there() -> None:
    supervised = machine()
    supervised.proc_exited("P", 1, 0, KILLED)
    supervised.own("other", spec("C", "P"))
    assert supervised.check("C", {0}) is None
    assert supervised.check("C", {1}) is not None


def test_a_stop_is_no_failure() -> None:
    supervised = machine()
    assert supervised.stopping("P") == []
    assert supervised.proc_exited("P", 0, 0, KILLED) == []
    assert supervised.actor_failed("A", 0, 0, RAISED) == []
    assert supervised.host_lost({"h0"}, Cause(kind="host")) == []
    calls = supervised.stopped("P")
    assert [(action.mesh_uid, action.incarnations) for action in calls if isinstance(action, FailCalls)] == [
        ("P", None),
        ("A", None),
        ("B", None),
    ]
    failure = supervised.check("A")
    assert failure is not None
    assert "actor mesh is stopped due to proc mesh shutdown" in failure.report()
    assert supervised.disown("P") == []
    assert supervised.check("A") is None


def test_a_single_rank_can_stop() -> None:
    supervised = machine()
    assert supervised.stopping("A", {1}) == []
    assert supervised.actor_failed("A", 1, 0, RAISED) == []
    assert supervised.check("A", {0}) is None
    assert supervised.check("A", {1}) is not None
    assert pick(supervised.stopped("A", {1}), FailCalls).incarnations == ((1, 0),)


def test_a_reference_learns_of_failures_and_heals_but_nobody_is_told() -> None:
    supervised = SupervisionMachine(root="root")
    supervised.know("h9/c", spec("A", "P"))
    assert [type(action) for action in supervised.actor_failed("A", 1, 0, RAISED)] == [FailCalls]
    assert supervised.check("A") is not None
    assert supervised.recreated("A", [(1, 1)]) == []
    assert supervised.check("A") is None
    assert supervised.incarnations("A") == {1: 1}
    assert supervised.actor_failed("A", 1, 0, RAISED) == []
    assert supervised.actor_failed("A", 1, 2, RAISED) != []


def test_a_mesh_whose_owner_is_gone_answers_no_calls() -> None:
    supervised = SupervisionMachine()
    supervised.know("h9/c", spec("A", "P"))
    calls = pick(supervised.owner_gone("h9/c", "killed"), FailCalls)
    assert calls.incarnations is None
    assert "timed out reaching controller" in calls.failure.report()
    assert supervised.check("A", {0}) is not None
    assert supervised.owner_gone("h9/c") == []


# Owners


def test_an_owner_handles_one_failure_at_a_time() -> None:
    supervised = machine()
    first = pick(supervised.actor_failed("A", 0, 0, RAISED), Supervise)
    for rank in (1, 2):
        assert not any(isinstance(a, Supervise) for a in supervised.actor_failed("A", rank, 0, RAISED))
    second = pick(supervised.owner_result(first.failure.failure_id, True), Supervise)
    assert second.failure.crashed_ranks == [1]
    assert supervised.owner_result(first.failure.failure_id, True) == [], "an answer counts once"
    third = pick(supervised.owner_result(second.failure.failure_id, True), Supervise)
    assert supervised.owner_result(third.failure.failure_id, True) == []


def test_an_owner_that_ignores_a_failure_fails_after_its_children_stopped() -> None:
    supervised = machine()
    failure = pick(supervised.actor_failed("A", 0, 0, RAISED), Supervise).failure
    supervised.actor_failed("A", 1, 0, RAISED)
    actions = supervised.owner_result(failure.failure_id, False)
    assert actions[:3] == [StopOwnedMesh("B"), StopOwnedMesh("A"), StopOwnedMesh("P")]
    fail = pick(actions, FailActor)
    assert (fail.actor, fail.cause.kind, fail.cause.chain) == ("owner", "unhandled", failure.cause)
    assert len(actions) == 4, "what it was still to be told is dropped"


def test_a_handler_that_raises_fails_its_owner_with_both_stories() -> None:
    supervised = machine()
    failure = pick(supervised.actor_failed("A", 0, 0, RAISED), Supervise).failure
    raised = Cause(kind="exception", text="KeyError: 'x'")
    fail = pick(supervised.owner_result(failure.failure_id, False, raised), FailActor)
    assert (fail.cause.kind, fail.cause.text, fail.cause.chain) == ("raised", raised.text, failure.cause)


def test_stopped_owners_get_no_failures_and_stop_their_children_first() -> None:
    supervised = machine()
    supervised.join("child", "child", "A", (0, 0))
    supervised.own("child", spec("Q"))
    supervised.own("child", spec("C", "Q"))
    failure = pick(supervised.actor_failed("B", 0, 0, RAISED), Supervise).failure
    stops = supervised.owner_stopped("owner")
    assert stops == [StopOwnedMesh("B"), StopOwnedMesh("C"), StopOwnedMesh("Q"), StopOwnedMesh("A"), StopOwnedMesh("P")]
    assert supervised.owner_result(failure.failure_id, False) == []
    assert supervised.owner_stopped("owner") == []


def test_an_actor_that_fails_takes_along_what_it_owns() -> None:
    supervised = machine()
    supervised.join("child", "child", "A", (0, 0))
    supervised.own("child", spec("Q"))
    assert StopOwnedMesh("Q") not in supervised.actor_failed("A", 1, 0, RAISED)
    assert StopOwnedMesh("Q") in supervised.actor_failed("A", 0, 0, RAISED)


def test_meshes_spawned_by_an_ended_owner_are_stopped() -> None:
    supervised = machine()
    supervised.owner_stopped("owner")
    assert supervised.own("owner", spec("late")) == [StopOwnedMesh("late")]
    assert supervised.actor_failed("late", 0, 0, RAISED) == []


# The root


def test_a_root_failure_in_a_script_is_fatal_at_once() -> None:
    fault = pick(machine("root").proc_exited("P", 0, 0, KILLED, {"A"}), RootFault)
    assert (fault.route, fault.failure.mesh_name) == ("fatal", "a")


def test_a_script_survives_failures_that_were_raised_at_their_use() -> None:
    supervised = machine("root")
    supervised.raised_in_use.add("P")
    assert pick(supervised.proc_exited("P", 0, 0, KILLED, {"A"}), RootFault).route == "call"
    assert pick(supervised.proc_exited("P", 1, 0, KILLED), RootFault).route == "show"
    assert supervised.check("A") is not None


def test_in_a_notebook_a_failure_nobody_waits_for_is_shown() -> None:
    supervised = machine("root", root_policy="notebook")
    fault = pick(supervised.actor_failed("A", 0, 0, RAISED), RootFault)
    assert fault.route == "show"
    assert supervised.report_unclaimed(fault.failure.failure_id) == []
    assert supervised.check("A") is not None, "and raised where the mesh is used"


@pytest.mark.parametrize("raised", [True, False])
def test_a_failure_in_a_notebook_is_reported_by_the_waiting_call(raised: bool) -> None:
    supervised = machine("root", root_policy="notebook")
    actions = supervised.actor_failed("A", 0, 0, RAISED, {"A"})
    fault, calls = pick(actions, RootFault), pick(actions, FailCalls)
    assert fault.route == "call"
    assert calls.failure.failure_id == fault.failure.failure_id
    if raised:
        supervised.mark_reported(fault.failure.failure_id)
        assert supervised.report_unclaimed(fault.failure.failure_id) == []
    else:
        assert supervised.report_unclaimed(fault.failure.failure_id) == [ShowFailure(fault.failure)]
        assert supervised.report_unclaimed(fault.failure.failure_id) == []


def test_a_root_handler_is_asked_first_and_the_root_never_fails() -> None:
    supervised = machine("root", root_policy="notebook", root_supervises=True)
    first = pick(supervised.actor_failed("A", 0, 0, RAISED), Supervise).failure
    supervised.actor_failed("A", 1, 0, RAISED)
    actions = supervised.owner_result(first.failure_id, False)
    assert pick(actions, RootFault).failure == first
    second = pick(actions, Supervise).failure
    fault = pick(supervised.owner_result(second.failure_id, False, Cause(kind="exception", text="bad")), RootFault)
    assert (fault.failure.cause.kind, fault.failure.crashed_ranks) == ("raised", [1])
    assert not any(isinstance(action, FailActor | StopOwnedMesh) for action in actions)
