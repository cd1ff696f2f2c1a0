"""Displays of a process: forms of objects by MIME type, which follow its output within bounds, as in a notebook.

`display` works for libraries, too. Nothing is imported for that: modules are changed once the user's code has imported
them. The environment is not changed, as child processes inherit it: those may run another Python.
"""

import base64
import builtins
import inspect
import io
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from monarch_nb._package import imported, when_imported
from monarch_nb.wire import ThreadCutOff, error_line, repr_of, text_of, type_name
from monarch_nb.wire.plain import LATER, NOW, Display, encode_display, size_of

if TYPE_CHECKING:
    from monarch_nb.runtime.output.own_log import OwnLog

PLAIN = "text/plain"
LONGEST = 100_000  # characters of the text
WIDGET = "application/vnd.jupyter.widget-view+json"  # refers to a model in the process that made it
_MIMEBUNDLE = "_repr_mimebundle_"
_METHODS = {
    "text/html": "_repr_html_",
    "text/markdown": "_repr_markdown_",
    "text/latex": "_repr_latex_",
    "image/svg+xml": "_repr_svg_",
    "image/png": "_repr_png_",
    "image/jpeg": "_repr_jpeg_",
    "image/gif": "_repr_gif_",
    "application/pdf": "_repr_pdf_",
    "application/json": "_repr_json_",
    "application/javascript": "_repr_javascript_",
}
_CANARY = "_ipython_canary_method_should_not_exist_"  # objects with this method pretend to have any method
MOST = 4 << 20  # bytes of one display
BRIEF = 2000  # characters of the text in logs
BURST, RATE = 16 << 20, 4 << 20  # bytes of all displays of a process: at once, and in each second after
MOST_PENDING = 64  # displays whose latest update waits
BACKEND = "module://monarch_nb.runtime.output.figures"
# Set by a kernel for itself: not chosen by the user, and useless in another process.
_OF_KERNELS = ("", "module://matplotlib_inline.backend_inline", "module://ipykernel.pylab.backend_inline")
_REPLACED = ("display", "update_display", "publish_display_data", "clear_output")


class Forms(NamedTuple):
    """Forms by MIME type, images in base64; `data` always has a text."""

    data: dict[str, object]
    metadata: dict[str, object]

    @property
    def rich(self) -> bool:
        """True if there is more than text."""
        return len(self.data) > 1


def forms_of(value: object, include: Collection[str] | None = None, exclude: Collection[str] | None = None) -> Forms:
    """Returns all forms of an object, or those of some MIME types. Errors of its methods go to standard error."""
    data: dict[str, object] = {}
    metadata: dict[str, object] = {}
    _take(data, metadata, _call_method(value, _MIMEBUNDLE, include=include, exclude=exclude))
    for kind, method in _METHODS.items():
        result = None if kind in data or kind in (exclude or ()) else _call_method(value, method)
        if result is not None:
            form, about = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
            _take(data, metadata, ({kind: form}, {kind: about} if about else {}))
    picture = None if "image/png" in data else _figure(value)
    if picture is not None:
        data["image/png"] = base64.b64encode(picture).decode("ascii")
    data.pop(WIDGET, None)
    selected = {
        kind: form
        for kind, form in data.items()
        if (include is None or kind in include) and kind not in (exclude or ())
    }
    selected.setdefault(PLAIN, plain_text(value))
    return Forms(selected, {kind: about for kind, about in metadata.items() if kind in selected})


def may_be_rich(value: object) -> bool:
    """Returns whether an object may have more forms than text. Calls none of its methods."""
    kind = type(value)
    figure = getattr(sys.modules.get("matplotlib.figure"), "Figure", None)
    return any(hasattr(kind, name) for name in (_MIMEBUNDLE, *_METHODS.values())) or (
        figure is not None and issubclass(kind, figure)
    )


