"""Meshes that may outlive their owners: who holds each, since when, and until when nobody may. Pure; times are given.

A mesh that is held has an owner, who lives. One that was left has none, for a lease; then it ends, unless somebody
comes for it. On the first host of a mesh this decides who gets it; other hosts follow the number of that grant.
"""

import hmac
from collections import deque
from datetime import datetime

from msgspec import Struct, field

from monarch_nb.host.protocol import Attach, Exited, Hold, Holder

_EXITS = 256  # ends of procs that are kept for who comes back; of more the first and the last ones matter
_NOT_YOURS = "the secret is not that of this mesh: it belongs to somebody else's controller"
_COMES = "a later attach has it"


class Holding(Struct, eq=False):
    """One mesh on this host."""

    uid: str
    name: str
    secret: str
    seconds: float  # how long it lives on when it is left
    keep: bool  # whether it is left, rather than ended, when its owner ends
    holder: Holder | None
    grant: int = 0  # grows with each attach
    turn: int = 0  # grows with whatever changes who holds it
    left_at: float = 0.0  # wall clock
    until: float = 0.0  # monotonic, while it is left
    why: str = ""  # it was left
    meshes: tuple[str, ...] = ()  # uids: of the procs, and of the actors on them
    parts: dict[str, bytes] = field(default_factory=dict)
    file: str = ""
    exits: deque[Exited] = field(default_factory=lambda: deque(maxlen=_EXITS))

    @property
    def left(self) -> bool:
        """Whether nobody holds it."""
        return self.holder is None


class HeldError(ValueError):
    """A mesh cannot be had; the text says who has it, since when, and what to do."""


class Holdings:
    """Those of one host, by the uid of their procs."""

    def __init__(self) -> None:
        self._all: dict[str, Holding] = {}

    def __bool__(self) -> bool:
        return bool(self._all)

    def get(self, uid: str) -> Holding | None:
        """One of them."""
        return self._all.get(uid)

    def all(self) -> list[Holding]:
        """All of them."""
        return list(self._all.values())

    @property
    def left(self) -> list[Holding]:
        """Those that nobody holds."""
        return [one for one in self._all.values() if one.left]

    def hold(self, wanted: Hold, owner: str) -> Holding:
        """The owner of a mesh says how it is to be kept; a later word replaces what it names. Raises HeldError."""
        known = self._all.get(wanted.uid)
        if known is None:
            known = self._all[wanted.uid] = Holding(
                wanted.uid, wanted.name, wanted.secret, wanted.seconds, wanted.keep, wanted.holder
            )
        elif known.holder is None or known.holder.address != owner:
            raise HeldError(f"{wanted.name} is not yours any more: {self._held_by(known)}")
        known.seconds, known.keep, known.holder = wanted.seconds, wanted.keep, wanted.holder
        known.meshes, known.file = wanted.meshes, wanted.file
        known.grant, known.turn = max(known.grant, wanted.grant), max(known.turn, wanted.turn)
        known.parts = {name: part for name, part in {**known.parts, **wanted.parts}.items() if part}
        return known

    def leave(self, uid: str, owner: str, now: float, wall: float, why: str) -> Holding:
        """Its owner leaves it, from now on for its lease. Raises HeldError."""
        known = self._all.get(uid)
        if known is None or known.holder is None or known.holder.address != owner:
            raise HeldError(f"it cannot be left: {self._held_by(known) if known else 'it is not known here'}")
        return self._leave(known, now, wall, why)

    def owner_gone(self, owner: str, now: float, wall: float, why: str) -> tuple[list[Holding], list[Holding]]:
        """An owner ended: what is to be kept is left. That, and the rest, which is forgotten and ends with it."""
        mine = [one for one in self.all() if one.holder is not None and one.holder.address == owner]
        kept = [self._leave(one, now, wall, why) for one in mine if one.keep]
        over = [one for one in mine if not one.keep]
        for one in over:
            del self._all[one.uid]
        return kept, over

    def _leave(self, one: Holding, now: float, wall: float, why: str) -> Holding:
        one.holder, one.why, one.left_at, one.until = None, why, wall, now + one.seconds
        one.turn += 1
        return one

    def attach(self, uid: str, secret: str, newcomer: Holder, *, steal: bool = False, grant: int = 0, turn: int = 0
               ) -> Holder | None:  # fmt: skip
        """Somebody comes for a mesh, and has it now. Who had it, if somebody did. Raises HeldError.

        `grant` and `turn` are what the mesh's first host has given it; 0 there.
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
        """Whether who comes for a mesh has seen that its owner ended."""
        known = self._all.get(wanted.uid)
        if known is None or known.holder is None or known.holder.address != wanted.ended:
            return False
        return hmac.compare_digest(known.secret.encode(), wanted.secret.encode())

    def drop(self, uid: str, secret: str, owner: str) -> None:
        """The owner of a mesh, which had lost this host, has given up what is here. Raises HeldError."""
        known = self._all.get(uid)
        if known is None:
            return
        if not hmac.compare_digest(known.secret.encode(), secret.encode()):
            raise HeldError(_NOT_YOURS)
        if known.holder is not None and known.holder.address != owner:
            raise HeldError(self._held_by(known))
        del self._all[uid]

    def exited(self, uid: str, gone: Exited) -> None:
        """A proc of it has ended; who comes back is told."""
        known = self._all.get(uid)
        if known is not None and known.left:
            known.exits.append(gone)

    def end(self, uid: str) -> Holding | None:
        """It is stopped."""
        return self._all.pop(uid, None)

    def expired(self, now: float) -> list[Holding]:
        """Those whose lease has ended; they are forgotten, and are to be stopped."""
        over = [one for one in self.left if one.until <= now]
        for one in over:
            del self._all[one.uid]
        return over

    def due(self, now: float) -> float | None:
        """Seconds until the next lease ends; None while none runs."""
        return min((max(0.0, one.until - now) for one in self.left), default=None)

    @staticmethod
    def _held_by(one: Holding) -> str:
        if one.holder is None:
            return f"{one.name} was left at {clock(one.left_at)}"
        by = one.holder
        return f"{one.name} is held by {by.what} (process {by.pid} on {by.machine}) since {clock(by.since)}"


def clock(at: float) -> str:
    """A time of day, as people here have it."""
    return datetime.fromtimestamp(at).astimezone().strftime("%H:%M:%S")
