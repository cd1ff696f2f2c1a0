"""Forms of an object by MIME type, from the methods that notebooks ask objects for."""

import base64
import inspect
import io
import sys
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from monarch_nb.wire import ThreadCutOff, error_line, repr_of, type_name
from monarch_nb.wire import text_of as str_of

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
    selected.setdefault(PLAIN, text_of(value))
    return Forms(selected, {kind: about for kind, about in metadata.items() if kind in selected})


def may_be_rich(value: object) -> bool:
    """Returns whether an object may have more forms than text. Calls none of its methods."""
    kind = type(value)
    figure = getattr(sys.modules.get("matplotlib.figure"), "Figure", None)
    return any(hasattr(kind, name) for name in (_MIMEBUNDLE, *_METHODS.values())) or (
        figure is not None and issubclass(kind, figure)
    )


def text_of(value: object) -> str:
    """Returns an object as text, in IPython's form where that is loaded. Never raises errors of its methods."""
    pretty = getattr(sys.modules.get("IPython.lib.pretty"), "pretty", None)
    try:
        text = str_of(pretty(value)) if pretty is not None else repr_of(value)
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
    return form if isinstance(form, str) or kind.endswith("json") else str_of(form)


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