def plain_text(value: object) -> str:
    """Returns an object as text, in IPython's form where that is loaded. Never raises errors of its methods."""
    pretty = getattr(sys.modules.get("IPython.lib.pretty"), "pretty", None)
    try:
        text = text_of(pretty(value)) if pretty is not None else repr_of(value)
    except ThreadCutOff:
        raise
    except BaseException:
        text = repr_of(value)  # names the error
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def _take(data: dict[str, object], metadata: dict[str, object], result: object) -> None:
    """Adds the result of an object's method: forms, or a pair of forms and their metadata."""
    forms, about = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    data.update(sendable(forms if isinstance(forms, Mapping) else {}))
    metadata.update(about if isinstance(about, Mapping) else {})


def sendable(forms: Mapping[Any, object]) -> dict[str, object]:
    """Returns forms as notebooks take them: text, bytes in base64, and data where the MIME type is that of JSON."""
    return {str(kind): _form(str(kind), form) for kind, form in forms.items() if form is not None}


def _form(kind: str, form: object) -> object:
    if isinstance(form, bytes):
        return base64.b64encode(form).decode("ascii")
    return form if isinstance(form, str) or kind.endswith("json") else text_of(form)


def _call_method(value: object, name: str, **arguments: object) -> object:
    """Returns the result of an object's method; None without such a method, or if it raises."""
    try:
        method = None if inspect.isclass(value) or hasattr(value, _CANARY) else getattr(value, name, None)
    except ThreadCutOff:
        raise
    except BaseException:  # an object whose attributes cannot be read
        return None
    try:
        return method(**arguments) if callable(method) else None
    except (NotImplementedError, ThreadCutOff, KeyboardInterrupt) as error:
        if not isinstance(error, NotImplementedError):
            raise
        return None
    except BaseException as error:
        sys.stderr.write(f"{type_name(value)}.{name} raised {error_line(error)}\n")
        return None


def _figure(value: object) -> bytes | None:
    """Returns a figure of matplotlib as PNG; None for anything else."""
    figure = getattr(sys.modules.get("matplotlib.figure"), "Figure", None)
    if figure is None or not issubclass(type(value), figure):  # without asking the object, which may be anything
        return None
    file = io.BytesIO()
    drawn: Any = value
    try:
        drawn.canvas.print_figure(file, format="png", dpi=drawn.dpi, facecolor=drawn.get_facecolor(),
                                  edgecolor=drawn.get_edgecolor(), bbox_inches="tight")  # fmt: skip
    except Exception as error:
        sys.stderr.write(f"the figure could not be drawn: {error_line(error)}\n")
        return None
    return file.getvalue()


