"""How the ranks of a mesh are that a controller comes back to: later, perhaps, than what was written down of them.

A controller that was killed may have brought ranks back, or have been about to, without anybody's having heard of it
but the processes themselves. They say which actors live in them, and why others do not.
"""

import time
from collections.abc import Sequence

from msgspec import Struct

from monarch_nb.host import protocol as p
from monarch_nb.lifecycle.healing import MeshHealer
from monarch_nb.lifecycle.updates import ReferenceUpdates
from monarch_nb.runtime import ActorState, MeshState, ProcState, Runtime
from monarch_nb.supervision import Action, Cause, Driver
from monarch_nb.supervision.actions import RootFault
from monarch_nb.supervision.machine import Machine
from monarch_nb.wire import msgpack_decoder, parse_address

_causes = msgpack_decoder(Cause)
_TURN = 1 << 32  # versions and editions of a mesh that one owner may give


class Ended(Struct, frozen=True):
    """A rank of an actor mesh that does not live."""

    mesh: str
    rank: int
    cause: Cause


class Lives:
    """Of one mesh of processes, and the actors on it. `learn` may be called from any thread."""

    def __init__(self, runtime: Runtime, procs: ProcState, actors: Sequence[ActorState]) -> None:
        self._runtime, self._procs, self._actors = runtime, procs, actors
        self.ended: list[Ended] = []

    def outdo(self, turn: int) -> None:
        """What this owner says of it from now on is later than anything that earlier owners have said to anybody."""
        for state in (self._procs, *self._actors):
            state.renew(state.incarnations, max(state.version + 1, turn * _TURN))
        for actors in self._actors:
            actors.edition = max(actors.edition, turn * _TURN)

    def learn(self, address: str, welcome: p.Welcome) -> None:
        """Takes what a process says of the actors in it."""
        rank = parse_address(address).rank
        if address != self._procs.address(rank) or self._procs.stopped is not None:
            return  # it has been replaced by now
        if welcome.bare:
            why = "the controller that started it ended before it was set up"
            self._runtime.part(MeshHealer).kill(self._procs, (rank,), why)
            return
        there = {actor.mesh: actor for actor in welcome.actors if actor.rank == rank}
        for state in self._actors:
            if rank in state.ranks and state.stopped is None:
                self._take(state, rank, there.get(state.uid))

    def _take(self, state: ActorState, rank: int, there: p.ActorThere | None) -> None:
        known = state.incarnation(rank)
        if there is None or there.incarnation < known:
            text = "the controller that was to create it ended before it did"
            self._lost(state, rank, known, Cause(kind="spawn", text=text, at=time.time()))
            return
        if there.incarnation > known:
            _put(state, rank, there.incarnation)
            uid, incarnation = state.uid, there.incarnation
            self._runtime.part(Driver).feed(lambda machine: machine.found(uid, rank, incarnation))
        if there.end:
            cause = _causes.decode(there.end)
            if cause.kind == "stopped":
                self._runtime.part(Driver).mark_stopped(state, (rank,), cause.text, over=False)
            else:
                self._lost(state, rank, there.incarnation, cause)

    def _lost(self, state: ActorState, rank: int, incarnation: int, cause: Cause) -> None:
        """It has failed while nobody was there: that ends no script, which is told otherwise."""
        self.ended.append(Ended(state.uid, rank, cause))

        def failed(machine: Machine) -> list[Action]:
            actions = machine.actor_failed(state.uid, rank, incarnation, cause)
            if machine.root_policy == "notebook":
                return actions
            return [action for action in actions if not isinstance(action, RootFault)]

        self._runtime.part(Driver).feed(failed)

    def announce(self) -> None:
        """Those who hold references hear how it is."""
        for state in (self._procs, *self._actors):
            self._runtime.part(ReferenceUpdates).announce(state)


def _put(state: MeshState, rank: int, incarnation: int) -> None:
    with state.lock:
        state.incarnations = {**state.incarnations, rank: incarnation}
        state.version += 1
