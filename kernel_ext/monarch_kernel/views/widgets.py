"""Live displays in cells, if anywidget is installed; the static forms are sent and saved beside them."""

import itertools
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from monarch_nb.runtime import started
from monarch_nb.store import Document, RankFields, store_of
from monarch_nb.wire import ActorError

from ..display.failures import raised_title
from ..front import Bundle
from ..jupyter import bundle_formatter
from .live import LiveView, LiveViews, Shown, built

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from . import Views

VIEW = "application/vnd.jupyter.widget-view+json"
SAVED_WHOLE = 512  # ranks of a mesh whose complete records are saved in the notebook's file; of more
SAVED_STATES = 20_000  # only their states, and at most so many
KEPT = 64  # widgets that are reused for the same content
logger = logging.getLogger(__name__)


def view_of(widget: Any) -> Bundle:
    """Returns the MIME bundle that shows a widget."""
    return {VIEW: {"version_major": 2, "version_minor": 0, "model_id": widget.model_id}}


def widget_base() -> Any:
    """Returns the base class of the widgets of all views; None if anywidget or the bundles are missing."""
    try:
        import anywidget
        import traitlets
    except Exception:  # too old, or half installed
        return None

    class View(anywidget.AnyWidget):
        """A view of the cluster. Live data comes as messages; `saved` is shown without a kernel."""

        options = traitlets.Dict().tag(sync=True)
        saved = traitlets.Dict().tag(sync=True)

    if not built():
        logger.warning("live displays are missing from this installation, tables are shown instead: run `make setup`")
        return None
    return View


def widget_class(base: Any, view: LiveView) -> Any:
    """Returns the widget of a view. Front ends distinguish style sheets by the name of the class."""
    text = {"_esm": view.script(), "_css": view.style()}
    # anywidget takes text of one line for the name of a file.
    return type(
        view.name.title(), (base,), {name: f"{code}\n" if "\n" not in code else code for name, code in text.items()}
    )


