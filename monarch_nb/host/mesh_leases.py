"""Leases on a host: of meshes that may outlive their owners, with the service that executes them, and of owners.

A held mesh has a living owner. A detached one has none, for the time of a lease; then it ends, unless a controller
attaches it. The first host of a mesh decides who gets it; other hosts follow the number of that grant. An owner has a
lease where this host cannot observe its death by itself.
"""

import hmac
import logging
import time
from collections import deque
from collections.abc import Callable
from importlib import import_module
from math import inf
from pathlib import Path

from msgspec import Struct, field

from monarch_nb.host import mesh_files, verbs
from monarch_nb.host import protocol as p
from monarch_nb.host.mesh_files import clock
from monarch_nb.host.procs.children import Child, Children, ProcStopper
from monarch_nb.host.protocol import Attach, Exited, Hold, MeshHolder, RunFinding, Unwatched
from monarch_nb.host.sender import AgentSender
from monarch_nb.logs.tailer import LogTailer
from monarch_nb.settings import format_duration
from monarch_nb.wire import Asker, Done, Handlers, parse_address

_EXITS = 256  # ends of processes that are stored for the next owner; the first and the last ones matter most
_NOT_YOURS = "the secret is not that of this mesh: it belongs to somebody else's controller"
_COMES = "a later attach has it"
NOBODY = ""  # the owner of processes of a detached mesh

# One function takes the ends of processes; the other ends a diagnosis and returns its findings.
Diagnosis = tuple[Callable[[Exited], None], Callable[[], tuple[RunFinding, ...]]]

log = logging.getLogger(__name__)


class MeshLease(Struct, eq=False):
    """One mesh on this host."""

    uid: str
    name: str
    secret: str
    seconds: float  # its lease once it is detached
    keep: bool  # True if it is detached, rather than ended, when its owner ends
    holder: MeshHolder | None
    grant: int = 0  # grows with each attach
    turn: int = 0  # grows with each change of its holder
    left_at: float = 0.0  # wall clock
    until: float = 0.0  # monotonic, while it is detached
    why: str = ""  # why it was detached
    meshes: tuple[str, ...] = ()  # uids of the processes, and of the actors on them
    parts: dict[str, bytes] = field(default_factory=dict)
    file: str = ""
    exits: deque[Exited] = field(default_factory=lambda: deque(maxlen=_EXITS))
    unwatched: Unwatched | None = None

    @property
    def detached(self) -> bool:
        """True while it is detached."""
        return self.holder is None


class HeldError(ValueError):
    """A mesh cannot be attached; the text names its holder, since when, and a remedy."""


