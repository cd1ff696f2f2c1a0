"""Features that a process loads when they are first used, or when one of their verbs comes: one line each."""

from importlib import import_module

from monarch_nb.runtime import Loader

FEATURES: dict[str, Loader] = {
    "debug": lambda engine: import_module("monarch_nb.debug.service").attach(engine),
    "activity": lambda engine: import_module("monarch_nb.store.activity").attach(engine),
    "collectives": lambda engine: import_module("monarch_nb.collectives.service").attach(engine),
    "metrics": lambda engine: import_module("monarch_nb.telemetry.points").attach(engine),
    "tensor": lambda engine: import_module("monarch_nb.tensor.groups.service").attach(engine),
    "profiling": lambda engine: import_module("monarch_nb.profiling.service").attach(engine),
    "rdma": lambda engine: import_module("monarch_nb.rdma.service").attach(engine),
}


def register(name: str, load: Loader) -> None:
    """Adds a feature to processes that begin from now on. Raises ValueError for a name that is taken."""
    if name in FEATURES:
        raise ValueError(f"there is a feature {name!r} already")
    FEATURES[name] = load
