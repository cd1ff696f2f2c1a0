"""The verdict: which ranks hold others up, from two looks at every process. Pure; `collector` collects the evidence.

A rank that has not begun the collective in which others wait is named with its line, unless it waits for others
itself: then those are named. A finding is sure only if the rank did nothing between the two looks, and others have
waited for longer than usual. No finding is better than a wrong one.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set, Sized
from dataclasses import dataclass, field
from typing import NamedTuple

from monarch_nb.code.modules import line_name
from monarch_nb.collectives.verbs import GroupKey
from monarch_nb.diagnosis.findings import Finding, Kind, by_certainty
from monarch_nb.diagnosis.verbs import AwaitedCall, EndpointRun, Evidence, NewestCollective, StackLine

COMPUTES_S = 0.002  # processor time between two looks: a thread that waits uses less, even if it polls now and then
HELPS_S = 0.02  # the same, of other threads and processes that a rank waits for
BUSY = 10  # times between two looks that other threads stop running: fewer for threads that only monitor
WOKEN = 3  # wakeups between two looks: data arrive, though little
LONG_S = 3.0  # of waiting before a finding: ranks that save or evaluate have usually finished by then
PAUSES = 2.0  # times the longest pause between two collectives, before a finding about an idle rank is sure
# Functions in C in which a program waits for a collective; on a GPU also those that read a tensor.
_WAITS = frozenset(
    {"", "wait", "wait_tensor", "barrier", "monitored_barrier", "synchronize", "item", "tolist", "cpu", "numpy", "to"}
)
_COLLECTIVES = "/torch/distributed/distributed_c10d.py"  # the module that defines collectives
# Operations whose inputs have the same types and shapes on all ranks.
_ALIKE = ("all_reduce", "broadcast", "reduce", "barrier", "_all_gather_base", "_allgather_base")


@dataclass(frozen=True)
class UnansweredCall:
    """A call of the controller that some ranks have not answered."""

    call: str
    title: str  # "trainers.step"
    missing: frozenset[int]  # base ranks
    size: int
    seconds: float = 0.0  # since it was sent; 0 where that is not known
    is_explicit: bool = False  # answered by what its endpoint sends to a response port, perhaps after its end


@dataclass(frozen=True)
class Procs:
    """The evidence about a mesh of processes, by base rank."""

    name: str
    states: Mapping[int, str]  # as the store names them: "idle", "busy", "paused", "unresponsive", "failed", …
    details: Mapping[int, str]  # of a state: "it ended by signal 9 (SIGKILL)"
    before: Mapping[int, Evidence]
    after: Mapping[int, Evidence]
    calls: Sequence[UnansweredCall] = ()
    outer_waits: Sequence[AwaitedCall] = ()  # of actors of other meshes
    patience: float = LONG_S  # for which others have waited before a rank that may well be working is reported
    where: Callable[[Iterable[int]], str] = field(default=lambda ranks: f"ranks {sorted(ranks)}")


def judge(procs: Procs) -> tuple[Finding, ...]:
    """Returns the findings about one mesh, the certain ones first; none if no rank waits."""
    ended = [*_ended(procs), *_locked(procs)]
    findings = [*ended, *_collectives(procs, {rank for finding in ended for rank in finding.ranks})]
    findings += _unrecorded(procs, {rank for finding in findings for rank in finding.ranks})
    explained = {rank for finding in findings for rank in finding.ranks}
    findings += _calls(procs, explained | set(_in_collectives(procs)))
    return by_certainty(findings)


# -- ranks that cannot answer ------------------------------------------------------------------------------------------

_STATES: dict[str, tuple[Kind, str]] = {
    "halted": ("stopped", "{where} {is} stopped by a signal; kill -CONT continues"),
    "traced": ("stopped", "{where} {is} stopped by a debugger that is attached to the process"),
    "failed": ("dead", "{where} {is} dead: {detail}"),
    "out of memory": ("memory", "{where} {is} dead: {detail}; let it hold less, or give its host more memory"),
    "unreachable": ("unreachable", "{where} cannot be reached: {detail}"),
    "paused": ("stopped", "{where} {is} stopped in the debugger; %mdb continues"),
    "unresponsive": ("stuck", "{where} {does} not answer: stopped by a signal, or in C code that holds the GIL"),
    "asleep": ("stuck", "{where} {does} not answer: in C code that holds the GIL, and sleeps; %stacks shows where"),
}

STOPPED = {"T": "halted", "t": "traced"}  # by the letter of a process's state in /proc
_EXTERNAL_STATES = frozenset(
    {"starting", "failed", "out of memory", "paused", "halted", "traced", "asleep", "unreachable"}
)


def _ended(procs: Procs) -> Iterator[Finding]:
    groups: dict[tuple[str, str], list[int]] = {}
    for rank, state in procs.states.items():
        if rank not in procs.before and rank not in procs.after and state not in _EXTERNAL_STATES:
            state = "unresponsive"
        if state in _STATES:
            detail = procs.details.get(rank, "") if "{detail}" in _STATES[state][1] else ""
            groups.setdefault((state, detail), []).append(rank)
    waiting = _waiting(procs)
    for (state, detail), ranks in groups.items():
        kind, text = _STATES[state]
        is_one = len(ranks) == 1
        detail = detail or "it ended"
        words = text.format(
            where=procs.where(ranks),
            **{"is": "is" if is_one else "are", "does": "does" if is_one else "do"},
            detail=detail if is_one else detail.replace("it ended", "they ended", 1),
        )
        if waiting:
            words += f"; {waiting}"
        sure = state != "unresponsive" and not (state == "asleep" and len(ranks) * 2 >= len(procs.states))
        yield Finding(kind, procs.name, tuple(ranks), words, sure=sure)


def _locked(procs: Procs) -> Iterator[Finding]:
    """Yields findings about threads that wait for each other's locks, and have not run between the two looks."""
    alike: dict[tuple[str, str], list[int]] = {}
    for rank, evidence in procs.after.items():
        circle = evidence.circle
        if not circle or rank not in procs.before or procs.before[rank].circle != circle:
            continue
        waits = [f"{wait.thread} waits for {wait.lock} at {_short(wait.line)}" for wait in circle]
        own = f"{waits[0]}, which it holds itself"
        text = own if len(circle) == 1 else f"threads wait for each other's locks: {', '.join(waits)}"
        alike.setdefault((text, _source([wait.line for wait in circle])), []).append(rank)
    for (text, source), ranks in alike.items():
        yield Finding("deadlock", procs.name, tuple(ranks), f"{procs.where(ranks)}: {text}", source)


