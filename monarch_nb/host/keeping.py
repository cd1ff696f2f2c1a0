"""What a host agent does for meshes that outlive their owners: it keeps them until somebody comes, or time is up."""

import logging
import time
from collections.abc import Callable
from pathlib import Path

from monarch_nb.host import mesh_files, verbs
from monarch_nb.host import protocol as p
from monarch_nb.host.holdings import HeldError, Holding, Holdings, clock
from monarch_nb.host.procs.child import Child
from monarch_nb.host.procs.children import Children
from monarch_nb.host.procs.stopping import ProcStopper
from monarch_nb.host.sender import AgentSender
from monarch_nb.logs.tailer import LogTailer
from monarch_nb.settings import format_duration
from monarch_nb.wire import Asker, Done, Handlers, parse_address

log = logging.getLogger(__name__)
NOBODY = ""  # owns procs of a mesh that was left


class Keeper:
    """Carries out what `Holdings` decides, on the loop's thread.

    `later(seconds, call)` is the loop's; `changed()` is called when there may be nothing left to look after;
    `grant(owner)` makes sure that an owner's end is noticed here, `notices(at)` are those of the host's end since then.
    """

    def __init__(self, *, children: Children, stopper: ProcStopper, sender: AgentSender, logs: LogTailer,
                 later: Callable[[float, Callable[[], None]], object], changed: Callable[[], None],
                 grant: Callable[[str], None], notices: Callable[[float], tuple[p.Notice, ...]]) -> None:  # fmt: skip
        self._children, self._stopper, self._sender, self._logs = children, stopper, sender, logs
        self._later, self._changed, self._grant, self._notices = later, changed, grant, notices
        self._holdings = Holdings()
        self.comers: set[str] = set()  # controllers that have attached a mesh here

    def serve(self, takes: Handlers) -> None:
        """Takes the verbs."""
        takes.handle(verbs.HOLD, self._hold)
        takes.handle(verbs.DETACH, self._detach)
        takes.handle(verbs.ATTACH, self._attach)
        takes.handle(verbs.DROP, self._drop)

    @property
    def waits(self) -> bool:
        """Whether there are meshes here that nobody holds."""
        return bool(self._holdings.left)

    @property
    def holders(self) -> list[str]:
        """Who holds meshes here."""
        return [one.holder.address for one in self._holdings.all() if one.holder is not None]

    def owner_gone(self, owner: str, why: str) -> None:
        """An owner ended: what is to be kept of its meshes is nobody's from now on."""
        self.comers.discard(owner)
        kept, over = self._holdings.owner_gone(owner, time.monotonic(), time.time(), why)
        for one in kept:
            self._is_left(one)
        for one in over:
            if one.file:
                mesh_files.remove(Path(one.file))

    def agent_ends(self, reason: str) -> None:
        """All ends here: who comes back later is told."""
        for one in self._holdings.all():
            if one.file and one.left:
                mesh_files.end(Path(one.file), reason)

    def exited(self, child: Child) -> None:
        """A proc has ended."""
        uid = parse_address(child.address).mesh
        if child.exit is not None:
            self._holdings.exited(uid, child.exit)
        one = self._holdings.get(uid)
        stopped = child.exit is not None and child.exit.expected
        if one is not None and stopped and not one.left and not self._alive(one):  # by its owner
            self._holdings.end(uid)

    # -- requests -----------------------------------------------------------------------------------------------------

    def _hold(self, wanted: p.Hold, asker: Asker[Done]) -> Done:
        self._holdings.hold(wanted, asker.src)
        return Done()

    def _detach(self, wanted: p.Detach, asker: Asker[Done]) -> Done:
        self._is_left(self._holdings.leave(wanted.uid, asker.src, time.monotonic(), time.time(), wanted.why))
        return Done()

    def _attach(self, wanted: p.Attach, asker: Asker[p.Attached]) -> p.Attached | None:
        one = self._holdings.get(wanted.uid)
        if one is None:
            return p.Attached(known=False)
        if self._holdings.was_left(wanted):  # its owner's end is not known here yet
            why = "its program has ended"
            self._is_left(self._holdings.leave(one.uid, wanted.ended, time.monotonic(), time.time(), why))
        why, left_at, who = one.why, one.left_at, wanted.holder
        try:
            before = self._holdings.attach(wanted.uid, wanted.secret, who, steal=wanted.steal, grant=wanted.grant,
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
        self.comers.add(wanted.holder.address)
        self._tell_procs(one, wanted.holder.address)
        self._note(one)
        exits = tuple(one.exits)
        one.exits.clear()
        return p.Attached(
            grant=one.grant, turn=one.turn, left_at=left_at, why=why, parts=one.parts,
            procs=tuple(child.describe() for child in mine),
            logs={child.address: child.log_file for child in mine}, exits=exits, before=before,
            notices=self._notices(left_at) if left_at else (),
        )  # fmt: skip

    def _drop(self, wanted: p.Drop, asker: Asker[Done]) -> Done | None:
        try:
            self._holdings.drop(wanted.uid, wanted.secret, asker.src)
        except HeldError as error:
            asker.refuse(str(error))
            return None
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

    # -- what follows -------------------------------------------------------------------------------------------------

    def _procs(self, one: Holding) -> list[Child]:
        return [child for child in self._children.all() if parse_address(child.address).mesh == one.uid]

    def _alive(self, one: Holding) -> list[Child]:
        return [child for child in self._procs(one) if child.alive]

    def _is_left(self, one: Holding) -> None:
        log.info("%s (%s) is left: %s", one.name, one.uid, one.why)
        for child in self._alive(one):
            self._logs.leave(child.address, child.spec.owner)
            child.watchers.discard(child.spec.owner)
            child.own(NOBODY)
        self._tell_procs(one, NOBODY)
        self._note(one)
        self._later(one.seconds, self._look)

    def _tell_procs(self, one: Holding, owner: str) -> None:
        """All procs here: those of the mesh, and others that may refer to it."""
        news = p.NewOwner(meshes=one.meshes, owner=owner, turn=one.turn)
        self._sender.post_all((child.address for child in self._children.alive()), verbs.NEW_OWNER, news)

    @staticmethod
    def _note(one: Holding) -> None:
        """Who looks for meshes reads in the file how this one is."""
        if one.file:
            until = one.left_at + one.seconds if one.left else 0.0
            mesh_files.change(Path(one.file), holder=one.holder, left_at=one.left_at, until=until, why=one.why)

    def _look(self) -> None:
        now = time.monotonic()
        for one in self._holdings.expired(now):
            lease = format_duration(round(one.seconds * 1e9))
            why = f"nobody came back to it: its lease of {lease} ended at {clock(time.time())}"
            log.info("%s (%s) ends: %s", one.name, one.uid, why)
            if one.file:
                mesh_files.end(Path(one.file), why)
            self._stopper.stop(self._alive(one), timeout_s=3.0, grace_s=1.0, reason=why,
                               done=lambda _exits: self._changed())  # fmt: skip
        due = self._holdings.due(now)
        if due is not None:
            self._later(due + 0.01, self._look)