class MeshLeases:
    """The leases of one host, by the uid of the mesh of processes. Pure; times are passed in."""

    def __init__(self) -> None:
        self._all: dict[str, MeshLease] = {}

    def __bool__(self) -> bool:
        return bool(self._all)

    def get(self, uid: str) -> MeshLease | None:
        """Returns the lease of a mesh."""
        return self._all.get(uid)

    def all(self) -> list[MeshLease]:
        """Returns all leases."""
        return list(self._all.values())

    @property
    def detached(self) -> list[MeshLease]:
        """Returns the leases of detached meshes."""
        return [lease for lease in self._all.values() if lease.detached]

    def check(self, uid: str, owner: str) -> None:
        """Raises HeldError for a mesh that its former owner has left, or lost to another."""
        lease = self._all.get(uid)
        if lease is not None and (lease.holder is None or lease.holder.address != owner):
            raise HeldError(f"{lease.name} is not yours any more: {self._holder_text(lease)}")

    def hold(self, request: Hold, owner: str) -> MeshLease:
        """Records how an owner wants a mesh held; later messages replace the parts they name. Raises HeldError."""
        self.check(request.uid, owner)
        lease = self._all.get(request.uid)
        if lease is None:
            lease = self._all[request.uid] = MeshLease(
                request.uid, request.name, request.secret, request.seconds, request.keep, request.holder
            )
        lease.seconds, lease.keep, lease.holder = request.seconds, request.keep, request.holder
        lease.meshes, lease.file, lease.unwatched = request.meshes, request.file, request.unwatched
        lease.grant, lease.turn = max(lease.grant, request.grant), max(lease.turn, request.turn)
        lease.parts = {name: part for name, part in {**lease.parts, **request.parts}.items() if part}
        return lease

    def leave(self, uid: str, owner: str, now: float, wall: float, reason: str) -> MeshLease:
        """Detaches a mesh for its lease. Raises HeldError."""
        lease = self._all.get(uid)
        if lease is None or lease.holder is None or lease.holder.address != owner:
            raise HeldError(f"it cannot be left: {self._holder_text(lease) if lease else 'it is not known here'}")
        return self._leave(lease, now, wall, reason)

    def owner_gone(self, owner: str, now: float, wall: float, reason: str) -> tuple[list[MeshLease], list[MeshLease]]:
        """Handles an owner's end: returns the meshes that are detached by it, and those that end with it."""
        owned = [lease for lease in self.all() if lease.holder is not None and lease.holder.address == owner]
        detached = [self._leave(lease, now, wall, reason) for lease in owned if lease.keep]
        ended = [lease for lease in owned if not lease.keep]
        for lease in ended:
            del self._all[lease.uid]
        return detached, ended

    def _leave(self, lease: MeshLease, now: float, wall: float, reason: str) -> MeshLease:
        lease.holder, lease.why, lease.left_at, lease.until = None, reason, wall, now + lease.seconds
        lease.turn += 1
        return lease

    def attach(self, uid: str, secret: str, newcomer: MeshHolder, *, steal: bool = False, grant: int = 0, turn: int = 0
               ) -> MeshHolder | None:  # fmt: skip
        """Gives a mesh to a controller; returns the previous holder, if any. Raises HeldError.

        `grant` and `turn` are those of the mesh's first host, and 0 there.
        """
        lease = self._all.get(uid)
        if lease is None:
            raise HeldError("it is not there any more: it was stopped, or its lease has ended")
        if not hmac.compare_digest(lease.secret.encode(), secret.encode()):
            raise HeldError(_NOT_YOURS)
        if grant:
            if grant <= lease.grant:
                raise HeldError(_COMES)
        elif lease.holder is not None and lease.holder.address != newcomer.address and not steal:
            raise HeldError(f"{self._holder_text(lease)}; steal=True (%attach {lease.name} --steal) takes it over")
        former = lease.holder
        lease.grant = grant or lease.grant + 1
        lease.turn = max(lease.turn + 1, turn)
        lease.holder, lease.until = newcomer, 0.0
        return former if former is not None and former.address != newcomer.address else None

    def was_left(self, request: Attach) -> bool:
        """Returns whether the sender has observed the end of the mesh's owner."""
        lease = self._all.get(request.uid)
        if lease is None or lease.holder is None or lease.holder.address != request.ended:
            return False
        return hmac.compare_digest(lease.secret.encode(), request.secret.encode())

    def drop(self, uid: str, secret: str, owner: str) -> None:
        """Removes the lease of an owner that had lost this host and gave the mesh up. Raises HeldError."""
        lease = self._all.get(uid)
        if lease is None:
            return
        if not hmac.compare_digest(lease.secret.encode(), secret.encode()):
            raise HeldError(_NOT_YOURS)
        if lease.holder is not None and lease.holder.address != owner:
            raise HeldError(self._holder_text(lease))
        del self._all[uid]

    def exited(self, uid: str, exit: Exited) -> None:
        """Stores the end of a process of the mesh for its next owner."""
        lease = self._all.get(uid)
        if lease is not None and lease.detached:
            lease.exits.append(exit)

    def end(self, uid: str) -> MeshLease | None:
        """Removes a stopped mesh."""
        return self._all.pop(uid, None)

    def expired(self, now: float) -> list[MeshLease]:
        """Removes and returns meshes whose lease has ended, which are to be stopped."""
        expired = [lease for lease in self.detached if lease.until <= now]
        for lease in expired:
            del self._all[lease.uid]
        return expired

    def due(self, now: float) -> float | None:
        """Returns the seconds until the next lease ends, or None."""
        return min((max(0.0, lease.until - now) for lease in self.detached), default=None)

    @staticmethod
    def _holder_text(lease: MeshLease) -> str:
        if (holder := lease.holder) is None:
            return f"{lease.name} was left at {clock(lease.left_at)}"
        process = f"{holder.what} (process {holder.pid} on {holder.machine})"
        return f"{lease.name} is held by {process} since {clock(holder.since)}"