def _waiting(procs: Procs) -> str:
    """Names the ranks that wait in a collective of which some members have not answered; "" if there are none."""
    by_rank = {evidence.rank: base for base, evidence in procs.after.items() if evidence.rank >= 0}
    for key in dict.fromkeys(key for evidence in procs.after.values() for key in evidence.groups):
        members = [by_rank[member] for member in key.members if member in by_rank]
        pending = {rank: last for rank in members if (last := _newest(procs.after[rank], key)) and last.is_pending}
        if pending and len(members) < key.size:
            first = next(iter(pending.values()))
            line = _line_of(procs, pending)
            return (
                f"{procs.where(pending)} {_verb(pending, 'waits')} in {first.name} no. {first.number}"
                f"{line and f' ({line})'}"
            )
    return ""


# -- collectives -------------------------------------------------------------------------------------------------------


class _Group(NamedTuple):
    """A process group: the newest collectives of its members, and the members that wait."""

    key: GroupKey
    begun: Mapping[int, NewestCollective | None]  # by base rank, of the members that answered
    waiting: Mapping[int, NewestCollective]

    def is_late(self, rank: int, number: int) -> bool:
        """Returns whether a member has not begun the collective of that number."""
        newest = self.begun.get(rank)
        return rank in self.begun and (newest is None or newest.number < number)

    @property
    def late(self) -> dict[int, set[int]]:
        """The members that have not begun a collective in which others wait, by its number."""
        numbers = {collective.number for collective in self.waiting.values()}
        return {number: {rank for rank in self.begun if self.is_late(rank, number)} for number in numbers}


