"""What processes write, from a descriptor to a cell: journals, spools, the agent's tail, lines, options and views.

A process writes to its journal; its host agent tails the spool in which that lies and sends chunks to the process that
has spawned it; there they become lines again, and are shown by a script's output or by the cells of a notebook.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from monarch_nb.logs.forwarding import Forwarding
    from monarch_nb.logs.lines import Line, briefly, merged
    from monarch_nb.logs.mesh_logs import MeshLogs, Presenter
    from monarch_nb.logs.records import SHOWN, LogRecord, Logs
    from monarch_nb.logs.sources import Source, mesh_of, prefix, rank_of
    from monarch_nb.logs.view import follow_logs, listen_to_logs, logs_here, logs_of
    from monarch_nb.logs.windows import Windows
    from monarch_nb.logs.written import OpenLine, Written

__all__ = [
    "SHOWN",
    "Forwarding",
    "Line",
    "LogRecord",
    "Logs",
    "MeshLogs",
    "OpenLine",
    "Presenter",
    "Source",
    "Windows",
    "Written",
    "briefly",
    "follow_logs",
    "listen_to_logs",
    "logs_here",
    "logs_of",
    "merged",
    "mesh_of",
    "prefix",
    "rank_of",
]

# Loaded when they are first used: host agents and processes need little of this package.
_HOMES = {
    "Forwarding": "forwarding",
    "Line": "lines",
    "LogRecord": "records",
    "Logs": "records",
    "MeshLogs": "mesh_logs",
    "OpenLine": "written",
    "Presenter": "mesh_logs",
    "SHOWN": "records",
    "Source": "sources",
    "Windows": "windows",
    "Written": "written",
    "briefly": "lines",
    "follow_logs": "view",
    "listen_to_logs": "view",
    "logs_here": "view",
    "logs_of": "view",
    "merged": "lines",
    "mesh_of": "sources",
    "prefix": "sources",
    "rank_of": "sources",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value
