"""The verdict: which ranks hold others up, from two looks at every process. Pure; `collector` collects the evidence.

A rank that has not begun the collective in which others wait is named with the line it is at. It is blamed for sure
only if it did nothing between the two looks, and waits for nobody itself. Silence is better than a wrong accusation.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from monarch_nb.code.file_names import line_name
from monarch_nb.collectives.verbs import GroupKey
from monarch_nb.diagnosis.findings import Finding, Kind, by_certainty
from monarch_nb.diagnosis.verbs import EndpointRun, Evidence, NewestCollective, StackLine

COMPUTES_S = 0.002  # processor time between two looks: a thread that waits uses less, also one that polls now and then


@dataclass(frozen=True)
class UnansweredCall:
    """A call of the controller that some ranks have not answered."""

    call: str
    title: str  # "trainers.step"
    missing: frozenset[int]  # base ranks
    size: int


@dataclass(frozen=True)
class Procs:
    """The evidence about a mesh of processes, by base rank."""

    name: str
    states: Mapping[int, str]  # as the store names them: "idle", "busy", "paused", "unresponsive", "failed", …
    details: Mapping[int, str]  # of a state: "it ended by signal 9 (SIGKILL)"
    before: Mapping[int, Evidence]
    after: Mapping[int, Evidence]
    calls: Sequence[UnansweredCall] = ()
    where: Callable[[Iterable[int]], str] = field(default=lambda ranks: f"ranks {sorted(ranks)}")


def judge(procs: Procs) -> tuple[Finding, ...]:
    """Returns the findings about one mesh, the certain ones first; none where nothing waits for anything."""
    findings = [*_ended(procs), *_collectives(procs)]
    explained = {rank for finding in findings for rank in finding.ranks}
    findings += _calls(procs, explained | set(_in_collectives(procs)))
    return by_certainty(findings)


# -- ranks that cannot answer ------------------------------------------------------------------------------------------

_STATES: dict[str, tuple[Kind, str]] = {
    "halted": ("stopped", "{where} {is} stopped by a signal; kill -CONT continues"),
    "failed": ("dead", "{where} {is} dead: {detail}"),
    "unreachable": ("unreachable", "{where} cannot be reached: {detail}"),
    "paused": ("stopped", "{where} {is} stopped in the debugger; %mdb continues"),
    "unresponsive": (
        "stuck",
        "{where} {does} not answer: stopped by a signal, or in C code that holds the GIL",
    ),
}

_SEEN_FROM_OUTSIDE = frozenset({"failed", "paused", "halted", "unreachable"})


def _ended(procs: Procs) -> Iterator[Finding]:
    groups: dict[tuple[str, str], list[int]] = {}
    for rank, state in procs.states.items():
        if rank not in procs.before and rank not in procs.after and state not in _SEEN_FROM_OUTSIDE:
            state = "unresponsive"
        if state in _STATES:
            detail = procs.details.get(rank, "") if "{detail}" in _STATES[state][1] else ""
            groups.setdefault((state, detail), []).append(rank)
    waiting = _waiting(procs)
    for (state, detail), ranks in groups.items():
        kind, text = _STATES[state]
        words = text.format(
            where=procs.where(ranks),
            **{"is": "is" if len(ranks) == 1 else "are", "does": "does" if len(ranks) == 1 else "do"},
            detail=detail or "its process has ended",
        )
        if waiting:
            words += f"; {waiting}"
        yield Finding(kind, procs.name, tuple(ranks), words, sure=state != "unresponsive")


def _waiting(procs: Procs) -> str:
    """Ranks that wait in a collective, of which some members have not answered."""
    by_rank = {evidence.rank: base for base, evidence in procs.after.items() if evidence.rank >= 0}
    for key in dict.fromkeys(key for evidence in procs.after.values() for key in evidence.groups):
        members = [by_rank[member] for member in key.members if member in by_rank]
        pending = {rank: found for rank in members if (found := _newest(procs.after[rank], key)) and found.is_pending}
        if pending and len(members) < len(key.members):
            first = next(iter(pending.values()))
            place = _where_of(procs, pending)
            return (
                f"{procs.where(pending)} {'waits' if len(pending) == 1 else 'wait'} in {first.name} no. {first.number}"
                f"{place and f' ({place})'}"
            )
    return ""


# -- collectives -------------------------------------------------------------------------------------------------------


def _collectives(procs: Procs) -> Iterator[Finding]:
    by_rank = {evidence.rank: base for base, evidence in procs.after.items() if evidence.rank >= 0}
    keys = dict.fromkeys(key for evidence in procs.after.values() for key in evidence.groups)
    for key in keys:
        members = [by_rank[member] for member in key.members if member in by_rank]
        yield from _group(procs, key, members, len(members) < len(key.members))


def _group(procs: Procs, key: GroupKey, members: Sequence[int], incomplete: bool) -> Iterator[Finding]:
    begun = {rank: _newest(procs.after[rank], key) for rank in members}
    last = max((collective.number for collective in begun.values() if collective), default=0)
    waiting = {
        rank: collective
        for rank, collective in begun.items()
        if collective and collective.number == last and collective.is_pending and not _has_moved(procs, rank, key)
    }
    if not waiting:
        return
    late = [rank for rank, collective in begun.items() if collective is None or collective.number < last]
    first = next(iter(waiting.values()))
    waits = max(collective.seconds for collective in waiting.values())
    title = f"{first.name} no. {last}"
    place = _where_of(procs, waiting)
    if late:
        yield from _late(procs, late, waiting, f"{title}{place and f' ({place})'}", waits)
    elif not incomplete and len({_kind_of(collective) for collective in waiting.values()}) > 1:
        yield _mismatch(procs, waiting, title)


def _in_collectives(procs: Procs) -> Iterator[int]:
    """Ranks that wait in some collective."""
    for rank, evidence in procs.after.items():
        if any(collective.is_pending for collective in evidence.collectives):
            yield rank


def _newest(evidence: Evidence, key: GroupKey) -> NewestCollective | None:
    return next((collective for collective in evidence.collectives if collective.group == key), None)


def _has_moved(procs: Procs, rank: int, key: GroupKey) -> bool:
    """Whether a rank was in another collective of the group at the first look."""
    if rank not in procs.before:
        return True
    before, after = (_newest(look[rank], key) for look in (procs.before, procs.after))
    return before is None or after is None or before.number != after.number


def _late(
    procs: Procs, late: Sequence[int], waiting: Mapping[int, NewestCollective], title: str, waits: float
) -> Iterator[Finding]:
    """Ranks that have not begun what others wait in, together where they are at the same line."""
    alike: dict[tuple[str, str, bool], list[int]] = {}
    in_endpoints = any(_running(procs.after[rank]) for rank in waiting)  # otherwise in threads of the program's own
    for rank in late:
        does, source, sure = _does(procs, rank)
        alike.setdefault((does, source, sure and in_endpoints), []).append(rank)
    others = procs.where(waiting)
    have = "has" if len(waiting) == 1 else "have"
    for (does, source, sure), ranks in alike.items():
        has = "has" if len(ranks) == 1 else "have"
        waited = f"where {others} {have} waited {_seconds(waits)}"
        text = f"{procs.where(ranks)} {has} not begun {title}, {waited}; {_clause(does, ranks)}"
        yield Finding("missing_from_collective" if sure else "waiting_on", procs.name, tuple(ranks), text, source, sure)


def _mismatch(procs: Procs, waiting: Mapping[int, NewestCollective], title: str) -> Finding:
    """All have begun the same number, but not the same operation: the minority is named, or all where there is none."""
    kinds: dict[str, list[int]] = {}
    for rank, collective in waiting.items():
        kinds.setdefault(_kind_of(collective), []).append(rank)
    most = max(map(len, kinds.values()))
    majority = [kind for kind, ranks in kinds.items() if len(ranks) == most]
    blamed = [rank for kind, ranks in kinds.items() if len(majority) > 1 or kind != majority[0] for rank in ranks]
    parts = [
        f"{procs.where(ranks)} {'calls' if len(ranks) == 1 else 'call'} {kind}"
        + (f" at {place}" if (place := _where_of(procs, ranks)) else "")
        for kind, ranks in sorted(kinds.items(), key=lambda item: len(item[1]))
    ]
    text = f"the ranks differ in their collective no. {next(iter(waiting.values())).number}: {'; '.join(parts)}"
    return Finding("mismatched_collective", procs.name, tuple(sorted(blamed)), text, _where_of(procs, blamed))


def _kind_of(collective: NewestCollective) -> str:
    return f"{collective.name} of {collective.what}" if collective.what else collective.name


# -- calls -------------------------------------------------------------------------------------------------------------


def _calls(procs: Procs, explained: set[int]) -> Iterator[Finding]:
    """Ranks that alone have not answered a call, where collectives do not explain it."""
    for call in procs.calls:
        rest = sorted(call.missing)
        if not rest or explained & call.missing or len(rest) == call.size:
            continue  # explained, or all ranks alike
        alike: dict[tuple[str, str, bool], list[int]] = {}
        for rank in rest:
            alike.setdefault(_does(procs, rank), []).append(rank)
        seconds = max((running.seconds for rank in rest for running in _of_call(procs, rank, call.call)), default=0.0)
        for (does, source, sure), ranks in alike.items():
            has = "has" if len(ranks) == 1 else "have"
            late = f"{has} not answered {call.title}() for {_seconds(seconds)}"
            text = f"{procs.where(ranks)} alone {late}; {_clause(does, ranks)}"
            kind: Kind = "stuck" if sure else "waiting_on"
            yield Finding(kind, procs.name, tuple(ranks), text, source, sure and len(rest) * 2 < call.size)


# -- what a rank does --------------------------------------------------------------------------------------------------


def _does(procs: Procs, rank: int) -> tuple[str, str, bool]:
    """What a rank does, the line of the program, and whether it does nothing that could end by itself.

    It computes, or has moved between the two looks: then it may well come to where others wait.
    """
    after = procs.after.get(rank)
    if after is None:
        return "did not answer", "", False
    running = _running(after)
    if running is None:
        return "runs nothing: its call has ended", "", True
    now, source = _line_text(running.lines), _source(running.lines)
    before = _running(procs.before[rank]) if rank in procs.before else None
    if before is None or before.call != running.call or before.lines != running.lines:
        return f"runs {now}", source, False
    if "R" in (running.state, before.state) or running.processor - before.processor > COMPUTES_S:
        return f"computes in {now}", source, False
    if "D" in (running.state, before.state) or running.transferred != before.transferred:
        return f"reads or writes in {now}", source, False
    if running.waits:
        wait = running.waits[0]
        return f"waits for {wait.title}() at {now}", source, False
    return f"sits in {now}", source, True


def _clause(does: str, ranks: Sequence[int]) -> str:
    """`it sits in x` for one rank, `they sit in x` for several."""
    verb, _, rest = does.partition(" ")
    return f"it {does}" if len(ranks) == 1 else f"they {verb.removesuffix('s')} {rest}"


def _running(evidence: Evidence) -> EndpointRun | None:
    """The endpoint that has run longest."""
    return max(evidence.running, key=lambda running: running.seconds, default=None)


def _of_call(procs: Procs, rank: int, call: str) -> Iterator[EndpointRun]:
    if rank in procs.after:
        yield from (running for running in procs.after[rank].running if running.call == call)


def _line_text(lines: Sequence[StackLine]) -> str:
    """The innermost line, and the user's where that is another: `queue.get at queue.py:171, called at data.py:19`."""
    if not lines:
        return "code that has no Python stack"
    inner = lines[0]
    text = f"{inner.function} at {_short(inner)}"
    users = next((line for line in lines if line.users), None)
    return text if users is None or users is inner else f"{text}, called at {_short(users)}"


def _source(lines: Sequence[StackLine]) -> str:
    line = next((line for line in lines if line.users), None)
    return "" if line is None else f"{line.file}:{line.line}"


def _short(line: StackLine) -> str:
    return line_name(f"{line.file}:{line.line}")


def _where_of(procs: Procs, ranks: Iterable[int]) -> str:
    """The line at which most of these ranks wait."""
    lines: Counter[str] = Counter()
    for rank in ranks:
        running = _running(procs.after[rank]) if rank in procs.after else None
        line = next((line for line in running.lines if line.users), None) if running else None
        if line is not None:
            lines[_short(line)] += 1
    return lines.most_common(1)[0][0] if lines else ""


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
