"""The report of events on a mesh while it had no controller, and the results of calls that ended then."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, overload

from msgspec import Struct

from monarch_nb.host import mesh_files, run_findings
from monarch_nb.host import protocol as p
from monarch_nb.host.mesh_files import MeshFile, clock
from monarch_nb.logs import MeshLogs
from monarch_nb.mesh.handle import Handle, state_of
from monarch_nb.mesh.requests import request
from monarch_nb.mesh.value import ValueMesh
from monarch_nb.mesh.verbs import RESULT, RESULTS, StoredResult, WantedResult, WantedResults
from monarch_nb.runtime import ActorState, MeshState, ProcState, Runtime, current_runtime, proc_state_of
from monarch_nb.runtime.actors.failures import RankError, RankNames, actor_error, in_order
from monarch_nb.settings import format_duration
from monarch_nb.shape import Extent, places_of
from monarch_nb.supervision import Cause, hosts_text, notice_text
from monarch_nb.wire import counted, decode, host_name, parse_address, size_text

_LINES = 12  # last lines of output to include
_PAST_S = 1.0  # for written output to arrive
_ANSWER_S = 10.0
_BODY_S = 600.0  # for one rank's answer, however large


class RankEnd(Struct, frozen=True):
    """A rank of an actor mesh that has ended."""

    mesh: str
    rank: int
    cause: Cause


class DowntimeReport(Struct, frozen=True):
    """A summary, events, and the last lines of output."""

    head: str
    events: tuple[str, ...]
    lines: tuple[str, ...]

    def text(self) -> str:
        """Returns the whole report."""
        parts = [self.head]
        if self.events:
            parts += ["meanwhile:", *(f"  {event}" for event in self.events)]
        if self.lines:
            parts += ["last lines written meanwhile:", *(f"  | {line}" for line in self.lines)]
        return "\n".join(parts)


def downtime_report(
    runtime: Runtime,
    procs: ProcState,
    actors: Sequence[ActorState],
    answer: p.AttachReply,
    exits: Sequence[p.Exited],
    welcomes: Mapping[str, p.Welcome],
    ends: Sequence[RankEnd] = (),
    unreached: Mapping[str, str] = {},
    notices: Mapping[str, Sequence[p.PreemptionNotice]] = {},
    findings: Sequence[p.RunFinding] = (),
) -> DowntimeReport:
    """Builds the report from the answers of a mesh's hosts and processes."""
    states: dict[str, MeshState] = {state.uid: state for state in (procs, *actors)}
    events = [
        *_end_events(procs, exits), *_failures(states, ends), *_missed_calls(states, welcomes),
        *_running_calls(states, welcomes), *_unreached_hosts(procs, unreached), *_notices(procs, notices),
        *_findings(procs, findings),
    ]  # fmt: skip
    with_them = f" with {', '.join(state.name for state in actors)}" if actors else ""
    living = len(welcomes)
    how_many = f"{living} of {len(procs.region)} procs" if living < len(procs.region) else _procs(len(procs.region))
    since = _since(answer)
    head = f"{procs.name} is back: {how_many}{with_them}; {since}"
    return DowntimeReport(
        head, tuple(text for _, text in sorted(events)), tuple(_lines(runtime, procs, answer, welcomes))
    )


def _procs(count: int) -> str:
    return f"{counted(count, 'proc')}"


def _since(answer: p.AttachReply) -> str:
    if answer.before is not None:
        return f"taken over from {answer.before.what} (process {answer.before.pid} on {answer.before.machine})"
    away = format_duration(max(1, round(time.time() - answer.left_at)) * 10**9)
    return f"left {away} ago, at {clock(answer.left_at)}: {answer.why}"


def _end_events(procs: ProcState, exits: Sequence[p.Exited]) -> list[tuple[float, str]]:
    events = []
    for end in exits:
        if not end.expected:
            rank = parse_address(end.address).rank
            ranks = places_of(procs.region, [rank]) or f"rank {rank}"
            reason = end.reason.removeprefix("the process this actor was running on failed: ")
            text = f"{procs.name} {ranks} ended: {reason}"
            events.append((end.at, f"{clock(end.at)} {text}; heal_mesh brings it back"))
    return events


