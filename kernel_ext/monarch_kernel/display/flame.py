"""A flame graph as nested lists with styles of their own.

Plain HTML without a style sheet or a script: JupyterLab draws it also in a notebook that it does not trust, whose
style sheets and SVG it takes away; and where styles are taken away, too, it is an indented list.
"""

from collections.abc import Callable, Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from monarch_nb.profiling.tree import Node

FileName = Callable[[str], str]
_DEEP = 40  # rows
_LEAST = 0.003  # of the width: what is narrower is left out
_NAMED = 0.025  # of the width: what is narrower has no room for its name
_TOLD = 0.15  # what is narrower has none for its share beside it
_FRAME = "font-size:11px;line-height:17px;white-space:nowrap;font-family:monospace"
_ROW = "display:flex;gap:1px;margin:1px 0 0 0;padding:0;list-style:none"
KINDS = {  # the colour, and how opaque it is where all of the time was waiting and where all of it was computing
    "your functions": ((219, 109, 40), 0.22, 0.62),
    "libraries": ((56, 139, 253), 0.15, 0.55),
    "waits for messages": ((128, 128, 128), 0.16, 0.3),
}


def flame_graph(root: "Node", ranks: Sequence[int], name: FileName) -> str:
    """What some ranks did, by functions and what they called, with files as `name` calls them."""
    return f'<div class="mnb-flame" style="{_FRAME}">{_row(root, ranks, name, root.share(ranks), 0)}</div>'


def colour(kind: str, computed: float) -> str:
    """Translucent, so that it is right on any background: the fuller, the more of the time was computing."""
    rgb, least, most = KINDS[kind]
    return f"rgba({','.join(map(str, rgb))},{least + (most - least) * computed:.2f})"


def legend() -> Iterator[str]:
    """What the colours mean."""
    box = "display:inline-block;width:11px;height:11px;border-radius:2px;margin-right:5px;vertical-align:-1px"
    for kind in KINDS:
        yield f'<span style="{box};background-color:{colour(kind, 1.0)}"></span>{kind}'
    yield "pale: it waited, full: it computed"


def _row(node: "Node", ranks: Sequence[int], name: FileName, whole: float, row: int) -> str:
    above = node.share(ranks)
    calls = [child for child in node.children(ranks) if whole and child.share(ranks) / whole >= _LEAST]
    if not calls or row == _DEEP:
        return ""
    drawn = "".join(
        f'<li style="width:{100 * child.share(ranks) / above:.2f}%;overflow:hidden">'
        f"{_box(child, ranks, name, whole)}{_row(child, ranks, name, whole, row + 1)}</li>"
        for child in calls
    )
    return f'<ul style="{_ROW}">{drawn}</ul>'


def _box(node: "Node", ranks: Sequence[int], name: FileName, whole: float) -> str:
    from monarch_nb.profiling.result import line_text
    from monarch_nb.profiling.tree import WAITS

    place, share, computed = node.place, node.share(ranks), node.on_processor(ranks)
    kind = "waits for messages" if place == WAITS else "your functions" if place.users else "libraries"
    told = (
        place.function,
        line_text(place.file, node.line, name),
        f"calls itself, {node.deep} deep" if node.deep > 1 else "",
        f"{share:.1%} of the time",
        f"{computed:.0%} of that computing",
    )
    ink = "" if share / whole > _NAMED else ";color:transparent"
    size = "opacity:.6" if share / whole > _TOLD else "display:none"
    return (
        f'<div title="{escape(" · ".join(filter(None, told)))}" style="background-color:{colour(kind, computed)};'
        f'padding-left:4px;overflow:hidden;text-overflow:ellipsis{ink}">{escape(node.name)} '
        f'<span style="{size}">{share:.0%}</span></div>'
    )