_UNKNOWN = -1  # in place of members that did not answer


def _collectives(procs: Procs, ended: Set[int]) -> Iterator[Finding]:
    """Yields findings about ranks that hold others up in collectives. `ended` are ranks with findings already."""
    by_rank = {evidence.rank: base for base, evidence in procs.after.items() if evidence.rank >= 0}
    groups = [
        _group(procs, key, [by_rank[member] for member in key.members if member in by_rank])
        for key in dict.fromkeys(key for evidence in procs.after.values() for key in evidence.groups)
    ]
    awaited = _awaited(procs, groups, by_rank)
    mismatches = [mismatch for group in groups if (mismatch := _mismatch(procs, group))]
    yield from (finding for finding, _ in mismatches)
    explained = {*ended, _UNKNOWN, *(rank for _, ranks in mismatches for rank in ranks)}
    pending = {*_in_collectives(procs), *_receiving(procs)}
    late = {rank for group in groups for ranks in group.late.values() for rank in ranks}
    culprits = {rank for rank in late if not awaited.get(rank) and rank not in pending | explained}
    yield from _late(procs, groups, culprits)
    silent = {rank for peers in awaited.values() for rank in peers} - culprits - awaited.keys() - pending - explained
    yield from _silent(procs, awaited, silent)
    # Ranks that wait for one of these are explained; the others, if any, wait for each other.
    ends = {*explained, *culprits, *silent, *(rank for rank in pending if not awaited.get(rank))}
    while more := {rank for rank, peers in awaited.items() if peers & ends} - ends:
        ends |= more
    if circle := _circle({rank: peers for rank, peers in awaited.items() if peers and rank not in ends}):
        yield _deadlock(procs, circle)


def _group(procs: Procs, key: GroupKey, members: Sequence[int]) -> _Group:
    begun = {rank: _newest(procs.after[rank], key) for rank in members}
    waiting = {
        rank: collective
        for rank, collective in begun.items()
        if collective
        and collective.is_pending
        and not _has_moved(procs, rank, key)
        and _is_in_wait(procs.after[rank], collective)
    }
    return _Group(key, begun, waiting)


def _awaited(procs: Procs, groups: Sequence[_Group], by_rank: Mapping[int, int]) -> dict[int, set[int]]:
    """Returns the ranks for which each rank waits."""
    awaited: dict[int, set[int]] = {}
    for group in groups:
        unknown = {_UNKNOWN} if len(group.begun) < group.key.size else set[int]()
        late = group.late
        for rank, collective in group.waiting.items():
            awaited.setdefault(rank, set()).update(late[collective.number], unknown)
    for rank, evidence in procs.after.items():
        running = _running(evidence)
        if running is not None and running.peers and not _has_left(procs, rank, running):
            awaited.setdefault(rank, set()).update(by_rank.get(peer, _UNKNOWN) for peer in running.peers)
    return awaited


def _circle(awaited: Mapping[int, Set[int]]) -> list[int]:
    """Returns ranks that wait for each other, directly or through others."""
    reached: dict[int, set[int]] = {}
    for first in awaited:
        reach, queue = reached.setdefault(first, set()), [first]
        while queue:
            following = awaited.get(queue.pop(), set()) - reach
            reach |= following
            queue += following
    circles = (
        [rank for rank in reached if rank in reach and first in reached[rank]] for first, reach in reached.items()
    )
    return min((circle for circle in circles if circle), key=len, default=[])


def _in_collectives(procs: Procs) -> Iterator[int]:
    """Yields the ranks that wait in some collective."""
    for rank, evidence in procs.after.items():
        if any(collective.is_pending and _is_in_wait(evidence, collective) for collective in evidence.collectives):
            yield rank


def _receiving(procs: Procs) -> Iterator[int]:
    """Yields the ranks that wait for a message of another rank."""
    for rank, evidence in procs.after.items():
        if (running := _running(evidence)) and running.peers:
            yield rank