def _findings(procs: ProcState, findings: Sequence[p.RunFinding]) -> list[tuple[float, str]]:
    """Returns events for findings of host agents; ends have separate events."""
    return [
        (finding.first, f"{finding_line(finding)} ({procs.name})")
        for finding in findings
        if finding.kind not in ("dead", "memory")
    ]


def _unreached_hosts(procs: ProcState, hosts: Mapping[str, str]) -> list[tuple[float, str]]:
    events, now = [], time.time()
    for host, reason in hosts.items():
        ranks = places_of(procs.region, [rank for rank in procs.layout.ranks_on(host) if rank in procs.ranks])
        if not ranks:  # released before
            continue
        text = f"{procs.name} {ranks} counts as lost: its host {host_name(host)} cannot be reached ({reason})"
        events.append((now, f"{text}; heal_mesh starts it anew there once it can, with replace=True elsewhere"))
    return events


def _notices(procs: ProcState, notices: Mapping[str, Sequence[p.PreemptionNotice]]) -> list[tuple[float, str]]:
    """Returns events for hosts with a preemption notice, which had no controller to notify at the time."""
    events = []
    for host, host_notices in notices.items():
        ranks = places_of(procs.region, [rank for rank in procs.layout.ranks_on(host) if rank in procs.ranks])
        location = f"{hosts_text([host])}{f' ({ranks})' if ranks else ''}"
        for notice in host_notices:
            if notice.over:
                text = f"{location} was to be taken away ({notice.by}), and is still there"
            else:
                text = f"notice came: {notice_text([host], notice.by, notice.seconds)}{f', {ranks}' if ranks else ''}"
            events.append((notice.at, f"{clock(notice.at)} {text}"))
    return events


def _failures(states: Mapping[str, MeshState], ends: Sequence[RankEnd]) -> list[tuple[float, str]]:
    groups: dict[tuple[str, str], list[RankEnd]] = {}
    for end in ends:
        groups.setdefault((end.mesh, end.cause.likeness), []).append(end)
    events = []
    for (mesh, _), group in groups.items():
        state, cause = states[mesh], group[0].cause
        ranks = places_of(state.region, sorted(end.rank for end in group))
        failed = f"{state.name} {ranks}".rstrip()
        events.append(
            (cause.at, f"{clock(cause.at)} {failed} failed: {cause.text or cause.kind}; heal_mesh brings it back")
        )
    return events


def _missed_calls(states: Mapping[str, MeshState], welcomes: Mapping[str, p.Welcome]) -> list[tuple[float, str]]:
    groups: dict[tuple[str, str, bool, str], list[p.UndeliveredReply]] = {}
    for welcome in welcomes.values():
        for missed in welcome.missed:
            key = missed.mesh, missed.endpoint.lstrip("@!"), missed.stored, missed.error
            groups.setdefault(key, []).append(missed)
    events = []
    for (mesh, endpoint, stored, error), group in groups.items():
        state = states.get(mesh)
        if state is None:
            continue
        last = max(missed.at for missed in group)
        ranks = places_of(state.region, sorted({missed.rank for missed in group}))
        note = f'monarch.results("{state.name}") has it' if stored else "it was more than kept_results_size"
        outcome = f"ended on {ranks or 'its rank'}" if not error else f"raised {error} on {ranks or 'its rank'}"
        events.append(
            (last, f"{clock(last)} {state.name}.{endpoint}() {outcome}, with no controller to receive it; {note}")
        )
    return events


def _running_calls(states: Mapping[str, MeshState], welcomes: Mapping[str, p.Welcome]) -> list[tuple[float, str]]:
    groups: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for welcome in welcomes.values():
        for mesh, rank, endpoint, since in welcome.running:
            groups.setdefault((mesh, endpoint.lstrip("@!")), []).append((rank, since))
    events = []
    for (mesh, endpoint), group in groups.items():
        state = states.get(mesh)
        if state is not None:
            ranks = places_of(state.region, sorted({rank for rank, _ in group}))
            since = min(start for _, start in group)
            events.append(
                (time.time(), f"{state.name}.{endpoint}() runs on {ranks or 'its rank'} since {clock(since)}")
            )
    return events


