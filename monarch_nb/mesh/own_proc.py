"""This process, as people see it: a mesh of one, or one of a mesh."""

from monarch_nb.mesh.proc import ProcMesh
from monarch_nb.mesh.registry import MeshRegistry
from monarch_nb.runtime import ProcState, Runtime
from monarch_nb.shape import NDSlice, Region
from monarch_nb.wire import Layout, parse_address


class ThisProc:
    """Gives handles to the process itself."""

    def __init__(self, engine: Runtime, registry: MeshRegistry) -> None:
        self._engine, self._registry = engine, registry

    def proc_mesh(self) -> ProcMesh:
        """The mesh this process belongs to."""
        state = self._registry.started_in
        return ProcMesh(state, state.region) if state is not None else self.this_proc()

    def this_proc(self) -> ProcMesh:
        """This process, as a ProcMesh of one."""
        engine = self._engine
        uid, rank, _ = parse_address(engine.address).place
        region = Region((), NDSlice(rank, (), ()))
        if self._registry.started_in is not None:
            return ProcMesh(self._registry.started_in, region)
        state = engine.meshes.get(uid)
        if not isinstance(state, ProcState):
            layout = Layout(uid, (engine.host,), 1)
            state = ProcState(uid, "this_proc", region, engine.address, layout=layout)
            self._registry.own(engine.root, state)
        return ProcMesh(state, state.region)
