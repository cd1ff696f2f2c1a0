"""Leases of meshes that may outlive their owners, and the service of a host agent that executes them.

A held mesh has a living owner. A detached one has none, for the time of a lease; then it ends, unless a controller
attaches it. The first host of a mesh decides who gets it; other hosts follow the number of that grant.
"""

import hmac
import logging
import time
from collections import deque
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from msgspec import Struct, field

from monarch_nb.host import mesh_files, verbs
from monarch_nb.host import protocol as p
from monarch_nb.host.mesh_files import clock
from monarch_nb.host.procs.child import Child
from monarch_nb.host.procs.children import Children
from monarch_nb.host.procs.stopping import ProcStopper
from monarch_nb.host.protocol import Attach, Exited, Hold, MeshHolder, RunFinding, Unwatched
from monarch_nb.host.sender import AgentSender
from monarch_nb.logs.tailer import LogTailer
from monarch_nb.settings import format_duration
from monarch_nb.wire import Asker, Done, Handlers, parse_address

_EXITS = 256  # ends of processes that are stored for the next owner; the first and the last ones matter most
_NOT_YOURS = "the secret is not that of this mesh: it belongs to somebody else's controller"
_COMES = "a later attach has it"


class MeshLease(Struct, eq=False):
    """One mesh on this host."""

    uid: str
    name: str
    secret: str
    seconds: float  # its lease once it is detached
    keep: bool  # whether it is detached, rather than ended, when its owner ends
    holder: MeshHolder | None
    grant: int = 0  # grows with each attach
    turn: int = 0  # grows with each change of its holder
    left_at: float = 0.0  # wall clock
    until: float = 0.0  # monotonic, while it is detached
    why: str = ""  # it was detached
    meshes: tuple[str, ...] = ()  # uids of the processes, and of the actors on them
    parts: dict[str, bytes] = field(default_factory=dict)
    file: str = ""
    exits: deque[Exited] = field(default_factory=lambda: deque(maxlen=_EXITS))
    unwatched: Unwatched | None = None

    @property
    def detached(self) -> bool:
        """Whether it is detached."""
        return self.holder is None