def _lines(runtime: Runtime, procs: ProcState, answer: p.AttachReply, addresses: Mapping[str, p.Welcome]) -> list[str]:
    receiver = runtime.part(MeshLogs).receiver
    receiver.await_past(addresses, _PAST_S)
    lines = []
    for address in addresses:
        label = places_of(procs.region, [parse_address(address).rank])
        for written in receiver.written(address):
            if written.at >= answer.left_at > 0:
                lines += [(written.at, f"[{label}] {line}" if label else line) for line in written.lines]
    lines.sort(key=lambda line: line[0])
    left_out = len(lines) - _LINES
    header = [f"… {left_out} lines before these: {procs.name}.logs()"] if left_out > 0 else []
    return header + [line for _, line in lines[-_LINES:]]


def listing(meshes: Sequence[MeshFile]) -> str:
    """Returns the meshes that can be attached, one per line."""
    if not meshes:
        return "no mesh was left: mesh.detach() leaves one, and %detach --keep 1h all of a kernel, when it ends"
    counts = Counter(mesh.name for mesh in meshes)
    return "\n".join(_line(mesh, f" ({mesh.uid})" if counts[mesh.name] > 1 else "") for mesh in meshes)


def _line(mesh: MeshFile, uid: str) -> str:
    actors = f" with {', '.join(mesh.actors)}" if mesh.actors else ""
    hosts = ", ".join(dict.fromkeys(way.host for way in mesh.ways))
    text = f"{mesh.name}{uid} {{{mesh.shape}}}{actors} on {mesh.machine} ({hosts})"
    if mesh.holder is not None:
        holder = mesh.holder
        return f"{text}: held by {holder.what}, process {holder.pid} on {holder.machine}, since {clock(holder.since)}"
    remaining = format_duration(max(0, round(mesh_files.lease_left(mesh))) * 10**9)
    return f"{text}: left at {clock(mesh.left_at)}: {mesh.why}; {remaining} of its lease left"


def findings_report(name: str) -> str:
    """Returns findings about the mesh of that name or id, or with actors of that name, while it had no controller.

    Raises LookupError if nothing is known about such a mesh.
    """
    runs, errors = list[run_findings.RunFindings](), list[str]()
    for path in run_findings.all_files():
        try:
            runs.append(run_findings.read(path))
        except ValueError as error:
            if path.name.startswith(f"{name}.") or f".{name}." in path.name:
                errors.append(str(error))
    meshes = [mesh for _, mesh in mesh_files.tidied()]
    records: dict[str, run_findings.RunFindings | MeshFile] = {run.uid: run for run in runs}
    records.update((mesh.uid, mesh) for mesh in meshes)
    uids = [uid for uid, record in records.items() if name in (record.name, uid)]
    uids = uids or [uid for uid, record in records.items() if name in record.actors]
    if not uids and not errors:
        names = ", ".join(sorted({record.name for record in records.values()})) or "none"
        raise LookupError(f"nothing is known on this machine about a mesh {name!r}; known are: {names}")
    lines = []
    for uid in uids:
        mesh = next((mesh for mesh in meshes if mesh.uid == uid), None)
        lines += _description(records[uid].name, mesh, [run for run in runs if run.uid == uid])
    return "\n".join([*lines, *errors])


def _description(name: str, mesh: MeshFile | None, runs: Sequence[run_findings.RunFindings]) -> list[str]:
    lines = [f"{name}: {_state_of(mesh)}"]
    findings = run_findings.of_all_hosts(finding for run in runs for finding in run.findings)
    lines += [f"  {finding_line(finding)}" for finding in findings]
    if not any(run.findings for run in runs):
        lines.append("  nothing found")
    lines += [f"inspected: {run.inspected} on host {host_name(run.host)} since {clock(run.since)}" for run in runs]
    hosts = [] if mesh is None else [way.host for way in mesh.ways]
    if elsewhere := [host_name(host) for host in hosts if host not in {run.host for run in runs}]:
        lines.append(f"inspected on their own machines, if at all: {', '.join(elsewhere)}")
    return lines


def finding_line(finding: p.RunFinding) -> str:
    """Returns a finding with its times."""
    until = f"–{clock(finding.last)}" if finding.times > 1 else ""
    is_fact = finding.sure or finding.kind == "waiting_on"  # as Finding.is_suspicion
    return f"{clock(finding.first)}{until} {'' if is_fact else 'perhaps: '}{finding.text}"


