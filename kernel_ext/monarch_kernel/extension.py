"""The extension that `%load_ext monarch` installs in a kernel."""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from monarch_nb.code.modules import namers
from monarch_nb.connect import prestart
from monarch_nb.lifecycle import notebook_mode
from monarch_nb.lifecycle.watching import HostNotices
from monarch_nb.logs import Forwarding, MeshLogs
from monarch_nb.runtime import Future, Runtime, current_runtime, started, waiting
from monarch_nb.store import store_of
from monarch_nb.store.failures import record
from monarch_nb.supervision import MeshFailure
from monarch_nb.wire import ActorError

from . import display
from .completion import Completion, RankCompletion
from .dap import DebugBridge
from .debugger import CellPrompt, DebugMagics, with_remote
from .diagnosis import DiagnosisMagics, ProfileMagics, TimelineMagics
from .display.errors import Errors, UnretrievedErrors
from .display.failures import FailureNotice, Notices, raised_bar, show_notice
from .front import Front
from .guide import GuideMagics
from .jupyter import cell_name
from .leaving import LeavingMagics, Notebook
from .magics import LogMagics, MonarchMagics, PackageMagics
from .notify import NotifyMagics
from .output import CellOutput, Cells
from .programs import ProgramMagics
from .progress import CallProgress, ImportNotices
from .reruns import Reruns
from .session import Session
from .stopping import Stopping
from .tensors import TENSOR_REPORTER
from .unreferenced import UnreferencedMeshes
from .views import VIEWS, Views
from .views.curves import with_usage
from .views.live import ViewMagics
from .views.widgets import Widgets

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


class Extension:
    """The extension in one kernel."""

    def __init__(self, shell: "InteractiveShell") -> None:
        self._shell = shell
        self._front = Front(shell)
        self._session = Session(shell)
        self._errors = Errors(shell, self._notice_of, self._announce, self._raised, self._stopped)
        self._views = Views(shell, self._session, lambda: self._front.running)
        self._widgets = Widgets(shell, self._views)
        self._view_magics = ViewMagics(shell, self._session)
        self._debugging = DebugMagics(shell, self._session)
        self._rank_completion = RankCompletion(shell, self._session)
        self._notify = NotifyMagics(shell, self._session, self._views.announce)
        self._dap = DebugBridge(shell, started, lambda: not self._front.running, self._front.write)
        self._attached: _Attached | None = None

    def load(self) -> None:
        """Puts everything in place; the kernel becomes a controller, and its host agent is on its way."""
        self._front.install()
        self._shell.events.register("pre_execute", self._attach)
        self._shell.events.register("pre_execute", TENSOR_REPORTER.begin_cell)
        display.install(self._shell)
        self._errors.install()
        magics = (MonarchMagics, LogMagics, LeavingMagics, ProfileMagics, TimelineMagics, DiagnosisMagics, GuideMagics)
        for cls in (*magics, ProgramMagics, PackageMagics):
            self._shell.register_magics(cls(self._shell, self._session))
        self._shell.register_magics(self._debugging, self._notify)
        self._shell.register_magic_function(with_remote(self._shell), "line_cell", "debug")
        self._shell.register_magic_function(with_usage(self._shell, self._session), "line", "history")
        Completion(self._shell, self._session).install()
        self._rank_completion.install()
        self._view_magics.install(VIEWS)
        self._notify.install()
        self._views.install()
        self._widgets.install(VIEWS)
        self._dap.install()
        self._front.ending.append(self._dap.cell_ends)
        runtime = current_runtime()
        self._attach()
        prestart(runtime)

    def unload(self) -> None:
        """Removes the extension; meshes stay, and their output and failures are shown as plain text."""
        self._dap.uninstall()
        self._front.ending.remove(self._dap.cell_ends)
        self._shell.events.unregister("pre_execute", self._attach)
        self._shell.events.unregister("pre_execute", TENSOR_REPORTER.begin_cell)
        self._front.uninstall()
        display.uninstall(self._shell)
        self._errors.uninstall()
        self._rank_completion.uninstall()
        self._view_magics.uninstall()
        self._notify.uninstall()
        self._widgets.uninstall(VIEWS)
        self._views.uninstall()
        if self._attached is not None:
            logs = self._attached.runtime.part(MeshLogs)
            self._attached.leave()
            self._attached = None
            logs.present(Forwarding(logs))
            notebook_mode(_print_report)

    def _notice_of(self, failure: MeshFailure) -> FailureNotice:
        """Returns the notice for the error of a call: the failure behind it."""
        return (
            self._attached.notices.error(failure) if self._attached is not None else FailureNotice(record(failure, 0.0))
        )

    def _announce(self, notice: FailureNotice) -> None:
        """Shows the actions for a failure above the error that it caused."""
        if self._attached is not None:
            self._attached.notices.bar(notice)

    def _raised(self, error: ActorError) -> None:
        """Shows a bar above an error of a rank, with which its frames can be opened."""
        bundle = self._widgets.raised(error)
        if bundle and self._front.in_cell:
            self._front.display({**raised_bar(error), **bundle})

    def _stopped(self, future: Future[object]) -> str:
        """State of an awaited call that was interrupted."""
        return self._attached.stopping.fate(future) if self._attached is not None else ""

    def _attach(self) -> None:
        """Attaches to the current runtime: there is a new one after shutdown_context()."""
        runtime = started()
        if runtime is None or (self._attached is not None and self._attached.runtime is runtime):
            return
        self._views.attach(runtime)
        if self._attached is not None:
            self._attached.leave()
        self._attached = _Attached(
            self._shell, self._front, runtime, self._widgets, self._session, lambda: self._dap.adapter.attached
        )
        self._debugging.waiting = self._attached.prompt.waits
        self._dap.attach(runtime)


