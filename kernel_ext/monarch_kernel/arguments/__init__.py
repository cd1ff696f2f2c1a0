"""Parsers of magics' lines: words in, plain values out; errors say what to write instead."""

from .actor_arguments import ActorArguments, read_actor
from .mesh_arguments import USUAL_DIMS, MeshArguments, read_mesh
from .options import (
    LOG_OPTIONS,
    PROFILE_OPTIONS,
    TIMELINE_OPTIONS,
    LogArguments,
    ProfileArguments,
    TimelineArguments,
    read_logs,
    read_profile,
    read_timeline,
)
from .place import MeshSelection, read_place
from .words import check_name, check_options, read_names

__all__ = [
    "LOG_OPTIONS",
    "PROFILE_OPTIONS",
    "TIMELINE_OPTIONS",
    "USUAL_DIMS",
    "ActorArguments",
    "LogArguments",
    "MeshArguments",
    "MeshSelection",
    "ProfileArguments",
    "TimelineArguments",
    "check_name",
    "check_options",
    "read_actor",
    "read_logs",
    "read_mesh",
    "read_names",
    "read_place",
    "read_profile",
    "read_timeline",
]