class MeshLeaseService:
    """Executes the decisions of `MeshLeases` on the loop's thread.

    `call_later(seconds, call)` is the loop's; `changed()` is called when a mesh has ended; `grant(owner)` makes sure
    that an owner's end is noticed here; `notices(since)` returns the host's preemption notices from that time on.
    """

    def __init__(self, *, children: Children, stopper: ProcStopper, sender: AgentSender, logs: LogTailer,
                 call_later: Callable[[float, Callable[[], None]], object], changed: Callable[[], None],
                 grant: Callable[[str], None],
                 notices: Callable[[float], tuple[p.PreemptionNotice, ...]]) -> None:  # fmt: skip
        self._children, self._stopper, self._sender, self._logs = children, stopper, sender, logs
        self._call_later, self._changed, self._grant, self._notices = call_later, changed, grant, notices
        self._leases = MeshLeases()
        self._diagnoses: dict[str, Diagnosis] = {}  # of detached meshes
        self.attached_controllers: set[str] = set()

    def serve(self, takes: Handlers) -> None:
        """Registers the verbs."""
        takes.handle(verbs.HOLD, self._hold)
        takes.handle(verbs.DETACH, self._detach)
        takes.handle(verbs.ATTACH, self._attach)
        takes.handle(verbs.DROP, self._drop)

    @property
    def waits(self) -> bool:
        """True while there are detached meshes here."""
        return bool(self._leases.detached)

    @property
    def holders(self) -> list[str]:
        """Returns the holders of meshes here."""
        return [lease.holder.address for lease in self._leases.all() if lease.holder is not None]

    def owner_gone(self, owner: str, reason: str) -> None:
        """Handles an owner's end: detaches those of its meshes that outlive it."""
        self.attached_controllers.discard(owner)
        detached, ended = self._leases.owner_gone(owner, time.monotonic(), time.time(), reason)
        for lease in detached:
            self._on_detached(lease)
        for lease in ended:
            if lease.file:
                mesh_files.remove(Path(lease.file))

    def check(self, address: str, owner: str) -> None:
        """Raises HeldError for a process that another controller may have."""
        self._leases.check(parse_address(address).mesh, owner)

    def agent_ends(self, reason: str) -> None:
        """Records the end of the host for later controllers."""
        for lease in self._leases.all():
            if lease.file and lease.detached:
                mesh_files.end(Path(lease.file), reason)

    def exited(self, child: Child) -> None:
        """Records the end of a process."""
        uid = parse_address(child.address).mesh
        if child.exit is not None:
            self._leases.exited(uid, child.exit)
            if uid in self._diagnoses:
                self._diagnoses[uid][0](child.exit)
        lease = self._leases.get(uid)
        stopped = child.exit is not None and child.exit.expected
        if lease is not None and stopped and not lease.detached and not self._alive(lease):  # by its owner
            self._leases.end(uid)

    # -- requests -----------------------------------------------------------------------------------------------------

    def _hold(self, request: p.Hold, asker: Asker[Done]) -> Done:
        self._leases.hold(request, asker.src)
        return Done()

    def _detach(self, request: p.Detach, asker: Asker[Done]) -> Done:
        lease = self._leases.leave(request.uid, asker.src, time.monotonic(), time.time(), request.why)
        self._on_detached(lease, request.unread)
        return Done()

    def _attach(self, request: p.Attach, asker: Asker[p.AttachReply]) -> p.AttachReply | None:
        lease = self._leases.get(request.uid)
        if lease is None:
            return p.AttachReply(known=False)
        if self._leases.was_left(request):  # its owner's end is not known here yet
            reason = "its program has ended"
            self._on_detached(self._leases.leave(lease.uid, request.ended, time.monotonic(), time.time(), reason))
        reason, left_at, holder = lease.why, lease.left_at, request.holder
        try:
            former = self._leases.attach(request.uid, request.secret, holder, steal=request.steal, grant=request.grant,
                                            turn=request.turn)  # fmt: skip
        except HeldError as error:
            asker.refuse(str(error))
            return None
        children = self._procs(lease)
        for child in children:
            child.own(request.holder.address)
            if former is not None:
                child.watchers.discard(former.address)
                self._logs.leave(child.address, former.address)
            child.watchers.add(asker.src)
        if former is not None:
            self._sender.post(former.address, verbs.STOLEN, p.Stolen(lease.uid, request.holder))
        self._grant(request.holder.address)
        self.attached_controllers.add(request.holder.address)
        self._announce_owner(lease, request.holder.address)
        self._update_file(lease)
        exits = tuple(lease.exits)
        lease.exits.clear()
        findings = self._end_diagnosis(lease.uid)
        return p.AttachReply(
            grant=lease.grant, turn=lease.turn, left_at=left_at, why=reason, parts=lease.parts,
            procs=tuple(child.describe() for child in children),
            logs={child.address: child.log_file for child in children}, exits=exits, before=former,
            findings=findings,
            notices=self._notices(left_at) if left_at else (),
        )  # fmt: skip

    def _drop(self, request: p.DropMesh, asker: Asker[Done]) -> Done | None:
        try:
            self._leases.drop(request.uid, request.secret, asker.src)
        except HeldError as error:
            asker.refuse(str(error))
            return None
        self._end_diagnosis(request.uid)
        old = []
        for child in self._children.alive():
            mesh, rank, incarnation = parse_address(child.address).place
            if mesh == request.uid and incarnation <= request.incarnations.get(rank, -1):
                old.append(child)
        if not old:
            return Done()
        self._stopper.stop(old, timeout_s=0.0, grace_s=0.5, reason="its owner had lost this host, and gave it up",
                           done=lambda _exits: asker.reply(Done()))  # fmt: skip
        return None

    # -- effects ------------------------------------------------------------------------------------------------------

    def _procs(self, lease: MeshLease) -> list[Child]:
        return [child for child in self._children.all() if parse_address(child.address).mesh == lease.uid]

    def _alive(self, lease: MeshLease) -> list[Child]:
        return [child for child in self._procs(lease) if child.alive]

    def _on_detached(self, lease: MeshLease, unread: tuple[int, ...] = ()) -> None:
        log.info("%s (%s) is left: %s", lease.name, lease.uid, lease.why)
        for child in self._alive(lease):
            self._logs.leave(child.address, child.spec.owner)
            child.watchers.discard(child.spec.owner)
            child.own(NOBODY)
        self._announce_owner(lease, NOBODY, unread)
        self._update_file(lease)
        self._call_later(lease.seconds, self._end_expired)
        self._begin_diagnosis(lease)

    def _begin_diagnosis(self, lease: MeshLease) -> None:
        unwatched = lease.unwatched
        if unwatched is None or not unwatched.diagnoser.startswith("monarch_nb."):
            return
        module, _, name = unwatched.diagnoser.partition(":")
        try:
            begin = getattr(import_module(module), name)
            self._diagnoses[lease.uid] = begin(
                lease.uid, lease.name, unwatched, lambda: self._procs(lease), self._sender, self._call_later
            )
        except Exception:  # the mesh runs without it
            log.exception("%s cannot be diagnosed", lease.name)

    def _end_diagnosis(self, uid: str) -> tuple[RunFinding, ...]:
        _, end = self._diagnoses.pop(uid, (None, None))
        return () if end is None else end()

    def _announce_owner(self, lease: MeshLease, owner: str, unread: tuple[int, ...] = ()) -> None:
        """Notifies all processes here, since any may refer to the mesh."""
        news = p.NewOwner(meshes=lease.meshes, owner=owner, turn=lease.turn, unread=unread)
        self._sender.post_all((child.address for child in self._children.alive()), verbs.NEW_OWNER, news)

    @staticmethod
    def _update_file(lease: MeshLease) -> None:
        """Updates the mesh's file, which controllers read to find meshes."""
        file = Path(lease.file)
        if lease.file and lease.detached:
            mesh_files.leave(file, max(0.0, lease.until - time.monotonic()), lease.why, left_at=lease.left_at)
        elif lease.file:
            mesh_files.change(file, holder=lease.holder, left_at=lease.left_at, until=0.0, why=lease.why)

    def _end_expired(self) -> None:
        now = time.monotonic()
        for lease in self._leases.expired(now):
            length = format_duration(round(lease.seconds * 1e9))
            reason = f"nobody came back to it: its lease of {length} ended at {clock(time.time())}"
            log.info("%s (%s) ends: %s", lease.name, lease.uid, reason)
            if lease.file:
                mesh_files.end(Path(lease.file), reason)
            self._end_diagnosis(lease.uid)
            self._stopper.stop(self._alive(lease), timeout_s=3.0, grace_s=1.0, reason=reason,
                               done=lambda _exits: self._changed())  # fmt: skip
        due = self._leases.due(now)
        if due is not None:
            self._call_later(due + 0.01, self._end_expired)