def _is_in_wait(evidence: Evidence, collective: NewestCollective) -> bool:
    """Returns whether the thread that has begun a collective waits for it, rather than doing other work meanwhile."""
    for running in evidence.running:
        if running.thread == collective.thread and running.lines:
            return "/torch/" in running.lines[0].file.replace(os.sep, "/") or running.callee in _WAITS
    return True


def _newest(evidence: Evidence, key: GroupKey) -> NewestCollective | None:
    return next((collective for collective in evidence.collectives if collective.group == key), None)


def _has_moved(procs: Procs, rank: int, key: GroupKey) -> bool:
    """Returns whether a rank was in another collective of the group at the first look."""
    if rank not in procs.before:
        return True
    before, after = (_newest(look[rank], key) for look in (procs.before, procs.after))
    return before is None or after is None or before.number != after.number


def _has_left(procs: Procs, rank: int, running: EndpointRun) -> bool:
    """Returns whether a rank ran another call, or was at another line, at the first look."""
    before = _earlier(procs, rank, running)
    return before is None or before.lines != running.lines


def _earlier(procs: Procs, rank: int, running: EndpointRun) -> EndpointRun | None:
    """Returns the same run at the first look."""
    runs = procs.before[rank].running if rank in procs.before else ()
    return next((run for run in runs if (run.call, run.mesh) == (running.call, running.mesh)), None)


def _late(procs: Procs, groups: Sequence[_Group], culprits: Set[int]) -> Iterator[Finding]:
    """Yields findings about ranks that have not begun a collective in which others wait, one for each line."""
    missed: dict[tuple[GroupKey, int], list[int]] = {}  # by the first collective that they have not begun
    numbers = [(group, sorted(group.late)) for group in groups if group.waiting]
    for rank in sorted(culprits):
        firsts = [
            (number - (newest.number if (newest := group.begun[rank]) else 0), group.key.name, number, group.key)
            for group, late in numbers
            for number in late
            if group.is_late(rank, number)
        ]
        _, _, number, key = min(firsts, key=lambda first: first[:3])
        missed.setdefault((key, number), []).append(rank)
    by_key = {group.key: group for group in groups}
    for (key, number), ranks in missed.items():
        yield from _late_for(procs, by_key[key], number, ranks)


def _late_for(procs: Procs, group: _Group, number: int, ranks: Sequence[int]) -> Iterator[Finding]:
    waiting = {rank: newest for rank, newest in group.waiting.items() if newest.number == number}
    waits = max(collective.seconds for collective in waiting.values())
    if waits < procs.patience:
        return
    usual = max(newest.pause for newest in group.begun.values() if newest)
    in_endpoints = any(_running(procs.after[rank]) for rank in waiting)  # otherwise in threads of the program's own
    is_long = in_endpoints and waits >= PAUSES * usual
    line = _line_of(procs, waiting)
    title = f"{next(iter(waiting.values())).name} no. {number}{line and f' ({line})'}"
    waited = f"{procs.where(waiting)} {_verb(waiting, 'has')} waited {_seconds(waits)}"
    alike: dict[tuple[str, str, bool], list[int]] = {}
    for rank in ranks:
        action, source, sure = _action(procs, rank)
        alike.setdefault((action, source, sure and is_long), []).append(rank)
    for (action, source, sure), late in alike.items():
        if sure:
            begun = f"{procs.where(late)} {_verb(late, 'has')} not begun {title}"
            text = f"{begun}, where {waited}; {_clause(action, late)}"
            yield Finding("missing_from_collective", procs.name, tuple(late), text, source)
        else:
            text = f"{waited} in {title} for {procs.where(late)}; {_clause(action, late)}"
            yield Finding("waiting_on", procs.name, tuple(late), text, source, sure=False)


def _silent(procs: Procs, awaited: Mapping[int, Set[int]], silent: Set[int]) -> Iterator[Finding]:
    """Yields findings about ranks whose message others await; only several inspections show for how long."""
    for rank in sorted(silent):
        waiting = [waiter for waiter, peers in awaited.items() if rank in peers]
        runs = [run for waiter in waiting if (run := _running(procs.after[waiter]))]
        if not any(run.still and run.still >= procs.patience - LONG_S for run in runs):
            continue  # their messages arrive
        action, source, _ = _action(procs, rank)
        line = _line_of(procs, waiting)
        text = (
            f"{procs.where(waiting)} {_verb(waiting, 'waits')} for a message of {procs.where([rank])}"
            f"{line and f' ({line})'}; {_clause(action, [rank])}"
        )
        yield Finding("waiting_on", procs.name, (rank,), text, source, sure=False)


