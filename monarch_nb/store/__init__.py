"""One state for all views: engine events folded into `Cluster`, handed out as snapshots and deltas."""

from monarch_nb.store.cluster import Cluster
from monarch_nb.store.hub import Store, store_of
from monarch_nb.store.patch import Patch, apply, join

__all__ = ["Cluster", "Patch", "Store", "apply", "join", "store_of"]