class Idleness:
    """Measures for how long this host was not used, without time in which it was frozen."""

    def __init__(self, limit: float | None) -> None:
        self.limit = limit  # seconds; None: no limit
        self._idle = 0.0
        self._checked_at: float | None = None

    @property
    def pace(self) -> float:
        """Seconds between checks."""
        return min(1.0, (self.limit or 4.0) / 4)

    def over(self, used: bool, now: float) -> bool:
        """Returns whether the limit is reached. To be called at the pace of `pace`."""
        elapsed = 0.0 if self._checked_at is None else min(now - self._checked_at, 2 * self.pace)
        self._checked_at = now
        self._idle = 0.0 if used else self._idle + elapsed
        return self.limit is not None and self._idle >= self.limit


class OwnerLeases:
    """Deadlines by owner address.

    Time in which this host did not check (it was frozen, or swapped out) does not count: the owners' signs of life of
    that time are still unread.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._until: dict[str, float] = {}
        self._length: dict[str, float] = {}
        self._asked_at: dict[str, float] = {}
        self._checked_at = 0.0

    def __bool__(self) -> bool:
        return bool(self._until)

    @property
    def pace(self) -> float:
        """Seconds between checks."""
        return min(1.0, self.seconds / 4)

    @property
    def owners(self) -> list[str]:
        """Returns the owners with a lease."""
        return list(self._until)

    def grant(self, owner: str, now: float, seconds: float | None = None) -> None:
        """Begins or renews a lease; `seconds` stays in force for later renewals."""
        if not self._until:
            self._checked_at = now
        length = self._length[owner] = seconds or self._length.get(owner, self.seconds)
        self._until[owner] = now + length

    def renew(self, owner: str, now: float) -> None:
        """Renews an owner's lease, if it has one, after a sign of life."""
        if owner in self._until:
            self._until[owner] = max(self._until[owner], now + self._length[owner])

    def end(self, owner: str) -> None:
        """Removes a lease."""
        self._until.pop(owner, None)
        self._length.pop(owner, None)
        self._asked_at.pop(owner, None)

    def due(self, now: float) -> list[str]:
        """Returns owners to be asked for a sign of life: each once in a quarter of its lease."""
        due = [owner for owner in self._until if now - self._asked_at.get(owner, -inf) >= self._length[owner] / 4]
        self._asked_at |= dict.fromkeys(due, now)
        return due

    def expired(self, now: float) -> list[str]:
        """Removes and returns owners whose lease has ended. To be called at the pace of `pace`."""
        elapsed, self._checked_at = now - self._checked_at, now
        if elapsed > 2 * self.pace:
            self._until = {owner: until + elapsed for owner, until in self._until.items()}
        expired = [owner for owner, until in self._until.items() if until <= now]
        for owner in expired:
            self.end(owner)
        return expired
