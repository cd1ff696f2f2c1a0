"""Host, proc, actor and value meshes, with the adverbs that work on them."""

from monarch_nb.mesh.actor import ActorMesh
from monarch_nb.mesh.cells import AnyMesh, RankWatch, cell_actors, reason_of, run_on, run_on_each, values_or_errors
from monarch_nb.mesh.endpoint import Accumulator, Endpoint, SendsToPorts, as_endpoint, send
from monarch_nb.mesh.handle import Handle, as_it_is, part_of, region_of, state_of
from monarch_nb.mesh.host import HostMesh, give_up, spawn_helpers, this_host, this_proc
from monarch_nb.mesh.proc import (
    ProcMesh,
    get_active_proc_meshes,
    register_proc_mesh_spawn_callback,
    unregister_proc_mesh_spawn_callback,
)
from monarch_nb.mesh.sending import HeldByRanksError, LentFrames
from monarch_nb.mesh.value import ValueMesh

__all__ = [
    "Accumulator",
    "ActorMesh",
    "AnyMesh",
    "Endpoint",
    "Handle",
    "HeldByRanksError",
    "HostMesh",
    "LentFrames",
    "ProcMesh",
    "RankWatch",
    "SendsToPorts",
    "ValueMesh",
    "as_endpoint",
    "as_it_is",
    "cell_actors",
    "get_active_proc_meshes",
    "give_up",
    "part_of",
    "reason_of",
    "region_of",
    "register_proc_mesh_spawn_callback",
    "run_on",
    "run_on_each",
    "send",
    "spawn_helpers",
    "state_of",
    "this_host",
    "this_proc",
    "unregister_proc_mesh_spawn_callback",
    "values_or_errors",
]
