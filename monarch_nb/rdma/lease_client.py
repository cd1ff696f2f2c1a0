"""Client of the leases that owners of memory grant to RDMA devices."""

import contextlib

from monarch_nb.mesh.requests import RequestError, UnansweredError, request
from monarch_nb.rdma.errors import owner_lost
from monarch_nb.rdma.handle import BufferHandle
from monarch_nb.rdma.limits import Limit
from monarch_nb.rdma.movers import CannotReachError
from monarch_nb.rdma.verbs import LEASE, RELEASE, RENEW, Leased, Leasing, Releasing, Renewing, TransferOutcome
from monarch_nb.runtime import Future, Runtime
from monarch_nb.transport import TransportError

__all__ = ["LeaseClient"]

_POLL_S = 0.2


class LeaseClient:
    """Requests leases from owners of buffers, for access by this process's RDMA device."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def lease(self, handle: BufferHandle, question: Leasing, limit: Limit) -> Leased:
        """Requests a lease. Blocks; raises CannotReachError, OwnerLostError and what `Limit.left` raises."""
        future = request(self._runtime, handle.process, LEASE, question)
        while not future.wait(min(_POLL_S, limit.left())):
            pass
        try:
            return future.get()
        except UnansweredError as error:
            raise owner_lost(handle, str(error)) from None
        except RequestError as error:
            raise CannotReachError(f"its process: {error}") from None

    def renew(self, handle: BufferHandle, lease: int) -> Future[TransferOutcome]:
        """Renews a lease without blocking. The future fails with UnansweredError if the owner is lost."""
        return request(self._runtime, handle.process, RENEW, Renewing(lease))

    def release(self, handle: BufferHandle, lease: int) -> None:
        """Returns a lease without blocking. It expires by itself if the message is lost."""
        with contextlib.suppress(TransportError):
            self._runtime.post(handle.process, RELEASE, Releasing(lease))
