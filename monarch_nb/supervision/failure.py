"""Failures of meshes: the event passed to an owner's `__supervise__`, its text, errors of calls, hooks of actors."""

import inspect
import logging
import signal
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import datetime
from math import prod
from textwrap import indent
from typing import NoReturn, Self

import msgspec

from monarch_nb.runtime import ActorCell, Cause
from monarch_nb.wire import Harmless, host_name, msgpack_decoder
from monarch_nb.wire.plain import decode_plain

from .ranks import Extent, points_text

logger = logging.getLogger(__name__)

_WIDTH = 120  # of the text that names ranks
NO_REASON = "no reason provided"
PROCS_STOPPED = "actor mesh is stopped due to proc mesh shutdown"
UNHANDLED = "failed because it did not handle a supervision event from its child"
RAISED_WHILE_HANDLING = "This error occurred while handling another failure:"
_SHOWN_LINES = 20
_NAMED = 4  # hosts

_encoder = msgspec.msgpack.Encoder(enc_hook=str)  # a MeshName is text on the wire


class MeshName(str):
    """The name a mesh was spawned with. Equal to that text, but not to the name of another mesh called the same."""

    uid: str

    def __new__(cls, text: str, uid: str) -> Self:
        """Creates the name `text` of the mesh `uid`."""
        name = super().__new__(cls, text)
        name.uid = uid
        return name

    def __eq__(self, other: object) -> bool:
        if isinstance(other, MeshName):
            return self.uid == other.uid
        return str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__

    def __reduce__(self) -> "tuple[type[MeshName], tuple[str, str]]":
        return MeshName, (str(self), self.uid)


