"""The one state that text, static HTML, widgets and the panel show: engine events folded into `ClusterState`."""

from monarch_nb.store.cluster import ClusterState
from monarch_nb.store.hub import Store, describe, store_of
from monarch_nb.store.mesh_view import WORST_FIRST, MeshView, RankView, kind_rows, kinds_text
from monarch_nb.store.records import Document, FailureFields, Patch, RankFields, RankState, apply

__all__ = [
    "WORST_FIRST",
    "ClusterState",
    "Document",
    "FailureFields",
    "MeshView",
    "Patch",
    "RankFields",
    "RankState",
    "RankView",
    "Store",
    "apply",
    "describe",
    "kind_rows",
    "kinds_text",
    "store_of",
]
