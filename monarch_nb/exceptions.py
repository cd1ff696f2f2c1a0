"""What can go wrong, to catch by name."""

from monarch_nb.runtime import DeadlockError
from monarch_nb.supervision import DeviceMeshError, HealError, SupervisionError
from monarch_nb.transport import DescriptorLimitError, TransportError, TrustError
from monarch_nb.wire import ActorError

__all__ = [
    "ActorError",
    "DeadlockError",
    "DescriptorLimitError",
    "DeviceMeshError",
    "HealError",
    "SupervisionError",
    "TransportError",
    "TrustError",
]