def _print_report(failure: MeshFailure) -> None:
    sys.stderr.write(f"{failure.report()}\n")


class _Attached:
    """The hold on one engine: its failures, its processes' output, and waits for them."""

    def __init__(
        self,
        shell: "InteractiveShell",
        front: Front,
        runtime: Runtime,
        widgets: Widgets,
        session: Session,
        shown_elsewhere: Callable[[], bool],
    ) -> None:
        self.runtime = runtime
        self._front = front
        self._widgets = widgets
        self._logs: MeshLogs = runtime.part(MeshLogs)
        self._cells = Cells(front, runtime)
        self._output = CellOutput(front, self._logs, self._cells)
        self._logs.present(self._output)
        self._output.start()
        self._notebook = Notebook(front, session, runtime)
        self._reruns = Reruns(shell, front, session, runtime)
        self._unreferenced = UnreferencedMeshes(front, session, runtime)
        self._progress = CallProgress(front, runtime, self._output, lambda: widgets.has_panel)
        self.prompt = CellPrompt(shell, front, runtime, widgets.debugger, shown_elsewhere)
        self._name: Callable[[str], str] = lambda file: cell_name(shell, file)
        self.stopping = Stopping(front, runtime, self._name)
        self._imports = ImportNotices(front)
        self.unretrieved_errors = UnretrievedErrors(shell, front, self._output.flush)
        self.notices = Notices(front, store_of(runtime), widgets, self._output.flush)
        notebook_mode(self.notices.show)
        runtime.part(HostNotices).present(lambda event: show_notice(front, self._output.flush, event))
        self.prompt.install()
        self.stopping.install()
        self._imports.install()
        self.unretrieved_errors.install()
        namers.append(self._name)
        waiting.join(self._progress)
        front.ending.append(self._output.settle)

    def leave(self) -> None:
        """Removes all hooks from the runtime."""
        waiting.leave(self._progress)
        if self._output.settle in self._front.ending:
            self._front.ending.remove(self._output.settle)
        self.notices.close()
        self.runtime.part(HostNotices).present(None)
        self.prompt.uninstall()
        self._reruns.close()
        self._unreferenced.close()
        self._notebook.close()
        self.stopping.uninstall()
        self._imports.uninstall()
        self.unretrieved_errors.uninstall()
        namers.remove(self._name)
        self._logs.present(None)
        self._cells.close()
