"""Features that a process loads when they are first needed: one line each."""

from importlib import import_module

from monarch_nb.runtime import Runtime


def _attached(module: str, engine: Runtime) -> object:
    return import_module(module).attach(engine)


FEATURES = {
    name: lambda engine, module=module: _attached(module, engine)
    for name, module in {
        "debug": "monarch_nb.debug.service",
        "activity": "monarch_nb.store.activity",
        "metrics": "monarch_nb.telemetry.points",
        "rdma": "monarch_nb.rdma.service",
    }.items()
}