class HeldError(ValueError):
    """A mesh cannot be attached; the text says who holds it, since when, and what to do."""


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
        return [one for one in self._all.values() if one.detached]

    def hold(self, wanted: Hold, owner: str) -> MeshLease:
        """Records how an owner wants a mesh held; later messages replace the parts they name. Raises HeldError."""
        known = self._all.get(wanted.uid)
        if known is None:
            known = self._all[wanted.uid] = MeshLease(
                wanted.uid, wanted.name, wanted.secret, wanted.seconds, wanted.keep, wanted.holder
            )
        elif known.holder is None or known.holder.address != owner:
            raise HeldError(f"{wanted.name} is not yours any more: {self._held_by(known)}")
        known.seconds, known.keep, known.holder = wanted.seconds, wanted.keep, wanted.holder
        known.meshes, known.file, known.unwatched = wanted.meshes, wanted.file, wanted.unwatched
        known.grant, known.turn = max(known.grant, wanted.grant), max(known.turn, wanted.turn)
        known.parts = {name: part for name, part in {**known.parts, **wanted.parts}.items() if part}
        return known

    def leave(self, uid: str, owner: str, now: float, wall: float, why: str) -> MeshLease:
        """Detaches a mesh for its lease. Raises HeldError."""
        known = self._all.get(uid)
        if known is None or known.holder is None or known.holder.address != owner:
            raise HeldError(f"it cannot be left: {self._held_by(known) if known else 'it is not known here'}")
        return self._leave(known, now, wall, why)

    def owner_gone(self, owner: str, now: float, wall: float, why: str) -> tuple[list[MeshLease], list[MeshLease]]:
        """Handles an owner's end: returns the meshes that are now detached, and those that end with it."""
        mine = [one for one in self.all() if one.holder is not None and one.holder.address == owner]
        kept = [self._leave(one, now, wall, why) for one in mine if one.keep]
        over = [one for one in mine if not one.keep]
        for one in over:
            del self._all[one.uid]
        return kept, over

    def _leave(self, one: MeshLease, now: float, wall: float, why: str) -> MeshLease:
        one.holder, one.why, one.left_at, one.until = None, why, wall, now + one.seconds
        one.turn += 1
        return one

    def attach(self, uid: str, secret: str, newcomer: MeshHolder, *, steal: bool = False, grant: int = 0, turn: int = 0
               ) -> MeshHolder | None:  # fmt: skip
        """Gives a mesh to a controller; returns the previous holder, if any. Raises HeldError.

        `grant` and `turn` are those of the mesh's first host, and 0 there.
        """
        known = self._all.get(uid)
        if known is None:
            raise HeldError("it is not there any more: it was stopped, or its lease has ended")
        if not hmac.compare_digest(known.secret.encode(), secret.encode()):
            raise HeldError(_NOT_YOURS)
        if grant:
            if grant <= known.grant:
                raise HeldError(_COMES)
        elif known.holder is not None and known.holder.address != newcomer.address and not steal:
            raise HeldError(f"{self._held_by(known)}; steal=True (%attach {known.name} --steal) takes it over")
        before = known.holder
        known.grant = grant or known.grant + 1
        known.turn = max(known.turn + 1, turn)
        known.holder, known.until = newcomer, 0.0
        return before if before is not None and before.address != newcomer.address else None

    def was_left(self, wanted: Attach) -> bool:
        """Whether the sender has seen that the mesh's owner ended."""
        known = self._all.get(wanted.uid)
        if known is None or known.holder is None or known.holder.address != wanted.ended:
            return False
        return hmac.compare_digest(known.secret.encode(), wanted.secret.encode())

    def drop(self, uid: str, secret: str, owner: str) -> None:
        """Handles that the owner, which had lost this host, has given up what is here. Raises HeldError."""
        known = self._all.get(uid)
        if known is None:
            return
        if not hmac.compare_digest(known.secret.encode(), secret.encode()):
            raise HeldError(_NOT_YOURS)
        if known.holder is not None and known.holder.address != owner:
            raise HeldError(self._held_by(known))
        del self._all[uid]

    def exited(self, uid: str, gone: Exited) -> None:
        """Stores the end of a process of the mesh for its next owner."""
        known = self._all.get(uid)
        if known is not None and known.detached:
            known.exits.append(gone)

    def end(self, uid: str) -> MeshLease | None:
        """Removes a stopped mesh."""
        return self._all.pop(uid, None)

    def expired(self, now: float) -> list[MeshLease]:
        """Removes and returns meshes whose lease has ended, which are to be stopped."""
        over = [one for one in self.detached if one.until <= now]
        for one in over:
            del self._all[one.uid]
        return over

    def due(self, now: float) -> float | None:
        """Returns the seconds until the next lease ends, or None."""
        return min((max(0.0, one.until - now) for one in self.detached), default=None)

    @staticmethod
    def _held_by(one: MeshLease) -> str:
        if one.holder is None:
            return f"{one.name} was left at {clock(one.left_at)}"
        by = one.holder
        return f"{one.name} is held by {by.what} (process {by.pid} on {by.machine}) since {clock(by.since)}"


log = logging.getLogger(__name__)
# What takes the ends of processes, and what ends a diagnosis and gives its findings.
Diagnosis = tuple[Callable[[Exited], None], Callable[[], tuple[RunFinding, ...]]]
NOBODY = ""  # the owner of processes of a detached mesh


