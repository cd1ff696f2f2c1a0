"""Features that a process loads when they are first used, or when one of their verbs comes: one line each."""

from importlib import import_module

from monarch_nb.runtime import Loader

FEATURES: dict[str, Loader] = {
    "debug": lambda runtime: import_module("monarch_nb.debug.service").attach(runtime),
    "activity": lambda runtime: import_module("monarch_nb.store.activity").attach(runtime),
    "collectives": lambda runtime: import_module("monarch_nb.collectives.service").attach(runtime),
    "diagnosis": lambda runtime: import_module("monarch_nb.diagnosis.service").attach(runtime),
    "metrics": lambda runtime: import_module("monarch_nb.telemetry.points").attach(runtime),
    "tensor": lambda runtime: import_module("monarch_nb.tensor.groups.service").attach(runtime),
    "profiling": lambda runtime: import_module("monarch_nb.profiling.service").attach(runtime),
    "rdma": lambda runtime: import_module("monarch_nb.rdma.service").attach(runtime),
}


def register(name: str, load: Loader) -> None:
    """Adds a feature to processes that begin from now on. Raises ValueError for a name that is taken."""
    if name in FEATURES:
        raise ValueError(f"there is a feature {name!r} already")
    FEATURES[name] = load
