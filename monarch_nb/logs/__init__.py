"""Output of processes, from a descriptor to a cell: journals, spools, the agent's tail, lines, options and views.

A process writes to its journal; its host agent tails the spool that contains it and sends chunks to the process that
has spawned it, which splits them into lines again. A script's output or the cells of a notebook show the lines.
"""

from typing import TYPE_CHECKING

from monarch_nb._package import lazy_names

if TYPE_CHECKING:
    from monarch_nb.logs.forwarding import Forwarding, Windows
    from monarch_nb.logs.lines import Bar, Line, OpenLine, Source, Written, briefly, merged, mesh_of, prefix, rank_of
    from monarch_nb.logs.mesh_logs import MeshLogs, Presenter
    from monarch_nb.logs.view import USUAL_LINES, LogRecord, Logs, follow_logs, listen_to_logs, logs_here, logs_of

__all__ = [
    "USUAL_LINES",
    "Bar",
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

# Host agents and processes need little of this package.
__getattr__ = lazy_names(
    __name__,
    {
        "forwarding": ("Forwarding", "Windows"),
        "lines": ("Bar", "Line", "OpenLine", "Source", "Written", "briefly", "merged", "mesh_of", "prefix", "rank_of"),
        "mesh_logs": ("MeshLogs", "Presenter"),
        "view": ("USUAL_LINES", "LogRecord", "Logs", "follow_logs", "listen_to_logs", "logs_here", "logs_of"),
    },
)
