"""Meshes of processes and of actors, shown live."""

from typing import Any

from monarch_nb.mesh import ActorMesh, ProcMesh, region_of, state_of

from ..display.handles import MESH as TENSOR_MESH
from ..display.handles import mesh_facts
from .bundle import bundled
from .live import LiveView, Shown


def options_of(mesh: Any) -> dict[str, Any]:
    """Returns the mesh for a front end; of a slice, the indices of its ranks in the mesh as it was spawned."""
    state, region = state_of(mesh), region_of(mesh)
    options: dict[str, Any] = {"mesh": state.uid}
    if region != state.region:
        indices = {base: index for index, base in enumerate(state.region.ranks())}
        options["ranks"] = [indices[base] for base in region.ranks()]
    return options


def _shown(mesh: Any) -> Shown:
    region = region_of(mesh)
    options = options_of(mesh)
    if "ranks" in options:
        options["labels"], options["sizes"] = list(region.labels), list(region.extent.sizes)
    return Shown(options, (options["mesh"], region))


def _of_tensors(mesh: Any) -> Shown:
    shown = _shown(mesh.procs)
    facts = list(mesh_facts(mesh)[:1])  # how many tensors there are, `%tensors` shows as it changes
    return Shown({**shown.options, "facts": facts}, ("tensors", mesh.stream.number, shown.key))


MESH = LiveView(name="mesh", **bundled("mesh"), shows={ProcMesh: _shown, ActorMesh: _shown, TENSOR_MESH: _of_tensors})
