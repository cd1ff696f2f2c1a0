"""The verdict of a diagnosis, from evidence alone."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from monarch_nb.collectives.verbs import GroupKey
from monarch_nb.diagnosis.findings import Diagnosis, Finding
from monarch_nb.diagnosis.judge import Procs, UnansweredCall, judge
from monarch_nb.diagnosis.verbs import AwaitedCall, EndpointRun, Evidence, LockWait, NewestCollective, StackLine

WORLD = GroupKey.of("0", (0, 1, 2), "node1:29500")
PAIR = GroupKey.of("1", (0, 1), "node1:29500")
IN_REDUCE = (
    StackLine("/torch/distributed/c10d.py", 3252, "all_reduce", False),
    StackLine("/home/train.py", 44, "Trainer.step"),
)
IN_QUEUE = (StackLine("/lib/queue.py", 171, "Queue.get", False), StackLine("/home/data.py", 19, "Feed.next"))


def running(lines: tuple[StackLine, ...] = IN_REDUCE, **changes: Any) -> EndpointRun:
    fields: dict[str, Any] = {"state": "S", "processor": 1.0, "transferred": 10, "waits": ()} | changes
    return EndpointRun("m", 0, "trainers", "step", "c1", 34.0, 7, lines, **fields)


def collective(
    number: int, name: str = "all_reduce", shape: str = "Float [3]", group: GroupKey = WORLD, pending: bool = True
) -> NewestCollective:
    return NewestCollective(group, number, name, shape, pending, 34.0, 7, ((number, f"{name} of {shape}"),))


def rank(
    number: int, *runs: EndpointRun, in_: NewestCollective | None = None, groups: tuple[GroupKey, ...] = (WORLD,)
) -> Evidence:
    return Evidence(runs, () if in_ is None else (in_,), groups, number, True)


def procs(
    after: Mapping[int, Evidence],
    before: Mapping[int, Evidence] | None = None,
    states: Mapping[int, str] | None = None,
    **more: Any,
) -> Procs:
    all_states = dict.fromkeys(range(3), "busy") | dict(states or {})
    return Procs("workers", all_states, {}, after if before is None else before, after, **more)


WAITS = {number: rank(number, running(), in_=collective(118)) for number in (0, 2)}
CALL = (UnansweredCall("c1", "trainers.step", frozenset({0, 1, 2}), 3),)


LINES = StackLine("/home/data.py", 5, "load"), StackLine("/home/data.py", 9, "next")
LOCKED = LockWait("driver", "self.lock", LINES[0], "loader", LINES[1], 4)


def test_a_rank_that_sits_elsewhere_is_missing_from_the_collective() -> None:
    late = rank(1, running(IN_QUEUE), in_=collective(117, pending=False))
    (finding,) = judge(procs({**WAITS, 1: late}, calls=CALL))
    assert (finding.kind, finding.ranks, finding.source, finding.sure) == (
        "missing_from_collective",
        (1,),
        "/home/data.py:19",
        True,
    )
    assert finding.text == (
        "ranks [1] has not begun all_reduce no. 118 (train.py:44), where ranks [0, 2] have waited 34 s; "
        "it sits in Queue.get at queue.py:171, called at data.py:19"
    )


@pytest.mark.parametrize(
    ("before", "after", "activity"),
    [
        (running(IN_QUEUE), running(IN_QUEUE, state="R"), "it computes in"),
        (running(IN_QUEUE), running(IN_QUEUE, processor=1.1), "it computes in"),
        (running(IN_QUEUE), running(IN_QUEUE, transferred=4096), "it reads or writes in"),
        (running(IN_QUEUE), running(IN_QUEUE, state="D"), "it reads or writes in"),
        (running(IN_QUEUE[1:]), running(IN_QUEUE), "it runs"),
        (None, running(IN_QUEUE), "it runs"),
        (
            running(IN_QUEUE),
            running(IN_QUEUE, waits=(AwaitedCall("feeds.get", "f", (0,)),)),
            "it waits for feeds.get()",
        ),
        (running(IN_QUEUE, woken=10), running(IN_QUEUE, woken=20), "it receives in"),
        (running(IN_QUEUE), running(IN_QUEUE, waits_for_child=True), "it waits for a child process in"),
        (running(IN_QUEUE), running(IN_QUEUE, lock=LOCKED), "it waits for self.lock, which loader holds at"),
        (running(IN_QUEUE), running(IN_QUEUE, helpers_paused=90), "while other threads of its process run"),
        (running(IN_QUEUE, helpers_paused=90), running(IN_QUEUE), "while other threads of its process run"),
        (running(IN_QUEUE, helpers=0.3), running(IN_QUEUE), "while other threads of its process compute"),
        (running(IN_QUEUE), running(IN_QUEUE, helpers=0.3), "while other threads of its process compute"),
        (running(IN_QUEUE), running(IN_QUEUE, helpers_woken=9), "while other threads of its process receive data"),
    ],
)
def test_a_late_rank_that_may_come_is_only_a_suspicion(
    before: EndpointRun | None, after: EndpointRun, activity: str
) -> None:
    samples = [{**WAITS, 1: rank(1, *runs)} for runs in ([] if before is None else [before], [after])]
    (finding,) = judge(procs(samples[1], samples[0]))
    assert (finding.kind, finding.ranks, finding.sure) == ("waiting_on", (1,), False)
    assert activity in finding.text
    assert finding.text.startswith("ranks [0, 2] have waited 34 s in all_reduce no. 118 (train.py:44) for ranks [1]; ")
    assert not finding.is_suspicion  # but a fact


@pytest.mark.parametrize(("seconds", "pause", "sure"), [(2.0, 0.0, None), (34.0, 20.0, False)])
def test_short_or_usual_waits_blame_nobody_for_sure(seconds: float, pause: float, sure: bool | None) -> None:
    wait = msgspec.structs.replace(collective(118), seconds=seconds, pause=pause)
    waits = {number: rank(number, running(), in_=wait) for number in (0, 2)}
    findings = judge(procs({**waits, 1: rank(1, running(IN_QUEUE), in_=collective(117, pending=False))}))
    assert [finding.sure for finding in findings] == ([] if sure is None else [sure])


def test_a_rank_that_waits_for_another_is_not_blamed() -> None:
    waits = rank(0, running(), in_=collective(118))
    late = rank(1, running(), in_=collective(5, group=PAIR), groups=(WORLD, PAIR))
    culprit = rank(2, running(IN_QUEUE), in_=None, groups=(WORLD, PAIR))
    pair = GroupKey.of("1", (1, 2), "node1:29500")
    late = msgspec.structs.replace(late, groups=(WORLD, pair), collectives=(collective(5, group=pair),))
    culprit = msgspec.structs.replace(culprit, groups=(WORLD, pair))
    (finding,) = judge(procs({0: waits, 1: late, 2: culprit}))
    assert (finding.kind, finding.ranks) == ("missing_from_collective", (2,))
    receives = rank(1, running(peers=(2,), still=0.4), groups=(PAIR,))
    silent = rank(2, running(IN_QUEUE), groups=(PAIR,))
    (finding,) = judge(procs({0: rank(0, groups=(PAIR,)), 1: receives, 2: silent}))
    assert (finding.kind, finding.ranks, finding.sure) == ("waiting_on", (2,), False)
    assert finding.text.startswith("ranks [1] waits for a message of ranks [2] (train.py:44); it sits in Queue.get")


def test_a_rank_that_does_something_else_meanwhile_is_not_waiting() -> None:
    pending = (collective(118, group=PAIR),)  # asynchronously, and now it sits in a queue
    culprit = rank(1, running(IN_QUEUE[1:], callee="acquire"), groups=(WORLD, PAIR))
    culprit = msgspec.structs.replace(culprit, collectives=pending)
    waits = {0: rank(0, running(), in_=collective(118), groups=(WORLD, PAIR)), 2: WAITS[2]}
    (finding,) = judge(procs({**waits, 1: culprit}))
    assert (finding.kind, finding.ranks, finding.sure) == ("missing_from_collective", (1,), True)


def test_ranks_that_use_groups_in_other_orders_wait_for_each_other() -> None:
    group = GroupKey.of("1", (0, 1, 2), "node1:29500")
    after = {
        number: rank(number, running(), in_=collective(4, group=group if number == 1 else WORLD), groups=(WORLD, group))
        for number in range(3)
    }
    (finding,) = judge(procs(after))
    assert (finding.kind, finding.ranks, finding.sure) == ("deadlock", (0, 1, 2), True)
    assert finding.text == (
        "ranks [0, 1, 2] wait for each other: ranks [0, 2] wait in all_reduce no. 4 of group 0 (train.py:44); "
        "ranks [1] waits in all_reduce no. 4 of group 1 (train.py:44)"
    )


def test_an_earlier_collective_that_differs_is_found() -> None:
    last = ((117, "all_reduce of Float [3]"), (118, "barrier"))
    barrier = msgspec.structs.replace(collective(118, "barrier", "", pending=False), last=last)
    odd = msgspec.structs.replace(
        collective(118, "barrier", ""), last=((117, "broadcast of Float [3]"), (118, "barrier"))
    )
    waits = {0: rank(0, running(), in_=odd), 1: rank(1, running(), in_=barrier), 2: rank(2, running(), in_=barrier)}
    (finding,) = judge(procs(waits))
    assert (finding.kind, finding.ranks) == ("mismatched_collective", (0,))
    assert finding.text.startswith("the ranks differ in their collective no. 117: ranks [0] calls broadcast")


def test_the_end_of_a_chain_of_calls_is_suspected() -> None:
    waiting = running(waits=(AwaitedCall("feeds.get", "f", (0,)),))
    feed = msgspec.structs.replace(running(IN_QUEUE), mesh="f", actor="feeds", call="c2")
    after = {0: rank(0, waiting, groups=()), 1: rank(1, feed, groups=()), 2: rank(2, groups=())}
    (finding,) = judge(procs(after, calls=(UnansweredCall("c1", "trainers.step", frozenset({0}), 1),)))
    assert (finding.kind, finding.ranks, finding.sure) == ("waiting_on", (1,), False)
    assert finding.text.startswith("ranks [1] has not answered feeds.get(), for which others wait; it sits in")


def test_an_endpoint_that_sends_nothing_to_its_port_is_found() -> None:
    after = {number: rank(number, groups=()) for number in range(3)}
    call = UnansweredCall("c1", "trainers.step", frozenset({1, 2}), 2, seconds=7.0)
    assert judge(procs(after, calls=(call,))) == ()
    (finding,) = judge(procs({**after, 2: rank(2, running())}, calls=(replace(call, is_explicit=True),)))
    assert (finding.kind, finding.ranks, finding.sure) == ("waiting_on", (1,), False)
    assert finding.text.startswith("ranks [1] has not answered trainers.step() for 7.0 s: the endpoint has ended")


def test_a_rank_whose_call_has_ended_is_missing() -> None:
    (finding,) = judge(
        procs({**WAITS, 1: rank(1)}, calls=(UnansweredCall("c1", "trainers.step", frozenset({0, 2}), 3),))
    )
    assert (finding.kind, finding.ranks, finding.sure) == ("missing_from_collective", (1,), True)
    assert finding.text.endswith("it runs nothing: its call has ended")


def test_waits_in_threads_of_the_program_blame_nobody_for_sure() -> None:
    waits = {number: rank(number, in_=collective(118)) for number in (0, 2)}
    (finding,) = judge(procs({**waits, 1: rank(1)}))
    assert not finding.sure


def test_a_minority_in_another_operation_is_named() -> None:
    broadcast = rank(1, running(), in_=collective(118, "broadcast", "Float [3]"))
    (finding,) = judge(procs({**WAITS, 1: broadcast}))
    assert (finding.kind, finding.ranks) == ("mismatched_collective", (1,))
    assert finding.text == (
        "the ranks differ in their collective no. 118: ranks [1] calls broadcast of Float [3] at train.py:44; "
        "ranks [0, 2] call all_reduce of Float [3] at train.py:44"
    )


def test_without_a_majority_all_are_named() -> None:
    pair = {
        number: rank(number, running(), in_=collective(3, shape=f"Float [{number}]", group=PAIR), groups=(PAIR,))
        for number in (0, 1)
    }
    (finding,) = judge(procs({**pair, 2: rank(2, groups=())}))
    assert (finding.kind, finding.ranks) == ("mismatched_collective", (0, 1))


@pytest.mark.parametrize(
    "after",
    [
        {number: rank(number, running(), in_=collective(118)) for number in range(3)},  # all are in it
        {number: rank(number, running(), in_=collective(118, pending=False)) for number in range(3)},
        {number: rank(number) for number in range(3)},
        {},
    ],
)
def test_nothing_is_found_where_all_ranks_are_alike(after: Mapping[int, Evidence]) -> None:
    states = dict.fromkeys(range(3), "busy") if after else {}
    assert judge(Procs("workers", states, {}, after, after, CALL)) == ()


def test_collectives_that_proceed_blame_nobody() -> None:
    before = {number: rank(number, running(), in_=collective(100 + number)) for number in range(3)}
    after = {number: rank(number, running(), in_=collective(200 + number)) for number in range(3)}
    assert judge(procs(after, before)) == ()


@pytest.mark.parametrize(
    ("state", "kind", "sure"),
    [
        ("failed", "dead", True),
        ("out of memory", "memory", True),
        ("paused", "stopped", True),
        ("halted", "stopped", True),
        ("traced", "stopped", True),
        ("asleep", "stuck", True),
        ("unreachable", "unreachable", True),
        ("unresponsive", "stuck", False),
    ],
)
def test_a_silent_rank_is_named_with_those_that_wait(state: str, kind: str, sure: bool) -> None:
    (finding,) = judge(procs(WAITS, states={1: state}))
    assert (finding.kind, finding.ranks, finding.sure) == (kind, (1,), sure)
    assert finding.text.endswith("; ranks [0, 2] wait in all_reduce no. 118 (train.py:44)")


def test_one_rank_that_has_not_answered_a_call_is_stuck() -> None:
    after = {0: rank(0, groups=()), 1: rank(1, running(IN_QUEUE), groups=()), 2: rank(2, groups=())}
    (finding,) = judge(procs(after, calls=(UnansweredCall("c1", "trainers.step", frozenset({1}), 3),)))
    assert (finding.kind, finding.ranks, finding.sure) == ("stuck", (1,), True)
    assert finding.text.startswith("ranks [1] alone has not answered trainers.step() for 34 s; it sits in Queue.get")


def test_a_call_behind_another_is_explained_by_that_once() -> None:
    held = rank(1, running(IN_QUEUE, queue=("c2", "c3")), groups=())
    after = {0: rank(0, groups=()), 1: held, 2: rank(2, groups=())}
    calls = [UnansweredCall(call, "trainers.answer", frozenset({1}), 3, seconds=9.0) for call in ("c2", "c3")]
    (finding,) = judge(procs(after, calls=calls))
    assert (finding.kind, finding.ranks, finding.source) == ("stuck", (1,), "/home/data.py:19")
    assert finding.text.startswith(
        "ranks [1] alone has not answered trainers.answer() for 9.0 s, which waits behind trainers.step(); it sits in"
    )
    recent = UnansweredCall("c2", "trainers.answer", frozenset({1}), 3, seconds=0.5)
    assert judge(procs(after, calls=[recent])) == ()


def test_a_rank_is_explained_by_the_run_of_the_call() -> None:
    server = msgspec.structs.replace(running(IN_REDUCE), call="c0", seconds=100.0, mesh="n")
    after = {0: rank(0, groups=()), 1: rank(1, server, running(IN_QUEUE), groups=()), 2: rank(2, groups=())}
    (finding,) = judge(procs(after, calls=(UnansweredCall("c1", "trainers.step", frozenset({1}), 3),)))
    assert finding.source == "/home/data.py:19"


def test_a_diagnosis_shows_suspicions_as_such() -> None:
    sure, unsure = (Finding("stuck", "workers", (1,), "it sits", sure=sure) for sure in (True, False))
    assert str(Diagnosis((sure, unsure), "3 processes")) == (
        "workers: it sits\nperhaps: workers: it sits\ninspected: 3 processes"
    )
    assert not Diagnosis((), "there are no meshes")


def test_threads_that_wait_for_each_others_locks_are_a_deadlock() -> None:
    circle = (LOCKED, LockWait("loader", "self.queue", LINES[1], "driver", LINES[0], 7))
    locked = msgspec.structs.replace(rank(1, running(IN_QUEUE)), circle=circle)
    (finding,) = judge(procs({**WAITS, 1: locked}, calls=CALL))
    assert (finding.kind, finding.ranks, finding.source, finding.sure) == ("deadlock", (1,), "/home/data.py:5", True)
    assert finding.text == (
        "ranks [1]: threads wait for each other's locks: driver waits for self.lock at data.py:5, loader waits for "
        "self.queue at data.py:9"
    )
    moved = (msgspec.structs.replace(LOCKED, paused=5), circle[1])
    ran = msgspec.structs.replace(locked, circle=moved)
    assert [item.kind for item in judge(procs({**WAITS, 1: ran}, {**WAITS, 1: locked}))] != ["deadlock"]


def test_a_patient_question_is_silent_where_others_have_waited_for_less() -> None:
    late = {**WAITS, 1: rank(1, running(IN_QUEUE, processor=2.0))}
    before = {**WAITS, 1: rank(1, running(IN_QUEUE))}
    assert judge(procs(late, before, patience=60.0)) == ()
    assert [finding.kind for finding in judge(procs(late, before, patience=30.0))] == ["waiting_on"]


def test_messages_that_come_are_not_waited_for() -> None:
    receives, sends = rank(1, running(peers=(2,)), groups=(PAIR,)), rank(2, running(IN_QUEUE), groups=(PAIR,))
    assert judge(procs({0: rank(0, groups=(PAIR,)), 1: receives, 2: sends})) == ()


def test_unrecorded_collectives_are_shown_with_the_ranks_that_are_elsewhere() -> None:
    module = StackLine("/torch/distributed/distributed_c10d.py", 3252, "all_reduce", False)
    waits = {number: Evidence((running((module, IN_REDUCE[1])),), rank=number) for number in (0, 2)}
    idle, busy = (Evidence((running(IN_QUEUE, state=state),), rank=1) for state in "SR")
    (finding,) = judge(procs({**waits, 1: idle}, calls=CALL))
    assert (finding.kind, finding.ranks, finding.source, finding.sure) == (
        "waiting_on",
        (1,),
        "/home/data.py:19",
        False,
    )
    assert finding.text == (
        "ranks [0, 2] wait in a collective (train.py:44) that is not recorded, and ranks [1] is elsewhere: it sits in "
        "Queue.get at queue.py:171, called at data.py:19"
    )
    assert judge(procs({**waits, 1: busy}, calls=CALL)) == ()
    assert judge(procs({**waits, 1: idle}, calls=CALL, patience=60.0)) == ()
    one_left = (UnansweredCall("c1", "trainers.step", frozenset({0}), 3),)
    assert [item.sure for item in judge(procs({0: waits[0], 1: rank(1), 2: rank(2)}, calls=one_left))] == [False]
