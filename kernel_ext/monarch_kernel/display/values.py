"""Value meshes as compact tables, or their forms side by side where they are pictures and the like; and futures."""

import base64
import sys
from collections.abc import Mapping, Sequence
from html import escape
from importlib import import_module
from typing import Any

from monarch_nb.mesh.value import grouped, nothing_in, places_in
from monarch_nb.runtime.output.displays import Forms, forms_of, may_be_rich
from monarch_nb.wire import counted, error_line

from .html import framed, heading, table

# The user's HTML keeps the front end's own style: nothing of ours but the frame around it.
_STYLE = """
.mnb-row{display:flex;flex-wrap:wrap;gap:8px 24px;margin:2px 0 4px;align-items:start;max-width:100%}
.mnb-row.mnb-images{display:grid;gap:8px 16px;justify-items:start}
.mnb-row>figure{margin:0;max-width:100%;min-width:0;overflow-x:auto}
.mnb-row>figure>figcaption{font-family:var(--jp-code-font-family,ui-monospace,monospace);font-size:12px;opacity:.75;
margin:0 0 2px;color:var(--jp-ui-font-color1,currentColor)}
.mnb-row>figure>img{max-width:100%;height:auto;display:block}
.mnb-row>figure>pre{margin:0;white-space:pre-wrap;overflow-wrap:anywhere}
""".replace("\n", "")
_IMAGES = ("image/png", "image/jpeg", "image/gif")
_SVG = "image/svg+xml"
_PLAIN = "text/plain"
_HTML = "text/html"
ROWS = 20  # that are shown at once; those beyond can be unfolded,
UNFOLDED = 1000  # up to so many
RICH = 16  # different values that are shown side by side at once; those beyond can be unfolded
RICH_LOOKED_AT = 64  # values
RICH_BYTES = 8 << 20


def value_mesh_html(mesh: Any) -> str:
    """Returns a row for each different value."""
    count = len(mesh)
    dims = " ".join(f"{label}={size}" for label, size in mesh.extent.items())
    if count and nothing_in(count, mesh.get):
        return framed(heading("ValueMesh", dims, "None on its rank" if count == 1 else f"None on all {count} ranks"))
    head = heading("ValueMesh", dims, f"{counted(count, 'value')}")
    if _has_rich(mesh):
        return _rich_html(mesh, head)
    groups, unseen = grouped(count, mesh.get)
    rows = [(places_in(mesh, ranks) or "value", text) for ranks, text in groups[:UNFOLDED]]
    hidden = sum(len(ranks) for ranks, _ in groups[UNFOLDED:]) + unseen
    if hidden:
        rows.append(("…", f"{hidden} more; see .items() or .get(rank)"))
    parts = [head, table(("where", "value"), rows[:ROWS], mono=(1,))]
    if rows[ROWS:]:
        rest = table(("where", "value"), rows[ROWS:], mono=(1,))
        parts.append(f"<details><summary>{counted(len(rows) - ROWS, 'more row')}</summary>{rest}</details>")
    return framed(*parts)


def _has_rich(mesh: Any) -> bool:
    return any(may_be_rich(_value(mesh, rank)) for rank in range(min(len(mesh), RICH_LOOKED_AT)))


def _value(mesh: Any, rank: int) -> Any:
    try:
        return mesh.get(rank)
    except Exception as error:  # a class that is missing here must not hide the other values
        return f"<cannot be decoded: {error_line(error)}>"


