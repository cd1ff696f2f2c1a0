"""This process, as people see it: a mesh of one, or one of a mesh."""

from monarch_nb.mesh.proc import ProcMesh
from monarch_nb.mesh.registry import MeshRegistry
from monarch_nb.runtime import ProcState, Runtime
from monarch_nb.shape import NDSlice, Region
from monarch_nb.wire import Layout, parse_address


class ThisProc:
    """Gives handles to the process itself."""

    def __init__(self, runtime: Runtime, registry: MeshRegistry) -> None:
        self._runtime, self._registry = runtime, registry

    def proc_mesh(self) -> ProcMesh:
        """The mesh this process belongs to."""
        state = self._registry.started_in
        return ProcMesh(state, state.region) if state is not None else self.this_proc()

    def this_proc(self) -> ProcMesh:
        """This process, as a ProcMesh of one."""
        runtime = self._runtime
        uid, rank, _ = parse_address(runtime.address).place
        region = Region((), NDSlice(rank, (), ()))
        if self._registry.started_in is not None:
            return ProcMesh(self._registry.started_in, region)
        state = runtime.meshes.get(uid)
        if not isinstance(state, ProcState):
            layout = Layout(uid, (runtime.host,), 1)
            state = ProcState(uid, "this_proc", region, runtime.address, layout=layout)
            self._registry.own(runtime.root, state)
        return ProcMesh(state, state.region)
