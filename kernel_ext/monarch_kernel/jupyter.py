"""The private names of IPython and ipykernel that are used here: all of them, where they were tried; and cells' names.

IPython 7.34 to 9.18, ipykernel 6.17 to 7.4: `make test-slow` runs the notebook tests in these kernels. Names that a
later version lacks are optional.
"""

import functools
import importlib
import linecache
import os
import re
import threading
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

Request = dict[str, Any]  # of the debug adapter protocol, and what is answered
_PYDEVD_MARKS = ("pydev_do_not_trace", "is_pydev_daemon_thread")
_FILE = re.compile(r'File "([^"]+)", line (\d+)')


def show_error(shell: Any, kind: type[BaseException], error: BaseException, lines: list[str]) -> None:
    """Shows lines as the output of a cell that has raised, and sends them with the error."""
    shell._showtraceback(kind, error, lines)


def last_lines(shell: Any) -> list[str]:
    """IPython's own text of the last error."""
    return list(getattr(shell, "_last_traceback", None) or [])


def before_awaits(kernel: Any, call: Callable[[], None]) -> Callable[[], None]:
    """Calls `call` before a cell of a kernel that awaits; the result undoes this.

    ipykernel sets a handler of SIGINT for such a cell, and afterwards, while it replies, the one that it has found.
    """
    inner = getattr(kernel, "_cancel_on_sigint", None)
    if inner is None:
        return lambda: None

    def cancel_on_sigint(cell: object) -> object:
        call()
        return inner(cell)

    kernel._cancel_on_sigint = cancel_on_sigint
    return lambda: setattr(kernel, "_cancel_on_sigint", inner)


def formatters(shell: Any) -> dict[str, Any]:
    """Returns the formatters of displayed values, by MIME type."""
    by_type: dict[str, Any] = shell.display_formatter.formatters
    return by_type


def bundle_formatter(shell: Any) -> Any:
    """Returns the formatter of values in several MIME types at once."""
    return shell.display_formatter.mimebundle_formatter


def line_magic_of(shell: Any, name: str) -> Any:
    """Returns the function of a line magic; None if there is none."""
    return shell.find_line_magic(name)


def transformed(shell: Any, cell: str) -> str:
    """Returns the Python code of a cell, which may have magics and commands."""
    return str(shell.transform_cell(cell))


def obey_subshells(comm: Any) -> None:
    """Routes messages of a comm to the subshell that the front end asks for.

    ipykernel 7.4 sends them to the shell that last sent on the comm instead: they would wait for the running cell.
    """
    if hasattr(comm, "_reply_subshell_for"):
        comm._reply_subshell_for = lambda data, default: default


def takes_input(kernel: Any) -> bool:
    """Returns whether the front end of the running cell takes questions."""
    return bool(getattr(kernel, "_allow_stdin", True))


def cell_text(filename: str) -> str | None:
    """Returns the text of a cell by its file name, as IPython 7 keeps it; None if it is not there."""
    entry = getattr(linecache, "_ipython_cache", {}).get(filename)
    return None if entry is None else "".join(entry[2])


def give_back_underscores(shell: Any) -> None:
    """Makes the result of the running cell go into `_` though code has used that name, as loops do: IPython would no
    longer set it. A function of that name, such as gettext's, stays.
    """
    for name in ("_", "__", "___"):
        used = shell.user_ns.get(name)
        if name in shell.user_ns and not callable(used):
            # IPython 7 compares it with the display hook's last value, newer versions with user_ns_hidden.
            shell.user_ns[name] = getattr(shell.displayhook, name, used)
            if name in shell.user_ns_hidden:
                shell.user_ns_hidden[name] = shell.user_ns[name]


# -- the kernel's own debugger, and requests for it --------------------------------------------------------------------


def take_debug_requests(kernel: Any, handle: Callable[[Request], Awaitable[Request | None]]) -> Callable[[], None]:
    """Routes debug requests of front ends to `handle`, on the loop of the control thread; returns a function that
    undoes this. The kernel's own answer comes from `own_debug_request`.
    """

    async def do_debug_request(message: Request) -> Request | None:
        return await handle(message)

    kernel.do_debug_request = do_debug_request  # hides the method of its class

    def undo() -> None:
        if kernel.__dict__.get("do_debug_request") is do_debug_request:
            del kernel.do_debug_request

    return undo


