"""One per process: mailboxes, ports, futures, context, and how an endpoint is executed."""

from monarch_nb.runtime.actor import Actor
from monarch_nb.runtime.bodies import WouldBlockRuntime, returns_future
from monarch_nb.runtime.calls import DeadlockError, PendingCall, StreamCall
from monarch_nb.runtime.cell import EXEC, HOOK, RELOAD, ActorCell
from monarch_nb.runtime.context import ROOT, ActorId, Context, CreatorInstance, Instance, StopRequested, current
from monarch_nb.runtime.endpoint import (
    EndpointProperty,
    concurrent_endpoint,
    endpoint,
    endpoints_of,
    kind_of,
    undeclared_name,
)
from monarch_nb.runtime.future import Future, Waiter, waiters
from monarch_nb.runtime.held import Held
from monarch_nb.runtime.interruptions import DOING, INTERRUPT, Doing, Interrupt
from monarch_nb.runtime.life import ActorLife, SpawnActor
from monarch_nb.runtime.meshes import ActorState, MeshState, ProcState
from monarch_nb.runtime.ports import Channel, Port, PortReceiver, RankedPortReceiver, number_for
from monarch_nb.runtime.process import SPAWN, Runtime, install, runtime, set_factory, started
from monarch_nb.runtime.supervising import Supervising
from monarch_nb.runtime.unhandled import fault_hook, set_hook_lookup

__all__ = [
    "DOING",
    "EXEC",
    "HOOK",
    "INTERRUPT",
    "RELOAD",
    "ROOT",
    "SPAWN",
    "Actor",
    "ActorCell",
    "ActorId",
    "ActorLife",
    "ActorState",
    "Channel",
    "Context",
    "CreatorInstance",
    "DeadlockError",
    "Doing",
    "EndpointProperty",
    "Future",
    "Held",
    "Instance",
    "Interrupt",
    "MeshState",
    "PendingCall",
    "Port",
    "PortReceiver",
    "ProcState",
    "RankedPortReceiver",
    "Runtime",
    "SpawnActor",
    "StopRequested",
    "StreamCall",
    "Supervising",
    "Waiter",
    "WouldBlockRuntime",
    "concurrent_endpoint",
    "current",
    "endpoint",
    "endpoints_of",
    "fault_hook",
    "install",
    "kind_of",
    "number_for",
    "returns_future",
    "runtime",
    "set_factory",
    "set_hook_lookup",
    "started",
    "undeclared_name",
    "waiters",
]