def _rich_html(mesh: Any, head: str) -> str:
    """Equal values once, with their places."""
    groups: dict[str, tuple[Forms, list[int]]] = {}
    size = 0
    hidden = max(0, len(mesh) - RICH_LOOKED_AT)
    for rank in range(len(mesh) - hidden):
        forms = _forms(_value(mesh, rank))
        rich = {kind: form for kind, form in forms.data.items() if kind != "text/plain"} or forms.data
        key = repr(rich)
        if key not in groups and size + len(key) > RICH_BYTES:
            hidden += 1
            continue
        size += len(key) if key not in groups else 0
        groups.setdefault(key, (forms, []))[1].append(rank)
    named = [(places_in(mesh, ranks) or "value", forms) for forms, ranks in groups.values()]
    parts = [(label, part_of(*forms, label)) for label, forms in named]
    more = []
    if rest := parts[RICH:]:
        more.append(f"<details><summary>{counted(len(rest), 'more value')}</summary>{side_by_side(rest)}</details>")
    if hidden:
        more.append(f'<div class="mnb-s">{hidden} more; see .items() or .get(rank)</div>')
    return framed(head) + side_by_side(parts[:RICH]) + (framed(*more) if more else "")


def _forms(value: object) -> Forms:
    if not may_be_rich(value):
        return Forms({"text/plain": grouped(1, lambda _: value)[0][0][1]}, {})
    forms = forms_of(value)
    if "matplotlib.pyplot" in sys.modules:  # the copy of a figure that is open on its rank opens here, too
        import_module("monarch_nb.runtime.output.figures").close(value)  # it would be shown again
    if can_stand_beside(forms.data):
        return forms
    return Forms({"text/plain": forms.data["text/plain"]}, {})


def future_html(future: object) -> str:
    """Returns a future; looking at it waits for nothing and decodes nothing."""
    text = repr(future).strip("<>").removeprefix("Future ")
    state, _, rest = text.partition(": ")
    hint = "wait for it with .get(), or with await" if state == "pending" else ""
    return framed(heading("Future", state, rest, hint))


def can_stand_beside(data: Mapping[str, object]) -> bool:
    """Returns whether these forms can be embedded in HTML: images, and HTML without scripts."""
    if any(kind.startswith("application/") and kind != "application/pdf" for kind in data):
        return False
    html = data.get(_HTML)
    if html is not None:
        return "<script" not in str(html).lower()
    return any(kind in data for kind in (_SVG, *_IMAGES)) or set(data) <= {_PLAIN}


def part_of(data: Mapping[str, object], metadata: Mapping[str, object], ranks: str) -> str:
    """Returns the richest of these forms as HTML, for these ranks."""
    if _HTML in data:
        return _text(data[_HTML])
    if _SVG in data:
        return _image(_SVG, base64.b64encode(_text(data[_SVG]).encode()).decode("ascii"), metadata, ranks)
    for kind in _IMAGES:
        if kind in data:
            return _image(kind, "".join(_text(data[kind]).split()), metadata, ranks)
    return f"<pre>{escape(_text(data.get(_PLAIN, '')))}</pre>"


def side_by_side(parts: Sequence[tuple[str, str]], *, indented: bool = False) -> str:
    """Captions, and HTML below each; images in one or two columns where there are few, in at most four.

    `indented` as text among which it stands.
    """
    columns = next(count for most, count in ((1, 1), (4, 2), (9, 3), (len(parts), 4)) if len(parts) <= most)
    least = f"min(100%, max(240px, calc(100% / {columns} - 16px)))"
    figures = "".join(f"<figure><figcaption>{escape(caption)}</figcaption>{part}</figure>" for caption, part in parts)
    images = any(part.startswith("<img") for _, part in parts)
    style = f"grid-template-columns:repeat(auto-fill,minmax({least},1fr));" if images else ""
    style += "padding-left:var(--jp-code-padding,0)" if indented else ""
    return (
        f'<style>{_STYLE}</style><div class="mnb-row{" mnb-images" if images else ""}" style="{style}">{figures}</div>'
    )


def _image(kind: str, text: str, metadata: Mapping[str, object], ranks: str) -> str:
    about = metadata.get(kind)
    sizes = about if isinstance(about, dict) else {}
    attributes = "".join(
        f' {name}="{int(sizes[name])}"' for name in ("width", "height") if isinstance(sizes.get(name), int | float)
    )
    return f'<img src="data:{kind};base64,{escape(text)}" alt="figure of {escape(ranks)}"{attributes}>'


def _text(form: object) -> str:
    return "".join(map(str, form)) if isinstance(form, list | tuple) else str(form)