def _mismatch(procs: Procs, group: _Group) -> tuple[Finding, Sequence[int]] | None:
    """Finds ranks whose collective of some number differs from the others'; without a majority all are named.

    Returns the finding and all ranks that it explains.
    """
    if not group.waiting:
        return None
    histories = {rank: dict(newest.last) for rank, newest in group.begun.items() if newest}
    for number in sorted({number for history in histories.values() for number in history}):
        kinds: dict[str, list[int]] = {}
        for rank, history in histories.items():
            if number in history:
                kinds.setdefault(_comparable(history[number]), []).append(rank)
        if len(kinds) > 1:
            break
    else:
        return None
    most = max(map(len, kinds.values()))
    majority = [kind for kind, ranks in kinds.items() if len(ranks) == most]
    blamed = [rank for kind, ranks in kinds.items() if len(majority) > 1 or kind != majority[0] for rank in ranks]
    parts = [
        f"{procs.where(ranks)} {_verb(ranks, 'calls')} {histories[ranks[0]][number]}"
        + (f" at {line}" if (line := _line_of(procs, ranks)) else "")
        for _, ranks in sorted(kinds.items(), key=lambda item: len(item[1]))
    ]
    text = f"the ranks differ in their collective no. {number}: {'; '.join(parts)}"
    finding = Finding("mismatched_collective", procs.name, tuple(sorted(blamed)), text, _source_of(procs, blamed))
    return finding, [*group.begun]


def _comparable(collective: str) -> str:
    """Returns the part of a collective's description that has to be equal on all ranks."""
    name = collective.partition(" of ")[0]
    return collective if name in _ALIKE else name


def _deadlock(procs: Procs, circle: Sequence[int]) -> Finding:
    alike: dict[str, list[int]] = {}
    for rank in circle:
        pending = next((collective for collective in procs.after[rank].collectives if collective.is_pending), None)
        line = _line_of(procs, [rank])
        awaited = f"{pending.name} no. {pending.number} of group {pending.group.name}" if pending else "a message"
        alike.setdefault(f"in {awaited}{line and f' ({line})'}", []).append(rank)
    parts = [f"{procs.where(ranks)} {_verb(ranks, 'waits')} {wait}" for wait, ranks in alike.items()]
    text = f"{procs.where(circle)} wait for each other: {'; '.join(parts)}"
    return Finding("deadlock", procs.name, tuple(sorted(circle)), text, _source_of(procs, circle))


def _unrecorded(procs: Procs, explained: Set[int]) -> Iterator[Finding]:
    """Yields findings about ranks that do nothing while others of the same call are in unrecorded collectives."""
    waiting = {rank for rank in procs.after if is_in_unrecorded(procs.after[rank]) and _action(procs, rank)[2]}
    for call in procs.calls:
        callers = sorted(waiting & call.missing)
        seconds = max((run.seconds for rank in callers for run in _runs_of(procs, rank, call.call)), default=0.0)
        if seconds < procs.patience:
            continue
        alike: dict[tuple[str, str], list[int]] = {}
        for rank in sorted(call.missing & procs.after.keys() - waiting - explained):
            action, source, is_idle = _action(procs, rank)
            if is_idle and not any(collective.is_pending for collective in procs.after[rank].collectives):
                alike.setdefault((action, source), []).append(rank)
        line = _line_of(procs, callers)
        for (action, source), ranks in alike.items():
            text = (
                f"{procs.where(callers)} {_verb(callers, 'waits')} in a collective{line and f' ({line})'} that is not "
                f"recorded, and {procs.where(ranks)} {'is' if len(ranks) == 1 else 'are'} elsewhere: "
                f"{_clause(action, ranks)}"
            )
            yield Finding("waiting_on", procs.name, tuple(ranks), text, source, sure=False)


