"""Asking owners for leases of their memory, and giving these back."""

import contextlib

from monarch_nb.mesh.requests import RequestError, UnansweredError, request
from monarch_nb.rdma.errors import owner_lost
from monarch_nb.rdma.handle import Handle
from monarch_nb.rdma.limits import Limit
from monarch_nb.rdma.movers import CannotReachError
from monarch_nb.rdma.verbs import LEASE, RELEASE, RENEW, Leased, Leasing, Outcome, Releasing, Renewing
from monarch_nb.runtime import Future, Runtime
from monarch_nb.transport import TransportError

__all__ = ["Lessor"]

_LOOK_S = 0.2


class Lessor:
    """The owners of buffers, as a process sees them that wants to reach their memory by its RDMA device."""

    def __init__(self, engine: Runtime) -> None:
        self._engine = engine

    def lease(self, handle: Handle, question: Leasing, limit: Limit) -> Leased:
        """Asks the owner of a buffer. Blocks; raises CannotReachError, OwnerLostError and what `Limit.left` raises."""
        future = request(self._engine, handle.process, LEASE, question)
        while not future.wait(min(_LOOK_S, limit.left())):
            pass
        try:
            return future.get()
        except UnansweredError as error:
            raise owner_lost(handle, str(error)) from None
        except RequestError as error:
            raise CannotReachError(f"its process: {error}") from None

    def renew(self, handle: Handle, lease: int) -> Future[Outcome]:
        """The future fails with UnansweredError where the owner is gone. Does not block."""
        return request(self._engine, handle.process, RENEW, Renewing(lease))

    def release(self, handle: Handle, lease: int) -> None:
        """Gives a lease back. Does not block; where nobody hears it, it ends by itself."""
        with contextlib.suppress(TransportError):
            self._engine.tell(handle.process, RELEASE, Releasing(lease))
