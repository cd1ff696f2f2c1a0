"""Parsers of magics' lines: words in, plain values out; errors say what to write instead."""

from .actor_arguments import ActorArguments, read_actor
from .log_arguments import LOG_OPTIONS, LogArguments, read_logs
from .mesh_arguments import USUAL_DIMS, MeshArguments, read_mesh
from .place import MeshSelection, read_place
from .profile_arguments import PROFILE_OPTIONS, ProfileArguments, read_profile
from .words import check_name, check_options, read_names

__all__ = [
    "LOG_OPTIONS",
    "PROFILE_OPTIONS",
    "USUAL_DIMS",
    "ActorArguments",
    "LogArguments",
    "MeshArguments",
    "MeshSelection",
    "ProfileArguments",
    "check_name",
    "check_options",
    "read_actor",
    "read_logs",
    "read_mesh",
    "read_names",
    "read_place",
    "read_profile",
]
