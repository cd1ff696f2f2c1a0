"""The report of what has happened to a mesh while it had no controller, given once to the one that attaches it."""

import time
from collections.abc import Mapping, Sequence

from msgspec import Struct

from monarch_nb.host import mesh_files, run_findings
from monarch_nb.host import protocol as p
from monarch_nb.host.mesh_files import MeshFile, clock
from monarch_nb.logs import MeshLogs
from monarch_nb.runtime import ActorState, MeshState, ProcState, Runtime
from monarch_nb.settings import format_duration
from monarch_nb.shape import places_of
from monarch_nb.supervision import Cause, hosts_text, notice_text
from monarch_nb.wire import counted, host_name, parse_address

_LINES = 12  # last lines of output to include
_PAST_S = 1.0  # for written output to arrive


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
    ended: Sequence[RankEnd] = (),
    unreached: Mapping[str, str] = {},
    notices: Mapping[str, Sequence[p.PreemptionNotice]] = {},
    findings: Sequence[p.RunFinding] = (),
) -> DowntimeReport:
    """Builds the report from the answers of a mesh's hosts and processes."""
    states: dict[str, MeshState] = {state.uid: state for state in (procs, *actors)}
    events = [
        *_ends(procs, exits), *_failed(states, ended), *_missed(states, welcomes), *_running(states, welcomes),
        *_unreached(procs, unreached), *_noticed(procs, notices), *_found(procs, findings),
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


def _ends(procs: ProcState, exits: Sequence[p.Exited]) -> list[tuple[float, str]]:
    events = []
    for gone in exits:
        if not gone.expected:
            rank = parse_address(gone.address).rank
            where = places_of(procs.region, [rank]) or f"rank {rank}"
            how = gone.reason.removeprefix("the process this actor was running on failed: ")
            ended = f"{procs.name} {where} ended: {how}"
            events.append((gone.at, f"{clock(gone.at)} {ended}; heal_mesh brings it back"))
    return events


def _found(procs: ProcState, findings: Sequence[p.RunFinding]) -> list[tuple[float, str]]:
    """Returns what host agents have found out; ends are events of their own."""
    return [
        (found.first, f"{finding_line(found)} ({procs.name})")
        for found in findings
        if found.kind not in ("dead", "memory")
    ]


def _unreached(procs: ProcState, hosts: Mapping[str, str]) -> list[tuple[float, str]]:
    events, now = [], time.time()
    for host, why in hosts.items():
        where = places_of(procs.region, [rank for rank in procs.layout.ranks_on(host) if rank in procs.ranks])
        if not where:  # released before
            continue
        text = f"{procs.name} {where} counts as lost: its host {host_name(host)} cannot be reached ({why})"
        events.append((now, f"{text}; heal_mesh starts it anew there once it can, with replace=True elsewhere"))
    return events


def _noticed(procs: ProcState, notices: Mapping[str, Sequence[p.PreemptionNotice]]) -> list[tuple[float, str]]:
    """Returns events for hosts with a preemption notice, which had nobody to notify at the time."""
    events = []
    for host, each in notices.items():
        places = places_of(procs.region, [rank for rank in procs.layout.ranks_on(host) if rank in procs.ranks])
        where = f"{hosts_text([host])}{f' ({places})' if places else ''}"
        for notice in each:
            if notice.over:
                text = f"{where} was to be taken away ({notice.by}), and is still there"
            else:
                text = f"notice came: {notice_text([host], notice.by, notice.seconds)}{f', {places}' if places else ''}"
            events.append((notice.at, f"{clock(notice.at)} {text}"))
    return events


def _failed(states: Mapping[str, MeshState], ended: Sequence[RankEnd]) -> list[tuple[float, str]]:
    groups: dict[tuple[str, str], list[RankEnd]] = {}
    for each in ended:
        groups.setdefault((each.mesh, each.cause.likeness), []).append(each)
    events = []
    for (mesh, _), group in groups.items():
        state, cause = states[mesh], group[0].cause
        where = places_of(state.region, sorted(each.rank for each in group))
        failed = f"{state.name} {where}".rstrip()
        events.append(
            (cause.at, f"{clock(cause.at)} {failed} failed: {cause.text or cause.kind}; heal_mesh brings it back")
        )
    return events


def _missed(states: Mapping[str, MeshState], welcomes: Mapping[str, p.Welcome]) -> list[tuple[float, str]]:
    groups: dict[tuple[str, str, bool, str], list[p.UndeliveredReply]] = {}
    for welcome in welcomes.values():
        for missed in welcome.missed:
            key = missed.mesh, missed.endpoint.lstrip("@!"), missed.stored, missed.error
            groups.setdefault(key, []).append(missed)
    events = []
    for (mesh, endpoint, kept, error), group in groups.items():
        state = states.get(mesh)
        if state is None:
            continue
        last = max(missed.at for missed in group)
        where = places_of(state.region, sorted({missed.rank for missed in group}))
        there = f'monarch.results("{state.name}") has it' if kept else "it was more than kept_results_size"
        how = f"ended on {where or 'its rank'}" if not error else f"raised {error} on {where or 'its rank'}"
        events.append(
            (last, f"{clock(last)} {state.name}.{endpoint}() {how}, with no controller to receive it; {there}")
        )
    return events


def _running(states: Mapping[str, MeshState], welcomes: Mapping[str, p.Welcome]) -> list[tuple[float, str]]:
    groups: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for welcome in welcomes.values():
        for mesh, rank, endpoint, since in welcome.running:
            groups.setdefault((mesh, endpoint.lstrip("@!")), []).append((rank, since))
    events = []
    for (mesh, endpoint), group in groups.items():
        state = states.get(mesh)
        if state is not None:
            where = places_of(state.region, sorted({rank for rank, _ in group}))
            since = min(at for _, at in group)
            events.append(
                (time.time(), f"{state.name}.{endpoint}() runs on {where or 'its rank'} since {clock(since)}")
            )
    return events


def _lines(runtime: Runtime, procs: ProcState, answer: p.AttachReply, addresses: Mapping[str, p.Welcome]) -> list[str]:
    receiver = runtime.part(MeshLogs).receiver
    receiver.await_past(addresses, _PAST_S)
    found = []
    for address in addresses:
        where = places_of(procs.region, [parse_address(address).rank])
        for written in receiver.written(address):
            if written.at >= answer.left_at > 0:
                found += [(written.at, f"[{where}] {line}" if where else line) for line in written.lines]
    found.sort(key=lambda line: line[0])
    left_out = len(found) - _LINES
    more = [f"… {left_out} lines before these: {procs.name}.logs()"] if left_out > 0 else []
    return more + [line for _, line in found[-_LINES:]]


def listing(meshes: Sequence[MeshFile]) -> str:
    """Returns the meshes that can be attached, one per line."""
    if not meshes:
        return "no mesh was left: mesh.detach() leaves one, and %detach --keep 1h all of a kernel, when it ends"
    return "\n".join(_line(mesh) for mesh in meshes)


def _line(mesh: MeshFile) -> str:
    actors = f" with {', '.join(mesh.actors)}" if mesh.actors else ""
    where = ", ".join(dict.fromkeys(way.host for way in mesh.ways))
    what = f"{mesh.name} {{{mesh.shape}}}{actors} on {mesh.machine} ({where})"
    if mesh.holder is not None:
        by = mesh.holder
        return f"{what}: held by {by.what}, process {by.pid} on {by.machine}, since {clock(by.since)}"
    left = format_duration(max(0, round(mesh_files.lease_left(mesh))) * 10**9)
    return f"{what}: left at {clock(mesh.left_at)}: {mesh.why}; {left} of its lease left"


def findings_report(name: str) -> str:
    """What was found about the mesh of that name or id, or with actors of that name, while it had no controller.

    Raises LookupError if nothing is known about such a mesh.
    """
    runs, wrong = list[run_findings.RunFindings](), list[str]()
    for path in run_findings.all_files():
        try:
            runs.append(run_findings.read(path))
        except ValueError as error:
            if path.name.startswith(f"{name}.") or f".{name}." in path.name:
                wrong.append(str(error))
    meshes = [mesh for _, mesh in mesh_files.tidied()]
    every: dict[str, run_findings.RunFindings | MeshFile] = {run.uid: run for run in runs}
    every.update((mesh.uid, mesh) for mesh in meshes)
    called = [uid for uid, each in every.items() if name in (each.name, uid)]
    called = called or [uid for uid, each in every.items() if name in each.actors]
    if not called and not wrong:
        known = ", ".join(sorted({each.name for each in every.values()})) or "none"
        raise LookupError(f"nothing is known on this machine about a mesh {name!r}; known are: {known}")
    lines = []
    for uid in called:
        mesh = next((mesh for mesh in meshes if mesh.uid == uid), None)
        lines += _described(every[uid].name, mesh, [run for run in runs if run.uid == uid])
    return "\n".join([*lines, *wrong])


def _described(name: str, mesh: MeshFile | None, runs: Sequence[run_findings.RunFindings]) -> list[str]:
    lines = [f"{name}: {_state_of(mesh)}"]
    found = run_findings.of_all_hosts(each for run in runs for each in run.findings)
    lines += [f"  {finding_line(each)}" for each in found]
    if not any(run.findings for run in runs):
        lines.append("  nothing found")
    lines += [f"inspected: {run.inspected} on host {host_name(run.host)} since {clock(run.since)}" for run in runs]
    hosts = [] if mesh is None else [way.host for way in mesh.ways]
    if elsewhere := [host_name(host) for host in hosts if host not in {run.host for run in runs}]:
        lines.append(f"inspected on their own machines, if at all: {', '.join(elsewhere)}")
    return lines


def finding_line(found: p.RunFinding) -> str:
    """A finding with its times."""
    until = f"–{clock(found.last)}" if found.times > 1 else ""
    is_fact = found.sure or found.kind == "waiting_on"  # as Finding.is_suspicion
    return f"{clock(found.first)}{until} {'' if is_fact else 'perhaps: '}{found.text}"


def _state_of(mesh: MeshFile | None) -> str:
    if mesh is None:
        return "its record is gone: it was stopped, or has ended"
    if mesh.ended:
        return f"ended at {clock(mesh.ended_at)}: {mesh.ended}"
    return "a program has it" if mesh.holder is not None else f"left at {clock(mesh.left_at)}: {mesh.why}"