def is_in_unrecorded(evidence: Evidence) -> bool:
    """Returns whether an endpoint is in a collective, by its stack, and collectives are not recorded."""
    return not evidence.has_recorder and any(
        line.file.replace(os.sep, "/").endswith(_COLLECTIVES) for run in evidence.running for line in run.lines[:1]
    )


# -- calls -------------------------------------------------------------------------------------------------------------


def _calls(procs: Procs, explained: set[int]) -> Iterator[Finding]:
    """Yields findings about ranks that have not answered a call as others have, unless collectives explain it."""
    culprits = set[int]()
    for call in procs.calls:
        rest = sorted(call.missing)
        if call.is_explicit and call.seconds >= procs.patience:
            owing = [rank for rank in rest if rank in procs.after and not _holding(procs, rank, call.call)]
            if owing:
                rest = [rank for rank in rest if rank not in owing]
                late = f"{_verb(owing, 'has')} not answered {call.title}() for {_seconds(call.seconds)}"
                text = f"{procs.where(owing)} {late}: the endpoint has ended, and sent nothing to its response port"
                yield Finding("waiting_on", procs.name, tuple(owing), text, sure=False)
        if not rest or explained & call.missing or len(call.missing) == call.size:
            continue  # explained, or all ranks are missing
        alike: dict[tuple[str, str, bool, str], list[int]] = {}
        seconds = 0.0
        for rank in rest:
            run, holder = _holding(procs, rank, call.call), ""
            if run is not None:
                is_queued = run.call != call.call
                if is_queued and rank in culprits:
                    continue
                holder = f", which waits behind {run.actor}.{run.endpoint}()" if is_queued else ""
                seconds = max(seconds, min(run.seconds, call.seconds) if is_queued else run.seconds)
            alike.setdefault((*_action(procs, rank, run), holder), []).append(rank)
        if seconds < procs.patience:
            continue
        for (action, source, sure, holder), ranks in alike.items():
            has = _verb(ranks, "has")
            late = f"{has} not answered {call.title}() for {_seconds(seconds)}{holder}"
            text = f"{procs.where(ranks)} alone {late}; {_clause(action, ranks)}"
            culprits.update(ranks)
            sure = sure and len(rest) * 2 < call.size and not any(is_in_unrecorded(procs.after[rank]) for rank in ranks)
            yield Finding("stuck" if sure else "waiting_on", procs.name, tuple(ranks), text, source, sure)
    for rank, title in _ends_of_chains(procs):
        action, source, _ = _action(procs, rank)
        if rank not in explained:
            text = f"{procs.where([rank])} has not answered {title}(), for which others wait; {_clause(action, [rank])}"
            yield Finding("waiting_on", procs.name, (rank,), text, source, sure=False)


def _ends_of_chains(procs: Procs) -> Iterator[tuple[int, str]]:
    """Yields ranks whose answers other actors await, and that await none themselves, with the title of the call."""
    runs = {(run.mesh, run.rank): (base, run) for base, evidence in procs.after.items() for run in evidence.running}
    ends = set()
    for wait in (*procs.outer_waits, *(wait for _, run in runs.values() for wait in run.waits)):
        for rank in wait.ranks:
            base, target = runs.get((wait.mesh, rank), (-1, None))
            if target is not None and not target.waits and base not in ends and target.seconds >= procs.patience:
                ends.add(base)
                yield base, wait.title


# -- what a rank does --------------------------------------------------------------------------------------------------