class Displays:
    """The displays of one process. Methods from any thread; without a journal they print text."""

    def __init__(self) -> None:
        self._journal: OwnLog | None = None
        self._lock = threading.RLock()
        self._budget = float(BURST)
        self._refilled_at = time.monotonic()
        self._pending: dict[str, tuple[str, Display]] = {}  # by id, with the call
        os.register_at_fork(after_in_child=self._in_child)

    def write_to(self, journal: "OwnLog") -> None:
        """Sends displays to a journal."""
        self._journal = journal

    @property
    def has_viewer(self) -> bool:
        """True if displays go to a viewer that renders them; else they are printed as text."""
        return self._journal is not None

    def publish(
        self, data: dict[str, object], metadata: dict[str, object], id: str = "", *, update: bool = False
    ) -> None:
        """Shows data in its forms; a display with an id can be replaced, with `update` it replaces one."""
        data = {kind: form for kind, form in data.items() if kind != WIDGET}
        text = text_of(data.get(PLAIN) or f"<{', '.join(data)}>")
        if self._journal is None or (set(data) <= {PLAIN} and not id):
            if not update:
                sys.stdout.write(f"{text}\n")
            return
        text = text if len(text) <= BRIEF else f"{text[: BRIEF - 1]}…"
        data = {**data, PLAIN: text_of(data.get(PLAIN, text))}
        forms = {kind: form for kind, form in data.items() if size_of(form) <= MOST}
        if sum(map(size_of, forms.values())) > MOST:
            forms = {PLAIN: text}
        if len(forms) < len(data):
            size = sum(map(size_of, data.values())) / 2**20
            text = f"{text} ({size:.1f} MB are not shown: a display may have {MOST >> 20} MB)"
            forms[PLAIN] = text
            if len(forms) == 1 and not id:
                sys.stdout.write(f"{text}\n")
                return
        self._send(Display(text, forms, {kind: about for kind, about in metadata.items() if kind in forms}, id, update))

    def clear(self, wait: bool = False) -> None:
        """Clears the displays of this call; with `wait`, when the next one arrives."""
        if self._journal is not None:
            self._send(Display(clear=LATER if wait else NOW))

    def relay(self, display: Display, call: str, source: str) -> bool:
        """Shows a display of a process that was started from here. False if only text can be shown."""
        if self._journal is None or display.clear:
            return self._journal is not None
        display_id = f"{source} {display.id}" if display.id else ""
        self._send(Display(display.text, display.data, display.metadata, display_id, display.update), call)
        return True

    def flush(self) -> None:
        """Writes the latest of updates that were held back."""
        if self._pending:
            with self._lock:
                pending, self._pending = self._pending, {}
                for call, display in pending.values():
                    self._write(display, call)

    def _in_child(self) -> None:
        """Resets a process forked by the user's code, which displays text: another thread may have held the lock."""
        self._lock = threading.RLock()
        self._pending = {}

    def _send(self, display: Display, call: str | None = None) -> None:
        assert self._journal is not None
        with self._lock:
            now = time.monotonic()
            self._budget = min(BURST, self._budget + (now - self._refilled_at) * RATE)
            self._refilled_at = now
            size = display.size
            if size > self._budget:
                if display.update:
                    if display.id in self._pending or len(self._pending) < MOST_PENDING:
                        self._pending[display.id] = self._journal.tag()[0] if call is None else call, display
                    return
                display.text += f" (not shown: more than {BURST >> 20} MB were displayed within a few seconds)"
                display.data, size = {PLAIN: display.text}, 0
            self._budget -= size
            self._pending.pop(display.id, None)
            self._write(display, call)

    def _write(self, display: Display, call: str | None) -> None:
        try:
            line = encode_display(display)
        except (TypeError, ValueError, RecursionError) as error:
            sys.stderr.write(f"a display could not be sent ({error_line(error)}); as text it is:\n")
            line = b""
        if (not line or self._journal is None or not self._journal.display(line, call)) and display.text:
            sys.stdout.write(f"{display.text}\n")


class ReplaceableDisplay:
    """A display that can be replaced."""

    def __init__(self, display_id: str) -> None:
        self.display_id = display_id

    def __repr__(self) -> str:
        return f"<display {self.display_id}>"

    def display(self, value: object, **options: Any) -> None:
        """Shows a value again under the same id."""
        display(value, display_id=self.display_id, **options)

    def update(self, value: object, **options: object) -> None:
        """Replaces the display by another object."""
        update_display(value, display_id=self.display_id, **options)


displays = Displays()  # of this process


def display(
    *values: Any,
    include: Collection[str] | None = None,
    exclude: Collection[str] | None = None,
    metadata: dict[str, object] | None = None,
    transient: dict[str, object] | None = None,
    display_id: str | bool | None = None,
    raw: bool = False,
    clear: bool = False,
    update: bool = False,
    **_: object,
) -> ReplaceableDisplay | None:
    """Shows objects in the cell that the running call belongs to, as `IPython.display.display` does in a kernel."""
    if display_id is True:
        display_id = secrets.token_hex(16)
    name = str(display_id or (transient or {}).get("display_id") or "")
    if update and not name:
        raise TypeError("display_id is needed to update a display: display(value, display_id=…) gives one")
    if clear:
        clear_output(wait=True)
    for value in values:
        if raw:
            publish_display_data(value, metadata, transient={"display_id": name}, update=update)
            continue
        own = None if isinstance(value, type) else getattr(type(value), "_ipython_display_", None)
        if own is not None:
            try:
                own(value)
                continue
            except NotImplementedError:
                pass
        forms = forms_of(value, include, exclude)
        displays.publish(forms.data, {**forms.metadata, **(metadata or {})}, name, update=update)
    return ReplaceableDisplay(name) if name and display_id else None