class MeshFailure(Harmless, frozen=True, kw_only=True, omit_defaults=True):
    """Some ranks of a mesh have failed, or, if `preempted`, their host is about to be taken away.

    `crashed_ranks` count row-major in that mesh; `also` names other affected meshes, and `left` counts the ranks of
    that mesh that have not failed (-1: all but the ranks of this event).
    """

    mesh_name: str
    cause: Cause
    failure_id: int = 0  # 0: no owner in this process is notified
    mesh_uid: str = ""
    procs: bool = False  # a proc mesh, else an actor mesh
    extent: Extent = ((), ())
    places: tuple[int, ...] = ()
    also: tuple[str, ...] = ()
    healing: bool = False
    left: int = -1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mesh_uid:  # a program compares it with the name of its mesh, which other meshes may share
            msgspec.structs.force_setattr(self, "mesh_name", MeshName(self.mesh_name, self.mesh_uid))

    @property
    def mesh(self) -> None:
        """Always None, as upstream: the mesh is named, not passed."""
        return

    @property
    def crashed_ranks(self) -> list[int]:
        """The ranks that failed; none, while their host is only about to be taken away."""
        return [] if self.preempted else list(self.places)

    @property
    def preempted(self) -> bool:
        """True if no rank has failed yet, but the host of these ranks is about to be taken away."""
        return self.cause.kind == "preemption"

    @property
    def seconds_left(self) -> float | None:
        """The seconds until that host is taken away; None if not known, and for a failure."""
        cause = self.cause
        return None if cause.seconds is None else max(0.0, cause.at + cause.seconds - time.time())

    @property
    def host(self) -> str:
        """The host of the failure; "" if unknown."""
        return self.cause.host or self.cause.origin.host

    @property
    def at(self) -> float:
        """The time in seconds since the epoch; 0 if unknown."""
        return self.cause.at or self.cause.origin.at

    @property
    def last_lines(self) -> tuple[str, ...]:
        """The last lines that the failed process wrote."""
        return self.cause.last_lines or self.cause.origin.last_lines

    @property
    def chain(self) -> tuple[Cause, ...]:
        """Its causes: the nearest first, the root cause last."""
        return self.cause.links

    @property
    def size(self) -> int:
        """The number of ranks of the mesh."""
        return prod(self.extent[1])

    @property
    def where(self) -> str:
        """The ranks as text, such as "gpus=0-3"."""
        if not self.places:
            return "all ranks"
        if 1 < len(self.places) == self.size:
            return f"all {self.size} ranks"
        text = points_text(self.extent, self.places)
        if not text:
            return f"rank {self.places[0]}"
        return text if len(text) <= _WIDTH else f"{text[:_WIDTH].rpartition(',')[0]},… ({len(self.places)} ranks)"

    @property
    def next_step(self) -> str:
        """Advice on what to do next."""
        name, kind = self.mesh_name, self.cause.kind
        if kind in ("left", "taken"):
            return f"monarch.attach({name!r}{', steal=True' * (kind == 'taken')}) comes back to it"
        if kind == "shrunk":
            return f"call {name}, or take a slice of it anew: what it has by now works"
        if kind == "preemption":
            return f"save what is there; once it is lost, heal_mesh({name}, replace=True) goes on with another host"
        if kind in ("stopped", "owner"):
            return f"{name} cannot be used again: spawn a new one"
        if self.healing:
            return f"{name} is being healed: wait for heal_mesh({name})"
        if kind == "undeliverable":
            return f"correct the cause and call {name} again; a message that was lost is not sent again by itself"
        several = ", " in self.host
        host = f"host {host_name(self.host) or 'it was on'}"
        giver = self.cause.origin.giver
        condition = "once these hosts are back, " if several else f"once {host} is back, "
        first = {"host": "" if giver else condition, "init": "once its cause is corrected, "}
        plural = len(self.places) > 1 or not self.places
        if kind in ("init", "exception", "aborted"):
            verb = f"re-creates {'them with their' if plural else 'it with its'} original arguments"
        else:
            verb = f"brings {'them' if plural else 'it'} back"
        steps = [f"{first.get(kind, '')}heal_mesh({name}) {verb}"]
        if kind == "host" and giver:
            stay_away = "these hosts do" if several else f"{host} does"
            steps.append(f"if {stay_away} not come back, {giver} is asked for {'others' if several else 'another'}")
        if self.cause.origin.oom:
            steps.insert(0, "let it hold less, or give its host more memory")
        if self.places and self.left != 0 and len(self.places) < self.size:
            steps.append(f"{name}.slice(...) without {self.where} still works")
        return "; ".join(steps)

    def report(self) -> str:
        """Returns the whole report: mesh, cause, ranks, hosts, last lines of output, and the next step."""
        state = {"stopped": "stopped", "owner": "failed", "left": "left", "taken": "taken", "shrunk": "shrunk"}.get(
            self.cause.kind
        )
        if state is not None:
            mesh_kind = "proc mesh" if self.procs else "actor mesh"
            lines = [f"The {mesh_kind} {self.mesh_name} has status: {state}: {self.cause.text}"]
            if self.places:
                lines.append(f"  mesh      {self.mesh_name}, {self.where}")
            lines += [f"  {kind:<9} {value}" for kind, value in facts(self.cause.origin) if kind == "host"]
            return "\n".join([*lines, f"  next      {self.next_step}"])
        if self.preempted:
            rows = [("mesh", f"{self.mesh_name}, {self.where}"), ("affects", ", ".join(self.also))]
            lines = [notice_text(self.host.split(", "), self.cause.text, self.seconds_left)]
            lines += [f"  {label:<9} {value}" for label, value in (*rows, ("next", self.next_step)) if value]
            return "\n".join(lines)
        cause, owners = unhandled(self.cause)
        heading = f"The {'proc' if self.procs else 'actor'} {cause.actor} and all its descendants have failed:"
        if cause.kind == "undeliverable":
            heading = f"A message to {cause.actor or self.mesh_name} was lost on its way:"
        error = error_text(cause)
        if self.procs:
            error = error.replace("the process this actor was running on", "its process", 1)
        lines = [heading, *(f"  {line}" for line in (*error.splitlines(), *owners)), ""]
        rows = [("mesh", f"{self.mesh_name}, {self.where}"), *facts(self.cause.origin)]
        if self.also:
            rows.append(("affects", ", ".join(self.also)))
        lines += [f"  {label:<9} {value}" for label, value in rows]
        lines += filter(None, [last_lines_text(self.last_lines), dump_text(self.cause.origin.dump)])
        return "\n".join([*lines, f"  {'next':<9} {self.next_step}"])

    def encode(self) -> bytes:
        """Returns the failure as bytes, for messages between our own processes."""
        return _encoder.encode(self)

    def __str__(self) -> str:
        return (
            f"MeshFailure(mesh_name={self.mesh_name}, crashed_ranks={self.crashed_ranks}, "
            f"event={event_text(self.cause)})"
        )

    __repr__ = __str__

    def __reduce__(self) -> NoReturn:
        raise TypeError("a MeshFailure cannot be pickled: send its report() instead")


_decoder = msgpack_decoder(MeshFailure)


def decode_failure(data: bytes | memoryview) -> MeshFailure:
    """Decodes a failure. Raises msgspec.DecodeError on garbage."""
    return decode_plain(data, _decoder)


def gathered(failures: Iterable[MeshFailure]) -> list[MeshFailure]:
    """Merges failures of a mesh with the same cause, in the order of the first of each."""
    groups: dict[tuple[str, str], list[MeshFailure]] = {}
    for failure in failures:
        groups.setdefault((failure.mesh_uid or failure.mesh_name, failure.cause.likeness), []).append(failure)
    return [_merge(group) for group in groups.values()]


