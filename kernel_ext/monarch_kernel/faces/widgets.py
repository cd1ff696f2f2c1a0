"""Live displays in cells, where anywidget is there; the static forms are shown, and saved, beside them."""

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from monarch_nb.mesh import ActorMesh, ProcMesh
from monarch_nb.runtime import process
from monarch_nb.store import store_of

from .bundle import script, style

if TYPE_CHECKING:
    from . import Faces

VIEW = "application/vnd.jupyter.widget-view+json"
KEPT = 64  # widgets that are used again when the same is shown again
logger = logging.getLogger(__name__)


def widget_class() -> Any:
    """The widget, or None where anywidget is not there."""
    try:
        import anywidget
        import traitlets
    except Exception:  # too old, or half installed, is as good as not there
        return None

    class View(anywidget.AnyWidget):
        """One view of the cluster; everything live comes as messages, `saved` is what is there without a kernel."""

        _esm = script()
        _css = style()
        view = traitlets.Unicode("mesh").tag(sync=True)
        options = traitlets.Dict().tag(sync=True)
        saved = traitlets.Dict().tag(sync=True)

    return View


class Widgets:
    """Makes them, one for each thing that is shown, and connects them with the store."""

    def __init__(self, shell: Any, faces: "Faces") -> None:
        self._shell = shell
        self._faces = faces
        self._class: Any = None
        self._made: dict[Any, Any] = {}

    def install(self) -> None:
        """From now on meshes are shown live. Without a kernel, or without anywidget, nothing changes."""
        if getattr(self._shell, "kernel", None) is None:
            return
        self._class = widget_class()
        if self._class is None:
            return
        formatter = self._shell.display_formatter.mimebundle_formatter
        for kind in (ProcMesh, ActorMesh):
            formatter.for_type(kind, self._bundle)

    def uninstall(self) -> None:
        """Meshes are shown as they were before."""
        formatter = self._shell.display_formatter.mimebundle_formatter
        for kind in (ProcMesh, ActorMesh) if self._class is not None else ():
            formatter.pop(kind, None)
        self._made.clear()

    def _bundle(self, mesh: Any, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        """What is shown besides text and HTML; {} if it cannot be."""
        try:
            widget = self._mesh(mesh)
        except Exception:
            logger.debug("no live display", exc_info=True)
            return {}
        return {VIEW: {"version_major": 2, "version_minor": 0, "model_id": widget.model_id}}

    def _mesh(self, mesh: Any) -> Any:
        state, region = mesh._state, mesh._region
        options: dict[str, Any] = {"mesh": state.uid}
        if region != state.region:
            whole = {base: index for index, base in enumerate(state.region.ranks())}
            options["ranks"] = [whole[base] for base in region.ranks()]
            options["labels"], options["sizes"] = list(region.labels), list(region.extent.sizes)
        return self.show("mesh", options, (state.uid, region))

    def show(self, view: str, options: dict[str, Any], key: Any) -> Any:
        """The widget of a view; what is shown twice is one widget."""
        engine = process._runtime
        document = store_of(engine).document() if engine is not None else {}
        saved = {"now": time.time(), "state": _part(document, options.get("mesh"))}
        known = self._made.get(key)
        if known is not None and known.comm is not None:
            known.saved = saved
            return known
        widget = self._class(view=view, options=options, saved=saved)
        face = self._faces.connect(widget.comm, custom=True)
        widget.on_msg(lambda widget, content, buffers: self._faces.receive(face, content))
        self._made[key] = widget
        while len(self._made) > KEPT:
            self._made.pop(next(iter(self._made)))
        return widget


def _part(document: dict[str, Any], uid: str | None) -> dict[str, Any]:
    """What one mesh needs of the state to be shown without a kernel."""
    if uid is None:
        return document
    meshes = document.get("meshes", {})
    near = {uid, meshes.get(uid, {}).get("on"), *(other for other, mesh in meshes.items() if mesh.get("on") == uid)}
    pick: Callable[[str], dict[str, Any]] = lambda section: {  # noqa: E731
        key: value for key, value in document.get(section, {}).items() if key in near
    }
    failures = {key: one for key, one in document.get("failures", {}).items() if one["mesh"] in near}
    return {"hosts": document.get("hosts", {}), "meshes": pick("meshes"), "ranks": pick("ranks"), "failures": failures}