class Widgets:
    """Makes a widget for each shown value, and connects it with the store."""

    def __init__(self, shell: "InteractiveShell", views: "Views") -> None:
        self._shell = shell
        self._kernel: Any = getattr(shell, "kernel", None)
        self._views = views
        self._base: Any = None  # the class of all widgets, while they are shown
        self._unfollow: Callable[[], None] = lambda: None
        self._classes: Bundle = {}
        self._widgets: dict[Any, Any] = {}

    @property
    def has_panel(self) -> bool:
        """True if a page with the panel shows this notebook."""
        return self._views.has_panel

    def install(self, views: LiveViews) -> None:
        """Registers live displays. Without a kernel, or without anywidget, nothing changes."""
        if self._kernel is None:
            return
        self._base = widget_base()
        if self._base is not None:
            self._unfollow = views.follow(self._add, self._remove)

    def of(self, value: Any, views: LiveViews) -> Any:
        """Returns the widget of a value without installed displays, as in marimo; None if no view shows such values."""
        self._base = self._base or widget_base()
        if self._base is None:
            return None
        for view in views:
            for kind in type(value).__mro__:
                shown = view.shows.get(kind) or view.shows.get(f"{kind.__module__}.{kind.__qualname__}")
                if shown is not None:
                    if view.name not in self._classes:
                        self._classes[view.name] = widget_class(self._base, view)
                    content = shown(value)
                    return self.show(view.name, content.options, content.key)
        return None

    def _is_watched(self) -> bool:
        """Returns whether a person watches. Runs without stdin, such as nbclient's, are opened later, without a kernel.

        JupyterLab cannot show widgets then; the static forms it can.
        """
        request = self._kernel.get_parent("shell") or {}
        return bool(request.get("content", {}).get("allow_stdin", True))

    def uninstall(self, views: LiveViews) -> None:
        """Restores the former displays."""
        if self._base is not None:
            self._unfollow()
            for view in views:
                self._remove(view)
        self._base = None
        self._classes.clear()
        self._widgets.clear()

    def _add(self, view: LiveView) -> None:
        self._classes[view.name] = widget_class(self._base, view)
        formatter = bundle_formatter(self._shell)
        for kind, shown in view.shows.items():
            formatter.for_type(kind, self._live(view, shown))

    def _remove(self, view: LiveView) -> None:
        self._classes.pop(view.name, None)
        formatter = bundle_formatter(self._shell)
        for kind in view.shows:
            formatter.pop(kind, None)

    def _live(self, view: LiveView, shown: Callable[[Any], Shown]) -> Callable[..., Bundle]:
        """Returns the formatter of live forms; {} for values that cannot be shown live."""

        def bundle(value: Any, include: object = None, exclude: object = None) -> Bundle:
            try:
                if not self._is_watched():
                    return {}
                content = shown(value)
                return view_of(self.show(view.name, content.options, content.key))
            except Exception:
                logger.debug("no live display", exc_info=True)
                return {}

        return bundle

    def failure(self, number: str, *, bar: bool = False) -> Bundle:
        """Returns the live form of one failure beside its text, or as a `bar` above it; {} if there is none."""
        if not self._classes or not self._is_watched():
            return {}
        try:
            return view_of(self.show("failures", {"failure": number, "bar": bar}, ("failure", number, bar)))
        except Exception:
            logger.debug("no live display", exc_info=True)
            return {}

    def raised(self, error: ActorError) -> Bundle:
        """Returns the live form of an endpoint's error, a bar above its text; {} if there is none."""
        runtime = started()
        if not self._classes or error.origin is None or runtime is None or not self._is_watched():
            return {}
        try:
            uid, rank, call = error.origin
            state = runtime.meshes[uid]
            record = {
                "mesh": uid,
                "ranks": [state.region.ndslice.index(rank)],
                "call": call,
                "name": state.name,
                "kind": "actors",
                "title": raised_title(error),
                "cause": "exception",
                "at": time.time(),
                "state": "raised",
                "report": str(error),
            }
            return view_of(self.show("failures", {"raised": record, "bar": True}, None))
        except Exception:
            logger.debug("no live display", exc_info=True)
            return {}

    def debugger(self) -> Bundle:
        """Returns the live form of the stopped ranks below the prompt's text in its cell; {} without one."""
        if not self._classes:
            return {}
        try:
            return view_of(self.show("debug", {"folded": True}, "asking"))
        except Exception:
            logger.debug("no live display", exc_info=True)
            return {}

    def show(self, view: str, options: Bundle, key: Any) -> Any:
        """Returns the widget of a view; equal keys share one widget."""
        runtime = started()
        document = store_of(runtime).document() if runtime is not None else None
        saved = {"now": time.time(), "state": _part(document, options.get("mesh"))}
        if runtime is not None:
            saved["engine"] = runtime.address
        key = (view, key) if key is not None else None
        existing = self._widgets.get(key)
        if existing is not None and existing.comm is not None:
            existing.saved = saved
            return existing
        widget = self._classes[view](options=options, saved=saved)
        connected = self._views.connect(widget.comm, custom=True)
        widget.on_msg(lambda widget, content, buffers: self._views.receive(connected, content))
        self._widgets[key if key is not None else widget.model_id] = widget
        while len(self._widgets) > KEPT:
            self._widgets.pop(next(iter(self._widgets)))
        return widget


def _brief(records: dict[str, RankFields]) -> dict[str, RankFields]:
    """Records of ranks for the notebook's file: only states if there are many, only unusual ones if very many."""
    if len(records) <= SAVED_WHOLE:
        return records
    states: dict[str, RankFields] = {
        index: {"state": record["state"]} for index, record in records.items() if "state" in record
    }
    if len(states) > SAVED_STATES:
        states = {index: record for index, record in states.items() if record["state"] not in ("busy", "idle")}
    return dict(itertools.islice(states.items(), SAVED_STATES))


def _part(document: Document | None, uid: str | None) -> Bundle:
    """Returns the part of the state that shows one mesh without a kernel."""
    if document is None:
        return {"hosts": {}, "meshes": {}, "ranks": {}, "failures": {}}
    if uid is None:
        return {**document, "ranks": {}}
    meshes = document["meshes"]
    on = meshes[uid].get("on") if uid in meshes else None
    shown = {uid, on, *(child for child, mesh in meshes.items() if mesh.get("on") == uid)}
    ranks = {key: _brief(records) for key, records in document["ranks"].items() if key in shown}
    failures = {key: failure for key, failure in document["failures"].items() if failure["mesh"] in shown}
    meshes_shown = {key: mesh for key, mesh in meshes.items() if key in shown}
    return {"hosts": document["hosts"], "meshes": meshes_shown, "ranks": ranks, "failures": failures}
