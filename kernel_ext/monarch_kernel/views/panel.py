"""The panel as a display in a cell, for front ends without a side panel: `%panel`, and `panel()` in marimo."""

from types import SimpleNamespace
from typing import Any

from IPython.core.error import UsageError

from ..namespace import Namespace
from ..overview import Overview
from ..session import Session
from .bundle import bundled
from .live import LiveView, Shown


class ClusterPanel:
    """The cluster of this kernel; a table of its meshes where no script runs."""

    def __init__(self, meshes: Namespace | None = None) -> None:
        """`meshes` are those of a notebook with magics. Without them, no code of the panel's actions is shown."""
        nothing: Any = SimpleNamespace(user_ns={}, user_ns_hidden={})
        self.code = meshes is not None
        self.meshes = Overview((meshes or Namespace(nothing)).rows())

    def __repr__(self) -> str:
        return repr(self.meshes)


def _magic(session: Session, line: str) -> ClusterPanel:
    """Show the cluster of this notebook: what runs, and what can be done to it.

    %panel

    It is JupyterLab's side panel in a cell, for front ends that have none: a tree of meshes, hosts, processes and
    actors, with a menu and keys for what can be done to them, failures, logs, the debugger and the rest.
    From Python: monarch_kernel.panel(), as in marimo.
    """
    if line.strip():
        raise UsageError("%panel takes no arguments: what is selected in its tree is acted on")
    return ClusterPanel(session)


PANEL = LiveView(
    name="panel",
    **bundled("panel"),
    shows={ClusterPanel: lambda panel: Shown({"code": panel.code}, "panel")},
    magic=_magic,
)