class MeshLeaseService:
    """Executes what `MeshLeases` decides, on the loop's thread.

    `later(seconds, call)` is the loop's; `changed()` is called when nothing may be left to hold; `grant(owner)` makes
    sure that an owner's end is noticed here, `notices(at)` returns the host's preemption notices since then.
    """

    def __init__(self, *, children: Children, stopper: ProcStopper, sender: AgentSender, logs: LogTailer,
                 later: Callable[[float, Callable[[], None]], object], changed: Callable[[], None],
                 grant: Callable[[str], None],
                 notices: Callable[[float], tuple[p.PreemptionNotice, ...]]) -> None:  # fmt: skip
        self._children, self._stopper, self._sender, self._logs = children, stopper, sender, logs
        self._later, self._changed, self._grant, self._notices = later, changed, grant, notices
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
        """Whether there are detached meshes here."""
        return bool(self._leases.detached)

    @property
    def holders(self) -> list[str]:
        """Returns the holders of meshes here."""
        return [one.holder.address for one in self._leases.all() if one.holder is not None]

    def owner_gone(self, owner: str, why: str) -> None:
        """Handles an owner's end: those of its meshes that are to be kept are detached from now on."""
        self.attached_controllers.discard(owner)
        kept, over = self._leases.owner_gone(owner, time.monotonic(), time.time(), why)
        for one in kept:
            self._is_left(one)
        for one in over:
            if one.file:
                mesh_files.remove(Path(one.file))

    def agent_ends(self, reason: str) -> None:
        """Records the end of the host for controllers that come later."""
        for one in self._leases.all():
            if one.file and one.detached:
                mesh_files.end(Path(one.file), reason)

    def exited(self, child: Child) -> None:
        """Records the end of a process."""
        uid = parse_address(child.address).mesh
        if child.exit is not None:
            self._leases.exited(uid, child.exit)
            if uid in self._diagnoses:
                self._diagnoses[uid][0](child.exit)
        one = self._leases.get(uid)
        stopped = child.exit is not None and child.exit.expected
        if one is not None and stopped and not one.detached and not self._alive(one):  # by its owner
            self._leases.end(uid)

    # -- requests -----------------------------------------------------------------------------------------------------

    def _hold(self, wanted: p.Hold, asker: Asker[Done]) -> Done:
        self._leases.hold(wanted, asker.src)
        return Done()

    def _detach(self, wanted: p.Detach, asker: Asker[Done]) -> Done:
        left = self._leases.leave(wanted.uid, asker.src, time.monotonic(), time.time(), wanted.why)
        self._is_left(left, wanted.unread)
        return Done()

    def _attach(self, wanted: p.Attach, asker: Asker[p.AttachReply]) -> p.AttachReply | None:
        one = self._leases.get(wanted.uid)
        if one is None:
            return p.AttachReply(known=False)
        if self._leases.was_left(wanted):  # its owner's end is not known here yet
            why = "its program has ended"
            self._is_left(self._leases.leave(one.uid, wanted.ended, time.monotonic(), time.time(), why))
        why, left_at, who = one.why, one.left_at, wanted.holder
        try:
            before = self._leases.attach(wanted.uid, wanted.secret, who, steal=wanted.steal, grant=wanted.grant,
                                            turn=wanted.turn)  # fmt: skip
        except HeldError as error:
            asker.refuse(str(error))
            return None
        mine = self._procs(one)
        for child in mine:
            child.own(wanted.holder.address)
            if before is not None:
                child.watchers.discard(before.address)
                self._logs.leave(child.address, before.address)
            child.watchers.add(asker.src)
        if before is not None:
            self._sender.post(before.address, verbs.STOLEN, p.Stolen(one.uid, wanted.holder))
        self._grant(wanted.holder.address)
        self.attached_controllers.add(wanted.holder.address)
        self._announce_owner(one, wanted.holder.address)
        self._note(one)
        exits = tuple(one.exits)
        one.exits.clear()
        findings = self._end_diagnosis(one.uid)
        return p.AttachReply(
            grant=one.grant, turn=one.turn, left_at=left_at, why=why, parts=one.parts,
            procs=tuple(child.describe() for child in mine),
            logs={child.address: child.log_file for child in mine}, exits=exits, before=before,
            findings=findings,
            notices=self._notices(left_at) if left_at else (),
        )  # fmt: skip

    def _drop(self, wanted: p.DropMesh, asker: Asker[Done]) -> Done | None:
        try:
            self._leases.drop(wanted.uid, wanted.secret, asker.src)
        except HeldError as error:
            asker.refuse(str(error))
            return None
        self._end_diagnosis(wanted.uid)
        old = []
        for child in self._children.alive():
            mesh, rank, incarnation = parse_address(child.address).place
            if mesh == wanted.uid and incarnation <= wanted.incarnations.get(rank, -1):
                old.append(child)
        if not old:
            return Done()
        self._stopper.stop(old, timeout_s=0.0, grace_s=0.5, reason="its owner had lost this host, and gave it up",
                           done=lambda _exits: asker.reply(Done()))  # fmt: skip
        return None

    # -- effects ------------------------------------------------------------------------------------------------------

    def _procs(self, one: MeshLease) -> list[Child]:
        return [child for child in self._children.all() if parse_address(child.address).mesh == one.uid]

    def _alive(self, one: MeshLease) -> list[Child]:
        return [child for child in self._procs(one) if child.alive]

    def _is_left(self, one: MeshLease, unread: tuple[int, ...] = ()) -> None:
        log.info("%s (%s) is left: %s", one.name, one.uid, one.why)
        for child in self._alive(one):
            self._logs.leave(child.address, child.spec.owner)
            child.watchers.discard(child.spec.owner)
            child.own(NOBODY)
        self._announce_owner(one, NOBODY, unread)
        self._note(one)
        self._later(one.seconds, self._look)
        self._begin_diagnosis(one)

    def _begin_diagnosis(self, one: MeshLease) -> None:
        how = one.unwatched
        if how is None or not how.diagnoser.startswith("monarch_nb."):
            return
        module, _, name = how.diagnoser.partition(":")
        try:
            begin = getattr(import_module(module), name)
            self._diagnoses[one.uid] = begin(
                one.uid, one.name, how, lambda: self._procs(one), self._sender, self._later
            )
        except Exception:  # the mesh runs without it
            log.exception("%s cannot be diagnosed", one.name)

    def _end_diagnosis(self, uid: str) -> tuple[RunFinding, ...]:
        _, end = self._diagnoses.pop(uid, (None, None))
        return () if end is None else end()

    def _announce_owner(self, one: MeshLease, owner: str, unread: tuple[int, ...] = ()) -> None:
        """Notifies all processes here, of which any may refer to the mesh."""
        news = p.NewOwner(meshes=one.meshes, owner=owner, turn=one.turn, unread=unread)
        self._sender.post_all((child.address for child in self._children.alive()), verbs.NEW_OWNER, news)

    @staticmethod
    def _note(one: MeshLease) -> None:
        """Updates the mesh's file, which controllers read that look for meshes."""
        if one.file:
            if one.detached:
                mesh_files.leave(Path(one.file), max(0.0, one.until - time.monotonic()), one.why, left_at=one.left_at)
            else:
                mesh_files.change(Path(one.file), holder=one.holder, left_at=one.left_at, until=0.0, why=one.why)

    def _look(self) -> None:
        now = time.monotonic()
        for one in self._leases.expired(now):
            lease = format_duration(round(one.seconds * 1e9))
            why = f"nobody came back to it: its lease of {lease} ended at {clock(time.time())}"
            log.info("%s (%s) ends: %s", one.name, one.uid, why)
            if one.file:
                mesh_files.end(Path(one.file), why)
            self._end_diagnosis(one.uid)
            self._stopper.stop(self._alive(one), timeout_s=3.0, grace_s=1.0, reason=why,
                               done=lambda _exits: self._changed())  # fmt: skip
        due = self._leases.due(now)
        if due is not None:
            self._later(due + 0.01, self._look)