def _merge(group: list[MeshFailure]) -> MeshFailure:
    first = min(group, key=lambda failure: failure.places)
    if len(group) == 1:
        return first
    indices = tuple(sorted({index for failure in group for index in failure.places}))
    also = tuple(dict.fromkeys(name for failure in group for name in failure.also))
    remaining = min(failure.left for failure in group)
    cause = msgspec.structs.replace(first.cause, actor=first.mesh_name) if first.cause.actor else first.cause
    return msgspec.structs.replace(first, places=indices, also=also, left=remaining, cause=cause)


def ending(cause: Cause) -> str:
    """Describes the end of a process, such as "Killed(sig=9)"."""
    if cause.signal is not None:
        return f"Killed(sig={cause.signal})" + (", out of memory" if cause.oom else "")
    if cause.exitcode is not None:
        return f"Exited(code={cause.exitcode})"
    return cause.text or "for an unknown reason"


def notice_text(hosts: Sequence[str], by: str, seconds: float | None) -> str:
    """Returns the text of a preemption notice: its hosts, its source, and the remaining time."""
    when = "soon; nobody knows when" if seconds is None else f"in {seconds:.0f} s"
    return f"{hosts_text(hosts)} {'is' if len(hosts) == 1 else 'are'} about to be taken away ({by}), {when}"


def hosts_text(hosts: Sequence[str]) -> str:
    """Returns hosts by their names, the first few of many."""
    if len(hosts) == 1:
        return f"Host {host_name(hosts[0])}"
    more = f" and {len(hosts) - _NAMED} more" if len(hosts) > _NAMED else ""
    return f"{len(hosts)} hosts ({', '.join(map(host_name, hosts[:_NAMED]))}{more})"


def error_text(cause: Cause) -> str:
    """Returns the text of a cause without the name of the actor; the cause behind it follows, indented."""
    text = cause.traceback.rstrip() or cause.text or NO_REASON
    match cause.kind:
        case "exit" | "signal":
            by_agent = f", by its host agent: {cause.text}" if cause.evicted and cause.text else ""
            plain = cause.exitcode if cause.signal is None else None
            end = f"exited with non-zero code {plain}" if plain else f"failed: {ending(cause)}"
            return f"the process this actor was running on {end}{by_agent}"
        case "killed":
            return f"the process this actor was running on was killed: {text}"
        case "host":
            lost = f"the host {host_name(cause.host) or 'it was on'} was lost"
            if ", " in cause.host:
                lost = f"{hosts_text(cause.host.split(', '))} were lost"
            return lost + (f": {cause.text}" if cause.text else "")
        case "preemption":
            return f"its host {host_name(cause.host)} is about to be taken away: {cause.text}"
        case "init":
            return f"its __init__ raised:\n{text}"
        case "spawn":
            return f"it could not be started again: {text}"
        case "unhandled":
            return f"actor {cause.actor} {UNHANDLED}. The child's event was:\n{_chain_text(cause)}"
        case "raised":
            return f"{text}\n{RAISED_WHILE_HANDLING}\n{_chain_text(cause)}"
        case _:
            return text


def event_text(cause: Cause) -> str:
    """Returns the text of the whole event: the failed actor or process, and the cause."""
    if cause.kind == "unhandled":
        return f"Supervision event: {error_text(cause)}"
    return f"Supervision event: actor {cause.actor} failed:\n{indent(error_text(cause), '  ')}"


def unhandled(cause: Cause) -> tuple[Cause, list[str]]:
    """Returns the first cause, and a line for each owner that failed because it did not handle it, nearest first."""
    lines: list[str] = []
    while cause.kind == "unhandled" and cause.chain is not None:
        lines.insert(0, f"actor {cause.actor} {UNHANDLED}.")
        cause = cause.chain
    return cause, lines


def _chain_text(cause: Cause) -> str:
    return indent(event_text(cause.chain), "  ") if cause.chain else "  (not known)"


def facts(cause: Cause) -> list[tuple[str, str]]:
    """Returns host, process and kind of the end as (label, value) pairs; only known facts."""
    lines: list[tuple[str, str]] = []
    if cause.host or cause.pid:
        several = ", " in cause.host
        hosts = hosts_text(cause.host.split(", ")) if several else host_name(cause.host)
        lines.append(("host", ", ".join(filter(None, (hosts, f"pid {cause.pid}" if cause.pid else "")))))
    if cause.signal is not None:
        lines.append(("ended", f"by signal {cause.signal}{_signal_name(cause.signal)}"))
        if cause.oom:
            used = f"; it used {cause.memory}" if cause.memory else ""
            lines.append(("memory", f"the host killed it because it ran out of memory{used}"))
    elif cause.exitcode is not None:
        lines.append(("ended", f"with exit status {cause.exitcode}"))
    if cause.at:
        lines.append(("at", datetime.fromtimestamp(cause.at).astimezone().strftime("%H:%M:%S")))
    return lines