async def own_debug_request(kernel: Any, message: Request) -> Request | None:
    """Returns the kernel's own answer; None where it has no debugger."""
    answer: Request | None = await type(kernel).do_debug_request(kernel, message)
    return answer or None


def own_debugger(kernel: Any) -> Any:
    """Returns the kernel's own debugger; None where debugpy is not installed."""
    return getattr(kernel, "debugger", None)


def forward_own_events(kernel: Any, receive: Callable[[Request], None]) -> Callable[[], None]:
    """Passes events of the kernel's own debugger to `receive`, which may send them on; returns the undo function."""
    debugger = own_debugger(kernel)
    before = getattr(debugger, "event_callback", None)
    if before is None:
        return lambda: None
    debugger.event_callback = receive

    def undo() -> None:
        debugger.event_callback = before

    return undo


def leave_threads_running(prefix: str) -> Callable[[], None]:
    """Stops the kernel's own debugger from tracing or suspending threads with this name prefix; returns a function that
    undoes this.

    pydevd looks for these marks when a thread begins: threads that run already when it is started are marked, too.
    """

    def mark(thread: threading.Thread) -> None:
        if thread.name.startswith(prefix):
            for name in _PYDEVD_MARKS:
                setattr(thread, name, True)

    start = threading.Thread.start

    @functools.wraps(start)
    def marked(thread: threading.Thread) -> None:
        mark(thread)
        start(thread)

    threading.Thread.start = marked  # type: ignore[assignment, method-assign]
    for thread in threading.enumerate():
        mark(thread)

    def undo() -> None:
        if threading.Thread.start is marked:
            threading.Thread.start = start  # type: ignore[method-assign]

    return undo


def send_debug_event(kernel: Any, event: Request) -> None:
    """Sends an event to all front ends, from any thread."""
    kernel.session.send(kernel.iopub_socket, "debug_event", event, metadata={}, parent={}, ident=b"debug_event")


def cell_files() -> tuple[str, str, int]:
    """Prefix and suffix of the file names of cells, and the seed of the hash between."""
    compiler: Any = importlib.import_module("ipykernel.compiler")
    return compiler.get_tmp_directory() + os.sep, ".py", compiler.get_tmp_hash_seed()


def cell_file(code: str) -> str:
    """File name in the code objects of a cell."""
    compiler: Any = importlib.import_module("ipykernel.compiler")
    return str(compiler.get_file_name(code))


def keep_empty_lines(shell: Any) -> Callable[[], None]:
    """Leaves empty lines at the top of cells, so that line numbers are those in sight; returns the undo function."""
    try:
        from IPython.core.inputtransformer2 import leading_empty_lines
    except ImportError:
        return lambda: None
    transforms = shell.input_transformer_manager.cleanup_transforms
    if leading_empty_lines not in transforms:  # the kernel's own debugger has taken it away
        return lambda: None
    index = transforms.index(leading_empty_lines)
    transforms.pop(index)

    def undo() -> None:
        if leading_empty_lines not in transforms:
            transforms.insert(index, leading_empty_lines)

    return undo


def cell_name(shell: "InteractiveShell", filename: str) -> str:
    """Display name of the cell with this file name, such as "Cell In[3]"; "" if there is none."""
    form = getattr(shell.compile, "format_code_name", None)
    if form is None:
        number = _number(shell, filename)
        return f"Cell In[{number}]" if number else ""
    name = form(filename)
    return " ".join(name) if name else ""


def _number(shell: "InteractiveShell", filename: str) -> int:
    """Returns the number of the newest cell with this file's text, or 0: IPython 7 has no map of files to numbers."""
    cell = cell_text(filename)
    if cell is None:
        return 0
    text = cell.rstrip("\n")
    cells: list[str] = list(getattr(shell.history_manager, "input_hist_parsed", ()))
    return next((number for number in range(len(cells) - 1, 0, -1) if cells[number].rstrip("\n") == text), 0)


def with_cells(shell: "InteractiveShell", text: str) -> str:
    """Returns a traceback in which cells have their names."""

    def named(match: re.Match[str]) -> str:
        cell = cell_name(shell, match[1])
        return f"{cell}, line {match[2]}" if cell else match[0]

    return _FILE.sub(named, text)
