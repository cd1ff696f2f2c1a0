"""Ownership, failures and heals of meshes: a pure state machine and its driver."""

from monarch_nb.runtime import ActorEnd, Cause, CauseKind

from .actions import (
    Action,
    FailActor,
    FailCalls,
    Healed,
    HealRefused,
    Recreate,
    Respawn,
    RootFault,
    ShowFailure,
    StopOwnedMesh,
    Supervise,
    SupervisorEffects,
)
from .driver import Driver
from .failure import (
    DeviceMeshError,
    HealError,
    MeshFailure,
    MeshName,
    SupervisionError,
    UndeliverableMessage,
    decode_failure,
    hosts_text,
    log_failure,
    notice_text,
)
from .healing import Intensity
from .machine import RootPolicy, SupervisionMachine
from .ranks import Extent, RankIncarnation, Selection
from .records import MeshKind, MeshSpec, RankStatus, State

__all__ = [
    "Action",
    "ActorEnd",
    "Cause",
    "CauseKind",
    "DeviceMeshError",
    "Driver",
    "Extent",
    "FailActor",
    "FailCalls",
    "HealError",
    "HealRefused",
    "Healed",
    "Intensity",
    "MeshFailure",
    "MeshKind",
    "MeshName",
    "MeshSpec",
    "RankIncarnation",
    "RankStatus",
    "Recreate",
    "Respawn",
    "RootFault",
    "RootPolicy",
    "Selection",
    "ShowFailure",
    "State",
    "StopOwnedMesh",
    "Supervise",
    "SupervisionError",
    "SupervisionMachine",
    "SupervisorEffects",
    "UndeliverableMessage",
    "decode_failure",
    "hosts_text",
    "log_failure",
    "notice_text",
]