def last_lines_text(lines: tuple[str, ...]) -> str:
    """Returns the text of its last lines of output; "" without any."""
    shown = [f"    | {line.rstrip()}" for line in lines[-_SHOWN_LINES:]]
    return "\n".join(["  its last lines:", *shown]) if shown else ""


def dump_text(lines: tuple[str, ...]) -> str:
    """Returns the stacks of the process at its crash; "" if not known."""
    return "\n".join(["  it crashed here:", *(f"    | {line.rstrip()}" for line in lines)]) if lines else ""


def _signal_name(number: int) -> str:
    try:
        return f" ({signal.Signals(number).name})"
    except ValueError:
        return ""


class DeviceMeshError(RuntimeError):
    """A mesh is broken. Catch this to heal it, or to continue with a slice that works."""


class SupervisionError(DeviceMeshError):
    """A call cannot be answered because a rank that it was sent to failed; `failure` describes it."""

    def __init__(self, message: str = "", *, endpoint: str | None = None, failure: MeshFailure | None = None) -> None:
        super().__init__(message)
        self.endpoint = endpoint
        """The call, as "mesh.method()"; settable."""
        self.failure = failure
        self.reported_elsewhere = False  # the failure is reported separately, if the call is not awaited

    def __str__(self) -> str:
        text = super().__str__() or (self.failure.report() if self.failure is not None else "")
        return f"Endpoint call {self.endpoint} failed, {text}" if self.endpoint else text

    def __reduce__(self) -> tuple[object, ...]:
        # The failure itself refuses to be pickled, but an error that an endpoint lets through must reach its caller.
        encoded = self.failure.encode() if self.failure is not None else None
        return _rebuild, (type(self), self.args[0] if self.args else "", self.endpoint, encoded)


class HealError(DeviceMeshError):
    """A mesh was not healed; `failures` has the new failures, and is empty if healing was refused."""

    def __init__(self, message: str = "", failures: tuple[MeshFailure, ...] = ()) -> None:
        super().__init__(message)
        self.failures = failures

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_heal, (type(self), self.args[0], tuple(failure.encode() for failure in self.failures))


def _rebuild(
    kind: type[SupervisionError], message: str, endpoint: str | None, encoded: bytes | None
) -> SupervisionError:
    return kind(message, endpoint=endpoint, failure=None if encoded is None else decode_failure(encoded))


def _rebuild_heal(kind: type[HealError], message: str, encoded: tuple[bytes, ...]) -> HealError:
    return kind(message, tuple(map(decode_failure, encoded)))


class UndeliverableMessage(msgspec.Struct, frozen=True):
    """A message that did not arrive: the argument of `_handle_undeliverable_message`."""

    source: str  # its sender
    destination: str  # address of the receiving process
    mesh: str
    method: str  # "" for a value sent to a port
    reason: str

    def sender(self) -> str:
        """The sender."""
        return self.source

    def dest(self) -> str:
        """The destination: a process, and the endpoint there if any."""
        return f"{self.destination}.{self.method}" if self.method else self.destination

    def error_msg(self) -> str:
        """The reason why it did not arrive."""
        return self.reason


def run_hook(
    cell: ActorCell,
    hook: Callable[[], object],
    done: Callable[[bool], None],
    failed: Callable[[BaseException], None],
    *,
    judging: bool = False,
) -> None:
    """Has an actor run a hook, and calls `done` with its bool. Thread-safe; does not block.

    All exceptions count, CancelledError and SystemExit too, so that the failure is always reported: unless the actor
    ends, of which its owner is notified anyway. An actor that is already ending runs no such hook.
    """

    def run() -> object:
        if cell.cause is not None:
            return None
        try:
            with cell.acting(judging=judging):
                result = hook()
            if inspect.iscoroutine(result):
                return finish(result)
            done(bool(result))
        except BaseException as error:
            raised(error)
        return None

    async def finish(result: Awaitable[object]) -> None:
        try:
            with cell.acting(judging=judging):
                handled = bool(await result)
            done(handled)
        except BaseException as error:
            raised(error)

    def raised(error: BaseException) -> None:
        if cell.ending and not isinstance(error, Exception):
            raise error
        failed(error)

    cell.executor.post_control(run)


def log_failure(failure: MeshFailure) -> None:
    """Logs an unhandled failure: the default."""
    logger.error("%s", failure.report())
