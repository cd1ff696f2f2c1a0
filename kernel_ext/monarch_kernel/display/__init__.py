"""Displays of meshes, values, futures and failures in cells."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from IPython.display import display

from monarch_nb.logs import Logs
from monarch_nb.mesh import ActorMesh, HostMesh, ProcMesh, ValueMesh
from monarch_nb.runtime import Future
from monarch_nb.store.failures import record
from monarch_nb.supervision import MeshFailure
from monarch_nb.telemetry import History, Metrics
from monarch_nb.tensor import simulated
from monarch_nb.tensor.placement import Placement

from ..guide import Guide, checkup_html, guide_html
from ..jupyter import formatters
from ..namespace import Overview
from ..tensors import TensorListing
from ..views.curves import history_html
from ..views.displays import (
    ClusterPanel,
    Failures,
    LogView,
    diagnosis_html,
    logs_html,
    memory_html,
    metrics_html,
    slow_html,
    values_html,
)
from ..views.marimo import LiveValue, live_value
from ..views.transfers import transfers_html
from .failures import failure_bundle
from .meshes import host_mesh_html, mesh_html, mesh_text, overview_html
from .placement import placement_html
from .profile import ProfileForms
from .simulation import simulation_html
from .tensors import HandleForms, tensors_html
from .timeline import TimelineForms
from .values import future_html, value_mesh_html

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_TEXT = simulated.show
# Classes that are named here, and not imported, are loaded on first use.
_FORMS: dict[type | str, Callable[[Any], str]] = {
    ProcMesh: mesh_html,
    ActorMesh: mesh_html,
    HostMesh: host_mesh_html,
    ValueMesh: value_mesh_html,
    Future: future_html,
    Logs: logs_html,
    Overview: overview_html,
    Guide: guide_html,
    "monarch_kernel.doctor.Checkup": checkup_html,
    Failures: Failures.html,
    LogView: lambda view: logs_html(view.logs),
    ClusterPanel: lambda panel: overview_html(panel.meshes),
    Metrics: metrics_html,
    History: history_html,
    TensorListing: tensors_html,
    "monarch_nb.rdma.table.TransferTable": transfers_html,
    "monarch_nb.diagnosis.findings.Diagnosis": diagnosis_html,
    "monarch_nb.diagnosis.nonfinite.ValueWatch": values_html,
    "monarch_nb.diagnosis.memory.MemoryWatch": memory_html,
    "monarch_nb.diagnosis.slow.StragglerWatch": slow_html,
    "monarch_nb.tensor.simulated.simulator.Simulator": simulation_html,
    Placement: placement_html,
    MeshFailure: lambda failure: failure_bundle(record(failure, time.time()))["text/html"],
}


def install(shell: "InteractiveShell") -> None:
    """Registers the HTML forms, so that the library itself stays free of HTML."""
    by_type = formatters(shell)
    for kind, form in _FORMS.items():
        by_type["text/html"].for_type(kind, form)
    for kind in (ProcMesh, ActorMesh):
        by_type["text/plain"].for_type(kind, mesh_text)
    simulated.show = display
    HandleForms(shell).install()
    ProfileForms(shell).install()
    TimelineForms(shell).install()


def uninstall(shell: "InteractiveShell") -> None:
    """Removes the displays."""
    by_type = formatters(shell)
    for kind in _FORMS:
        by_type["text/html"].pop(kind, None)
    for kind in (ProcMesh, ActorMesh):
        by_type["text/plain"].pop(kind, None)
    simulated.show = _TEXT
    TimelineForms(shell).uninstall()
    HandleForms(shell).uninstall()
    ProfileForms(shell).uninstall()


def show(value: Any) -> LiveValue:
    """Returns a mesh, its results, a failure or a profile as a static display without IPython, as in marimo."""
    return live_value(value, _FORMS)


def panel() -> LiveValue:
    """Returns the cluster, as the panel of JupyterLab shows it, where there is no IPython: in marimo's cells."""
    return show(ClusterPanel())


__all__ = ["install", "panel", "show", "uninstall"]
