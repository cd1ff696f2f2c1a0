"""How a mesh is now, for any mesh in any process."""

from typing import Any

from monarch_nb.mesh import region_of, state_of
from monarch_nb.runtime import MeshState, runtime
from monarch_nb.store.cluster import Cluster
from monarch_nb.store.facts import facts_of, now
from monarch_nb.store.hub import known_store
from monarch_nb.store.mesh_view import MeshView
from monarch_nb.store.pending import Pending


def describe(mesh: Any) -> MeshView:
    """How a proc or actor mesh, a slice of one, or the record of one is. Never blocks and sends nothing.

    The store answers where this process has one that holds the mesh. Elsewhere, as in scripts and workers, the same
    reducer is given what is known of this one mesh.
    """
    state: MeshState = mesh if isinstance(mesh, MeshState) else state_of(mesh)
    region = state.region if isinstance(mesh, MeshState) else region_of(mesh)
    engine = runtime()
    store = known_store(engine)
    view = None if store is None else store.mesh_view(state.uid, region)
    if view is None:
        cluster = Cluster()
        for fact in facts_of(engine, state):
            cluster.fold(fact)
        for asked in Pending(engine).changes():
            cluster.fold(asked)
        view = cluster.mesh_view(state.uid, region, now())
    assert view is not None
    return view
