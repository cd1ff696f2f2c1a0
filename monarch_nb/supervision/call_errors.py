"""What calls on broken meshes raise: the story that supervision knows, or that of the message that was lost."""

import threading
from typing import Any

from monarch_nb.runtime import Local, MeshState, PendingCall, error_of
from monarch_nb.shape import Region, runs
from monarch_nb.supervision.cause import stop_cause
from monarch_nb.supervision.causes import FAILED, Causes, Refusal
from monarch_nb.supervision.errors import SupervisionError
from monarch_nb.supervision.failure import MeshFailure
from monarch_nb.supervision.machine import Machine
from monarch_nb.wire import Header, Kind, msgpack_decoder


class CallErrors(Causes):
    """Looks the stories up in the machine, which `lock` guards."""

    def __init__(self, local: Local, machine: Machine) -> None:
        super().__init__(local)
        self.machine = machine
        self._lock = threading.RLock()

    def refused(self, refusal: Refusal, awaited: set[str] | None = None) -> None:
        """An actor has failed, somewhere."""
        raise NotImplementedError

    def _error(self, failure: MeshFailure, call: PendingCall | None) -> SupervisionError:
        if failure.failure_id:
            with self._lock:
                self.machine.told(failure.failure_id)
        return SupervisionError(failure.report(), endpoint=f"{call.title}()" if call else None, failure=failure)

    def lost(self, header: Header, reason: str, call: PendingCall) -> BaseException:
        """The error of a call whose message could not be delivered: the known failure, where there is one."""
        ranks = frozenset(call.missing_ranks())
        with self._lock:
            known = self.machine.check(call.mesh, ranks)
        if known is not None:
            return self._error(known, call)
        return self._error(self._lost(header, reason, call), call)

    def _lost(self, header: Header, reason: str, call: PendingCall | None) -> MeshFailure:
        """The story of a message that was lost on its way to ranks that are not known to have failed."""
        cause = self.lost_cause(header, reason)
        alone = Kind.CALL in (header.kind, header.status if header.kind == Kind.RETURNED else -1)
        ranks = [header.rank] if alone else [] if call is None else call.missing_ranks()
        with self._lock:
            story = self.machine.describe(header.mesh, ranks, cause)
        name = call.title.partition(".")[0] if call is not None else header.mesh
        return story or MeshFailure(mesh_name=name, mesh_uid=header.mesh, cause=cause)

    def error(self, data: Any, call: PendingCall | None) -> BaseException:
        """The error a call raises for an encoded cause."""
        refusal = msgpack_decoder(Refusal).decode(data)
        if call is None:
            return self._error(MeshFailure(mesh_name=refusal.cause.actor, cause=refusal.cause), None)
        known = refusal.cause.kind in FAILED
        if known:
            self.refused(refusal, {refusal.mesh} if call.watched else None)
            raised = error_of(call.future)
            if raised is not None:  # the machine has told it already
                return raised
        with self._lock:
            if known:
                story = self.machine.check(call.mesh, {refusal.rank})
            else:
                story = self.machine.describe(call.mesh, [refusal.rank], refusal.cause)
        return self._error(story or self._elsewhere(refusal, call), call)

    def _elsewhere(self, refusal: Refusal, call: PendingCall) -> MeshFailure:
        """The story of a call on a mesh that others own."""
        name, rank, region = call.title.partition(".")[0], refusal.rank, None
        state = self.local.meshes.get(call.mesh)
        if state is not None and rank in state.region.ranks():
            region = state.region
        return MeshFailure(
            mesh_name=name,
            mesh_uid=call.mesh,
            cause=refusal.cause,
            extent=((), ()) if region is None else (tuple(region.labels), tuple(region.ndslice.sizes)),
            places=(rank if region is None else region.ndslice.index(rank),),
        )

    def check(self, state: MeshState, region: Region, call: PendingCall | None) -> SupervisionError | None:
        """What a call on a slice must raise at once."""
        failure = None
        if not self.machine.sound(state.uid):
            with self._lock:
                failure = self.machine.check(state.uid, runs(region))
        if failure is None and state.stopped is not None:  # so long ago that nothing else is known of it
            whole = state.region
            extent = (tuple(whole.labels), tuple(whole.ndslice.sizes))
            failure = MeshFailure(
                mesh_name=state.name, mesh_uid=state.uid, cause=stop_cause(state.stopped), extent=extent
            )
        return None if failure is None else self._error(failure, call)
