"""The exceptions of Monarch-NB, to catch by name."""

from monarch_nb.connect import AttachError
from monarch_nb.debug.records import DebugError, QuitDebugger, StoppedAtBreakpoint
from monarch_nb.diagnosis import CallAbortedError
from monarch_nb.host.launch import AgentStartError
from monarch_nb.mesh.host_record import NoMoreHostsError
from monarch_nb.mesh.requests import RequestError
from monarch_nb.routing.routes import AddressError
from monarch_nb.runtime import DeadlockError, WouldBlockRuntime
from monarch_nb.supervision import DeviceMeshError, HealError, SupervisionError
from monarch_nb.transport import DescriptorLimitError, TransportError, TrustError
from monarch_nb.wire import ActorError, MessageTooLargeError

__all__ = [
    "ActorError",
    "AddressError",
    "AgentStartError",
    "AttachError",
    "CallAbortedError",
    "DeadlockError",
    "DebugError",
    "DescriptorLimitError",
    "DeviceMeshError",
    "HealError",
    "MessageTooLargeError",
    "NoMoreHostsError",
    "QuitDebugger",
    "RequestError",
    "StoppedAtBreakpoint",
    "SupervisionError",
    "TransportError",
    "TrustError",
    "WouldBlockRuntime",
]