def update_display(value: object, *, display_id: str, **options: Any) -> None:
    """Replaces the display with that id by an object."""
    display(value, display_id=display_id, **{**options, "update": True})


def publish_display_data(
    data: dict[str, object],
    metadata: dict[str, object] | None = None,
    *_: object,
    transient: dict[str, object] | None = None,
    update: bool = False,
    **__: object,
) -> None:
    """Shows data that is given in its forms, by MIME type."""
    forms = sendable(data)
    forms.setdefault(PLAIN, plain_text(data) if not forms else "<" + ", ".join(forms) + ">")
    displays.publish(forms, dict(metadata or {}), str((transient or {}).get("display_id") or ""), update=update)


def clear_output(wait: bool = False) -> None:
    """Removes the displays of this call here so far; with `wait`, when the next display arrives."""
    displays.clear(wait)


def install_display() -> None:
    """Installs the hooks."""
    vars(builtins)["display"] = display
    changes: dict[str, Callable[[ModuleType], None]] = {
        "IPython.core.display": _display_here,  # where IPython 7 has them
        "IPython.core.display_functions": _display_here,
        "IPython.display": _display_here,
        "tqdm.notebook": _bars_as_text,
    }
    if os.environ.get("MPLBACKEND", "") in _OF_KERNELS:
        os.environ.pop("MPLBACKEND", None)
        changes["matplotlib"] = _draw_here
    if "PLOTLY_RENDERER" not in os.environ:
        changes["plotly.io._renderers"] = _draw_as_data
    for name, change in changes.items():
        when_imported(name, partial(_change, name, change))


def _change(name: str, change: Callable[[ModuleType], None], module: ModuleType) -> None:
    try:
        change(module)
    except Exception as error:  # another version of the library
        sys.stderr.write(f"{name} does not display in notebooks from here: {error_line(error)}\n")


def open_figures() -> list[int]:
    """Returns the numbers of the open figures of pyplot that `plt.show()` would display."""
    figures = imported("monarch_nb.runtime.output.figures")
    return list(figures.numbers()) if figures is not None else []


def show_figures(before: Sequence[int], value: object = None) -> None:
    """Displays and closes the figures that a cell has opened; a figure that is the cell's value is closed only."""
    figures = imported("monarch_nb.runtime.output.figures")
    if figures is not None and _backend() == BACKEND:
        figures.show_each([number for number in figures.numbers() if number not in before], value)


def _backend() -> str:
    matplotlib = imported("matplotlib")
    return str(dict.__getitem__(matplotlib.rcParams, "backend")) if matplotlib is not None else ""


def _draw_here(matplotlib: ModuleType) -> None:
    matplotlib.rcParams["backend"] = BACKEND


def _draw_as_data(module: ModuleType) -> None:
    """Makes Plotly display as in a kernel; outside of one it opens a browser."""
    module.renderers.default = "plotly_mimetype+notebook_connected"


def _display_here(module: ModuleType) -> None:
    for name in _REPLACED:
        if hasattr(module, name):
            setattr(module, name, globals()[name])


def _bars_as_text(module: ModuleType) -> None:
    """Replaces progress bars of widgets, which need a kernel, by lines that overwrite themselves."""
    plain = sys.modules.get("tqdm.std")
    if plain is None:
        return
    for name in ("tqdm", "tqdm_notebook"):
        setattr(module, name, plain.tqdm)
    for name in ("trange", "tnrange"):
        setattr(module, name, plain.trange)