def _action(procs: Procs, rank: int, run: EndpointRun | None = None) -> tuple[str, str, bool]:
    """Returns what a rank does, the program's line, and whether the rank does nothing that could end by itself.

    Without `run`, of its endpoints the one that has run longest counts. A rank that computes, or has moved between the
    two looks, may still reach the point where others wait.
    """
    after = procs.after.get(rank)
    if after is None:
        return "did not answer", "", False
    running = run or _running(after)
    if running is None:
        return "runs nothing: its call has ended", "", True
    now, source = _line_text(running.lines), _source(running.lines)
    before = _earlier(procs, rank, running)
    if before is None or before.lines != running.lines:
        return f"runs {now}", source, False
    if "R" in (running.state, before.state) or running.processor - before.processor > COMPUTES_S:
        return f"computes in {now}", source, False
    if "D" in (running.state, before.state) or running.transferred != before.transferred:
        return f"reads or writes in {now}", source, False
    if running.waits:
        wait = running.waits[0]
        return f"waits for {wait.title}() at {now}", source, False
    if min(running.woken, before.woken) >= 0 and running.woken - before.woken >= WOKEN:
        return f"receives in {now}", source, False
    if running.lock is not None:
        owner = f"which {running.lock.owner} holds at {_short(running.lock.owner_line)}"
        return f"waits for {running.lock.lock}, {owner}, in {now}", source, False
    if running.waits_for_child:
        return f"waits for a child process in {now}", source, False
    # Threads that have ended since are no longer counted.
    if running.woken < 0 and abs(running.helpers - before.helpers) > HELPS_S:
        return f"waits in {now}, while other threads of its process compute", source, False
    if running.woken < 0 and running.helpers_woken - before.helpers_woken >= WOKEN:
        return f"waits in {now}, while other threads of its process receive data", source, False
    if running.woken < 0 and abs(running.helpers_paused - before.helpers_paused) >= BUSY:
        return f"waits in {now}, while other threads of its process run", source, False
    return f"sits in {now}", source, True


def _clause(action: str, ranks: Sequence[int]) -> str:
    """Returns `it sits in x` for one rank, `they sit in x` for several."""
    verb, _, rest = action.partition(" ")
    return f"it {action}" if len(ranks) == 1 else f"they {_verb(ranks, verb)} {rest}"


def _verb(ranks: Sized, singular: str) -> str:
    """Returns the form of a verb for one rank or several."""
    return singular if len(ranks) == 1 else "have" if singular == "has" else singular.removesuffix("s")


def _running(evidence: Evidence) -> EndpointRun | None:
    """Returns the endpoint that has run longest."""
    return max(evidence.running, key=lambda running: running.seconds, default=None)


def _runs_of(procs: Procs, rank: int, call: str) -> Iterator[EndpointRun]:
    if rank in procs.after:
        yield from (running for running in procs.after[rank].running if running.call == call)


def _holding(procs: Procs, rank: int, call: str) -> EndpointRun | None:
    """Returns the run of a call on a rank, or else the one behind which the call waits in an actor's queue."""
    runs = procs.after[rank].running if rank in procs.after else ()
    holders = (run for run in sorted(runs, key=lambda run: -run.seconds) if call in run.queue)
    return next((run for run in runs if run.call == call), next(holders, None))


def _line_text(lines: Sequence[StackLine]) -> str:
    """Names the innermost line, and the user's if it differs: `queue.get at queue.py:171, called at data.py:19`."""
    if not lines:
        return "code that has no Python stack"
    inner = lines[0]
    text = f"{inner.function} at {_short(inner)}"
    users = next((line for line in lines if line.users), None)
    return text if users is None or users is inner else f"{text}, called at {_short(users)}"


def _source(lines: Sequence[StackLine]) -> str:
    line = next((line for line in lines if line.users), None)
    return "" if line is None else f"{line.file}:{line.line}"


def _source_of(procs: Procs, ranks: Iterable[int]) -> str:
    """Returns the line of the first of these ranks whose line is known."""
    runs = (_running(procs.after[rank]) for rank in ranks)
    return next((source for run in runs if run and (source := _source(run.lines))), "")


def _short(line: StackLine) -> str:
    return line_name(f"{line.file}:{line.line}")


def _line_of(procs: Procs, ranks: Iterable[int]) -> str:
    """Names the line at which most of these ranks wait."""
    lines: Counter[str] = Counter()
    for rank in ranks:
        running = _running(procs.after[rank]) if rank in procs.after else None
        line = next((line for line in running.lines if line.users), None) if running else None
        if line is not None:
            lines[_short(line)] += 1
    return lines.most_common(1)[0][0] if lines else ""


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
