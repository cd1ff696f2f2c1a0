"""Live views of the cluster: widgets in cells and other users of a comm; docs/protocol.md describes the messages."""

import logging
import os
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from monarch_nb.runtime import Runtime
from monarch_nb.store import store_of
from monarch_nb.top import serve, stop

from ..jupyter import with_cells
from ..session import Session
from .channel import TARGET, Message, ViewChannel, ViewInbox
from .curves import HISTORY, METRICS
from .debugger import DEBUG
from .displays import FAILURES, LOGS, MESH, PANEL
from .live import LiveView, LiveViews, Shown, Watch
from .requests import Requests
from .tensors import TENSORS
from .timelines import VIEW as TIMELINE
from .transfers import TRANSFERS
from .view import View

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

VIEWS = LiveViews((MESH, FAILURES, LOGS, HISTORY, METRICS, DEBUG, TENSORS, TIMELINE, TRANSFERS, PANEL))
register, unregister = VIEWS.register, VIEWS.unregister

logger = logging.getLogger(__name__)


class Views:
    """All views of one kernel."""

    def __init__(self, shell: "InteractiveShell", session: Session, busy: Callable[[], bool] = lambda: False) -> None:
        """`busy()` says whether a cell runs."""
        self._busy = busy
        self._kernel = getattr(shell, "kernel", None)
        self._shell = shell
        self._requests = Requests(session, VIEWS, session.file_name)
        self._inbox = ViewInbox()
        self._views: list[View] = []
        self._pages: set[View] = set()  # of pages with the panel; other views are widgets
        self._past_cells: set[View] = set()  # views whose messages do not wait for the running cell
        self._runtime: Runtime | None = None
        self._unfollow: Callable[[], None] | None = None

    @property
    def has_panel(self) -> bool:
        """True if a page with the panel shows this notebook."""
        return bool(self._pages)

    def install(self) -> None:
        """Accepts comms, where there is a kernel."""
        self._unfollow = VIEWS.follow(self._on_views_changed, self._on_views_changed)
        manager = getattr(self._kernel, "comm_manager", None)
        if manager is not None:
            manager.register_target(TARGET, self._on_open)

    def uninstall(self) -> None:
        """Closes all views."""
        if self._unfollow is not None:
            self._unfollow()
        manager = getattr(self._kernel, "comm_manager", None)
        if manager is not None and TARGET in manager.targets:
            manager.unregister_target(TARGET, manager.targets[TARGET])
        stop()
        views, self._views = self._views, []
        for view in views:
            view.close()
        self._inbox.close()

    def attach(self, runtime: Runtime | None) -> None:
        """Shows this runtime from now on; its store records, so that later views have earlier failures."""
        self._runtime = runtime
        if runtime is not None:
            collector = store_of(runtime).collector
            if collector is not None:
                collector.readable = lambda text: with_cells(self._shell, text)
            store_of(runtime).keep_history()
            self._serve(runtime)
        else:
            stop()
        for view in tuple(self._views):
            self._inbox.put(partial(view.attach, runtime))

    def _serve(self, runtime: Runtime) -> None:
        """Serves `monarch-nb top`, also while a cell blocks."""
        name = os.path.basename(os.environ.get("JPY_SESSION_NAME", ""))
        if self._kernel is None:
            return
        try:
            serve(runtime, f"the kernel of {name}" if name else "a notebook's kernel")
        except OSError:
            logger.warning("monarch-nb top cannot show this kernel's cluster", exc_info=True)

    def announce(self, message: Message) -> None:
        """Sends a message to all pages with the panel; from any thread."""
        for view in tuple(self._pages):
            self._inbox.put(partial(view.announce, message))

    def connect(self, comm: Any, *, custom: bool = False) -> View:
        """Creates the view of a comm; `custom` for the comm of a widget."""
        view = View(
            ViewChannel(self._kernel, comm, custom=custom).send, self._requests, VIEWS, lambda: self._silent(view)
        )
        self._views.append(view)
        self._inbox.put(lambda: view.attach(self._runtime))
        return view

    def receive(self, view: View, message: Any) -> None:
        """Handles a message of a front end, on any thread."""
        view.mark_alive()
        if threading.current_thread() is threading.main_thread():
            self._past_cells.discard(view)
        else:  # of a subshell
            self._past_cells.add(view)
        if isinstance(message, dict):
            self._inbox.put(lambda: view.receive(message))

    def _silent(self, view: View) -> None:
        if self._busy() and view not in self._past_cells:
            view.mark_alive()  # its messages wait for the cell
        else:
            self._inbox.put(view.pause)

    def disconnect(self, view: View) -> None:
        """Removes the view of a front end that has gone."""
        self._past_cells.discard(view)
        self._pages.discard(view)
        if view in self._views:
            self._views.remove(view)
        self._inbox.put(view.close)

    def _on_views_changed(self, _: LiveView) -> None:
        for view in tuple(self._views):
            self._inbox.put(view.name_views)

    def _on_open(self, comm: Any, message: Any) -> None:
        view = self.connect(comm)
        self._pages.add(view)
        comm.on_msg(lambda message: self.receive(view, message["content"]["data"]))
        comm.on_close(lambda message: self.disconnect(view))


__all__ = ["LiveView", "Shown", "Views", "Watch", "register", "unregister"]