def _state_of(mesh: MeshFile | None) -> str:
    if mesh is None:
        return "its record is gone: it was stopped, or has ended"
    if mesh.ended:
        return f"ended at {clock(mesh.ended_at)}: {mesh.ended}"
    return "a program has it" if mesh.holder is not None else f"left at {clock(mesh.left_at)}: {mesh.why}"


class ResultLostError(RuntimeError):
    """Not all ranks' results of a call are available; the text names the missing ones and the reasons."""


class Result:
    """The result of one call on some or all ranks of the mesh."""

    def __init__(self, runtime: Runtime, state: MeshState, answers: "Sequence[tuple[str, StoredResult]]") -> None:
        self._runtime, self._state = runtime, state
        self._stored = {pair[1].index: pair for pair in sorted(answers, key=lambda pair: pair[1].index)}
        first = answers[0][1]
        self.call = first.call
        self.endpoint = first.endpoint.lstrip("@!")
        self.ranks = tuple(answer.rank for _, answer in self._stored.values())
        self.at = max(answer.at for _, answer in answers)  # wall clock, when the last of these ranks finished
        self.size = sum(answer.size for _, answer in answers)  # bytes
        self._extent = None if first.extent is None else Extent(*first.extent)
        self._count = len(self._stored) if self._extent is None else self._extent.nelements  # number of ranks called
        self._bodies: dict[int, list[bytes]] = {}

    @property
    def ok(self) -> bool:
        """True if all called ranks have returned without an error, and their results are available."""
        return not (self._errors or self._gaps())

    @property
    def _errors(self) -> dict[int, StoredResult]:
        return {index: answer for index, (_, answer) in self._stored.items() if answer.error}

    @property
    def _dropped(self) -> dict[int, StoredResult]:
        return {index: answer for index, (_, answer) in self._stored.items() if not (answer.stored or answer.error)}

    @property
    def _missing(self) -> list[int]:
        return [index for index in range(self._count) if index not in self._stored]

    def get(self) -> Any:
        """Returns the value of the call's future: a ValueMesh for `call`, one value for `call_one`. Blocks.

        Raises ActorError for a rank's error, as the future would have, and ResultLostError if results are missing.
        """
        raised = {
            index: RankError(self._frames(index), None) for index, answer in self._errors.items() if answer.stored
        }
        if raised:
            ranks = [self._stored[index][1].rank if index in self._stored else -1 for index in range(self._count)]
            title = f"{self._state.name}.{self.endpoint}"
            raise actor_error(self._runtime, title, in_order(raised), self._count, (), RankNames(self._state, ranks))
        if self._gaps():
            raise ResultLostError(f"{self._title} is not complete: {self._gaps()}; .values() has what there is")
        if self._extent is None or not self._extent.labels:
            return self._value(next(iter(self._stored)))
        return ValueMesh(self._extent, [self._value(index) for index in range(self._count)])

    def values(self) -> dict[int, Any]:
        """Returns the available results by rank, an exception for a rank that has raised. Blocks."""
        values = {}
        for index, (_, answer) in self._stored.items():
            if answer.stored:
                error = RankError(self._frames(index), None) if answer.error else None
                values[answer.rank] = self._value(index) if error is None else error.exception(self._runtime)
        return values

    def _frames(self, index: int) -> list[bytes]:
        if index not in self._bodies:
            address, answer = self._stored[index]
            body = request(self._runtime, address, RESULT, WantedResult(answer.number)).get(_BODY_S)
            if body.frames is None:
                raise ResultLostError(
                    f"{self._title}: the answer of {self._label([index])} has made room for later ones; "
                    "kept_results_size says how much is kept"
                )
            self._bodies[index] = list(body.frames)
        return self._bodies[index]

    def _value(self, index: int) -> Any:
        first, *buffers = self._frames(index)
        return decode([first, *map(bytearray, buffers)], self._runtime)

    @property
    def _title(self) -> str:
        return f"{self._state.name}.{self.endpoint}()"

    def _label(self, indices: Sequence[int]) -> str:
        ranks = [self._stored[index][1].rank for index in indices]
        return places_of(self._state.region, ranks) or "its rank"

    def _gaps(self) -> str:
        gaps = []
        if self._missing:
            ranks = self._label(list(self._stored))
            gaps.append(f"{len(self._stored)} of {counted(self._count, 'rank')} ({ranks}) ended while nobody was there")
        for index, answer in self._errors.items():
            if not answer.stored:
                gaps.append(f"{self._label([index])}: {answer.error}, of which no more is kept")
        if self._dropped:
            size = size_text(sum(answer.size for answer in self._dropped.values()))
            gaps.append(f"what {self._label(list(self._dropped))} answered ({size}) was more than kept_results_size")
        return "; ".join(gaps)

    def __repr__(self) -> str:
        text = f"{clock(self.at)} {self._title} on {self._label(list(self._stored))}"
        if raised := self._errors:
            suffix = f" on {self._label(list(raised))}" if len(raised) < len(self._stored) else ""
            text += f": raised {', '.join(dict.fromkeys(answer.error for answer in raised.values()))}{suffix}"
        elif not self._dropped:
            text += f": {size_text(self.size)}"
        gaps = self._gaps()
        return f"{text}; {gaps}" if gaps else text


