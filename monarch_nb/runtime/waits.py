"""Who waits for whom: a circle of actors that wait for each other is told, and ended, instead of hanging."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from monarch_nb.runtime.calls import DeadlockError, PendingCall
from monarch_nb.runtime.context import current
from monarch_nb.runtime.future import Future
from monarch_nb.wire import Header

if TYPE_CHECKING:
    from monarch_nb.runtime.cell import ActorCell
    from monarch_nb.runtime.process import Runtime
    from monarch_nb.transport import Parcel

VERB = "call.blocked"


def is_part(header: Header, call: str) -> bool:
    """Whether this message is part of a call, or of what is done for it."""
    return call in header.chain or header.call == call


class Waits:
    """Knows what the endpoints that run in this process wait for.

    A call names the calls that wait for it (its chain). One that arrives at an actor whose endpoint waits, without a
    limit, for a call in that chain cannot be run before that wait ends, which ends only after it: a circle. Its sender
    is told, and the wait there, if it is one without limit, ends with a DeadlockError.
    """

    def __init__(self, runtime: "Runtime") -> None:
        self._runtime = runtime
        runtime.controls[VERB] = self._blocked

    def guard(self, future: Future[Any], unlimited: bool) -> Callable[[], None] | None:
        """A thread begins to wait; the function returned is called when it does no longer."""
        context = current.get()
        cell = context.actor_instance.cell if context is not None else None
        if cell is None or not unlimited or not future.wait_id:
            return None
        running = cell.running
        if running is not None and cell.is_concurrent(running[1]):
            return None  # it holds nobody up
        cell.waiting_on = future.wait_id
        for header, _ in cell.queued():
            if is_part(header, future.wait_id):
                self.tell(cell, header)
        call = self._runtime.calls.get(future.wait_id)
        if call is not None and call.blocked:
            self._end(call)

        def leave() -> None:
            cell.waiting_on = ""

        return leave

    def tell(self, cell: "ActorCell", header: Header) -> None:
        """`header` cannot be run before a wait ends that it is part of: its sender is told."""
        running = cell.running
        doing = f"{cell.spec.name}.{running[1]}" if running is not None else cell.spec.name
        sender = header.actor or header.sender
        story = (
            f"{sender} waits for {cell.spec.name}.{header.method} of {cell.instance}, which cannot run while {doing} "
            f"waits for {sender}. Make one of the endpoints a @concurrent_endpoint, or do not wait for the inner call"
        )
        self._runtime.control(header.src, VERB, [header.port, story])

    def _blocked(self, header: Header, parcel: "Parcel") -> None:
        number, story = msgspec.msgpack.decode(parcel.frames[0], type=tuple[int, str])
        call = self._runtime.ports.get(number)
        if isinstance(call, PendingCall):
            call.blocked = story
            self._end(call)

    def _end(self, call: PendingCall) -> None:
        if any(cell.waiting_on == call.call for cell in tuple(self._runtime.cells.values())):
            call.fail(DeadlockError(f"deadlock: {call.blocked}"))
