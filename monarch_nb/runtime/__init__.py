"""One per process: mailboxes, ports, futures, context, and how an endpoint is executed."""

from monarch_nb.runtime.actors.actor import Actor
from monarch_nb.runtime.actors.cell import ANEW, EXEC, HOOK, RELOAD, ActorCell
from monarch_nb.runtime.actors.endpoint import (
    AnyEndpoint,
    Coro,
    EndpointProperty,
    concurrent_endpoint,
    endpoint,
    endpoints_of,
    kind_of,
    undeclared_name,
)
from monarch_nb.runtime.actors.hosting import calls_of
from monarch_nb.runtime.arrivals import SPAWN
from monarch_nb.runtime.bodies import returns_future
from monarch_nb.runtime.breakpoints import breakpoint_if, install_breakpoints
from monarch_nb.runtime.calls import DeadlockError, PendingCall, Thunk
from monarch_nb.runtime.cause import ActorEnd, Cause, CauseKind, stop_cause
from monarch_nb.runtime.context import ROOT, ActorId, Context, CreatorInstance, Instance, StopRequested, current
from monarch_nb.runtime.encoded_arguments import EncodedObject, LentArguments
from monarch_nb.runtime.features import COLLECTIVES, DEBUG, Feature
from monarch_nb.runtime.future import (
    Future,
    WouldBlockRuntime,
    cancel_with,
    derived_future,
    error_of,
    fail_future,
    give_up,
    hand_out,
    pending_future,
    reported_elsewhere,
    resolve_future,
    resolve_later,
    resolved_future,
    when_done,
)
from monarch_nb.runtime.losses import FILL_AGAIN_S
from monarch_nb.runtime.meshes import ActorState, MeshState, ProcState, proc_state_of, ranks_of
from monarch_nb.runtime.ports import Channel, Port, PortReceiver, RankedPortReceiver, number_for
from monarch_nb.runtime.process import Loader, Parts, Runtime, current_runtime, install, started
from monarch_nb.runtime.recorder import CallRecorder, CollectionWatch
from monarch_nb.runtime.streams import StreamCall
from monarch_nb.runtime.supervising import Supervising, fault_hook, set_hook_lookup
from monarch_nb.runtime.tables import ByteCounts, ProcessTables
from monarch_nb.runtime.verbs import DOING, INTERRUPT, Interrupt, RunningEndpoint, RunsOn, SpawnActor, WhatRuns
from monarch_nb.runtime.waiting import WaitObserver

__all__ = [
    "ANEW",
    "COLLECTIVES",
    "DEBUG",
    "DOING",
    "EXEC",
    "FILL_AGAIN_S",
    "HOOK",
    "INTERRUPT",
    "RELOAD",
    "ROOT",
    "SPAWN",
    "Actor",
    "ActorCell",
    "ActorEnd",
    "ActorId",
    "ActorState",
    "AnyEndpoint",
    "ByteCounts",
    "CallRecorder",
    "Cause",
    "CauseKind",
    "Channel",
    "CollectionWatch",
    "Context",
    "Coro",
    "CreatorInstance",
    "DeadlockError",
    "EncodedObject",
    "EndpointProperty",
    "Feature",
    "Future",
    "Instance",
    "Interrupt",
    "LentArguments",
    "Loader",
    "MeshState",
    "Parts",
    "PendingCall",
    "Port",
    "PortReceiver",
    "ProcState",
    "ProcessTables",
    "RankedPortReceiver",
    "RunningEndpoint",
    "RunsOn",
    "Runtime",
    "SpawnActor",
    "StopRequested",
    "StreamCall",
    "Supervising",
    "Thunk",
    "WaitObserver",
    "WhatRuns",
    "WouldBlockRuntime",
    "breakpoint_if",
    "calls_of",
    "cancel_with",
    "concurrent_endpoint",
    "current",
    "current_runtime",
    "derived_future",
    "endpoint",
    "endpoints_of",
    "error_of",
    "fail_future",
    "fault_hook",
    "give_up",
    "hand_out",
    "install",
    "install_breakpoints",
    "kind_of",
    "number_for",
    "pending_future",
    "proc_state_of",
    "ranks_of",
    "reported_elsewhere",
    "resolve_future",
    "resolve_later",
    "resolved_future",
    "returns_future",
    "set_hook_lookup",
    "started",
    "stop_cause",
    "undeclared_name",
    "when_done",
]