class Results(Sequence[Result]):
    """Stored results of one mesh of processes, and of the actors on it, the oldest first."""

    def __init__(self, runtime: Runtime, name: str, results: Sequence[Result]) -> None:
        self._runtime, self._name, self._results = runtime, name, list(results)

    @overload
    def __getitem__(self, index: int) -> Result: ...
    @overload
    def __getitem__(self, index: slice) -> "Results": ...
    def __getitem__(self, index: int | slice) -> "Result | Results":
        if isinstance(index, slice):
            return Results(self._runtime, self._name, self._results[index])
        return self._results[index]

    def __len__(self) -> int:
        return len(self._results)

    def forget(self) -> None:
        """Deletes these results in the processes that store them. Blocks until they have agreed."""
        numbers: dict[str, list[int]] = {}
        for result in self._results:
            for address, answer in result._stored.values():
                numbers.setdefault(address, []).append(answer.number)
        requests = [request(self._runtime, address, RESULTS, WantedResults((), tuple(ids)))
                 for address, ids in numbers.items()]  # fmt: skip
        for reply in requests:
            reply.get(_ANSWER_S)
        self._results.clear()

    def __repr__(self) -> str:
        if not self._results:
            return f"no call of {self._name} has ended while nobody was there"
        lines = [f"[{index}] {result!r}" for index, result in enumerate(self._results)]
        return "\n".join([f"calls of {self._name} that ended while nobody was there, for .get():", *lines])


def results(mesh: "Handle[Any] | str") -> Results:
    """Returns the results, or errors, of calls on a detached mesh that have ended while it had no controller.

    For a mesh of processes, or its name, it has the results of all actors on it. Each has `endpoint`, `ranks`, `at`,
    and `get()`, which returns the value of that call's future. Calls that were under way when the mesh was attached are
    included once they have ended. Each process stores `kept_results_size` bytes of results, the newest.
    Blocks; lost ranks have none. Raises LookupError for a name that no mesh here has.
    """
    runtime = current_runtime()
    state = _named(runtime, mesh) if isinstance(mesh, str) else state_of(mesh)
    procs = proc_state_of(state)
    meshes = {state.uid: state} if isinstance(state, ActorState) else {procs.uid: procs, **procs.actors}
    addresses = [procs.address(rank) for rank in state.ranks]
    body = WantedResults(tuple(meshes))
    requests = {address: request(runtime, address, RESULTS, body) for address in addresses}
    calls: dict[tuple[str, str, int], list[tuple[str, StoredResult]]] = {}
    for address, reply in requests.items():
        try:
            answers = reply.get(_ANSWER_S).results
        except (RuntimeError, TimeoutError):  # ended or stopped
            continue
        for answer in answers:
            index = answer.index if answer.extent is None else -1  # sent to each rank separately
            calls.setdefault((answer.mesh, answer.call, index), []).append((address, answer))
    entries = [Result(runtime, meshes[uid], group) for (uid, _, _), group in calls.items()]
    return Results(runtime, state.name, sorted(entries, key=lambda result: result.at))


def _named(runtime: Runtime, name: str) -> MeshState:
    for state in reversed(tuple(runtime.meshes.values())):
        if state.name == name and state.stopped is None and state.owner_process == runtime.address:
            return state
    raise LookupError(f"there is no mesh {name!r} here: attach it first, monarch.attach({name!r})")
