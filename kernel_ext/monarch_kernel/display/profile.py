"""A profile as static HTML: what differs between ranks first, then a flame graph for each group of them.

Plain SVG without a script: it stays in a saved notebook, and pointing at a function tells more.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from ..files import cell_name
from .html import folded, framed, heading

if TYPE_CHECKING:
    from monarch_nb.profiling import Difference, Profile
    from monarch_nb.profiling.tree import Node

    Box = tuple[int, float, float, Node, float, float]

FileName = Callable[[str], str]
PROFILE = "monarch_nb.profiling.result.Profile"  # named, not imported: the profiler is loaded when it is used
_HIGH = 18  # pixels of a row
_DEEP = 40  # rows
_LEAST = 0.003  # of the width: what is narrower is left out
_MOST_GROUPS = 8  # that are drawn
_LEGEND = (("u", "your functions"), ("l", "libraries"), ("i", "waits for messages"))
STYLE = """
.mnb-y svg{display:block;max-width:100%}
.mnb-y svg text{font:11px var(--jp-code-font-family,ui-monospace,monospace);fill:currentColor;pointer-events:none}
.mnb-y rect{stroke:var(--jp-layout-color1,rgba(128,128,128,.35));stroke-width:1}
.mnb-y .u{fill:rgba(219,109,40,calc(.22 + .4*var(--c,0)))}.mnb-y .l{fill:rgba(56,139,253,calc(.15 + .4*var(--c,0)))}
.mnb-y .i{fill:rgba(128,128,128,.16)}.mnb-y g:hover>rect,.mnb-y svg:hover>rect{stroke:currentColor}
.mnb-y .mnb-bar{display:inline-block;height:9px;border-radius:2px;margin-right:6px;background:rgba(219,109,40,.7)}
.mnb-y .mnb-k{display:inline-block;width:11px;height:11px;border-radius:2px;margin:0 5px 0 12px;vertical-align:-1px}
.mnb-y .mnb-k.u{background:rgba(219,109,40,.62)}.mnb-y .mnb-k.l{background:rgba(56,139,253,.55)}
.mnb-y .mnb-k.i{background:rgba(128,128,128,.3)}.mnb-y .mnb-w{margin:8px 0 2px}
.mnb-y .mnb-k:first-child{margin-left:0}.mnb-y td code{background:none;padding:0}
.mnb-y .mnb-t th,.mnb-y .mnb-t td+td{white-space:nowrap}
""".replace("\n", "")


def profile_html(profile: "Profile", name: FileName) -> str:
    """The static form, with files as `name` calls them."""
    groups = profile.groups
    drawn = [_group(profile, group, name) for group in groups[:_MOST_GROUPS]]
    if len(groups) > _MOST_GROUPS:
        drawn.append(f'<div class="mnb-s">{len(groups) - _MOST_GROUPS} more groups are in the text below</div>')
    notes = "".join(f'<div class="mnb-n">! {escape(note)}</div>' for note in profile.told())
    return framed(
        f"<style>{STYLE}</style>",
        heading(f"Profile of {profile.name}", *profile.heading()),
        notes,
        _differences(profile, groups, name),
        *drawn,
        _legend() if groups else '<div class="mnb-s">nothing was seen: no rank was looked at while the cell ran</div>',
        folded("as text", profile.text(name)),
        kind="mnb-y",
    )


def _legend() -> str:
    keys = "".join(f'<span class="mnb-k {kind}"></span>{what}' for kind, what in _LEGEND)
    return f'<div class="mnb-s">{keys}<span style="margin-left:12px">pale: it waited, full: it computed</span></div>'


def _differences(profile: "Profile", groups: Sequence[Sequence[int]], name: FileName) -> str:
    found = profile.differences
    if not found:
        return ""
    head = "".join(f"<th>{escape(profile.where(group))}</th>" for group in groups)
    rows = "".join(_row(difference, name) for difference in found)
    return (
        '<div class="mnb-w"><b>What differs between ranks</b></div><table class="mnb-t"><thead><tr><th>in</th>'
        f"{head}</tr></thead><tbody>{rows}</tbody></table>"
    )


def _row(difference: "Difference", name: FileName) -> str:
    from monarch_nb.profiling.result import line_text

    where = line_text(difference.file, difference.line, name)
    cells = "".join(
        f'<td><span class="mnb-bar" style="width:{60 * share:.0f}px"></span>{share:.0%}</td>'
        for share in difference.shares
    )
    return (
        f'<tr><td><code>{escape(difference.names)}</code> <span class="mnb-s">{escape(where)}</span></td>{cells}</tr>'
    )


def _group(profile: "Profile", ranks: Sequence[int], name: FileName) -> str:
    boxes = list(_boxes(profile.tree(ranks), ranks))
    count = f"{len(ranks)} rank{'' if len(ranks) == 1 else 's'}"
    rows = 1 + max((row for row, *_ in boxes), default=0)
    label = f"flame graph of {profile.where(ranks)}"
    drawn = "".join(_box(name, *box) for box in boxes)
    return (
        f'<div class="mnb-w"><b>{escape(profile.where(ranks))}</b> <span class="mnb-s">{count}</span></div>'
        f'<svg xmlns="http://www.w3.org/2000/svg" width="100%" height="{rows * _HIGH}" role="img" '
        f'aria-label="{escape(label)}">{drawn}</svg>'
    )


def _boxes(root: "Node", ranks: Sequence[int]) -> "Iterator[Box]":
    """Row, left and width (of 1), the function, its share of the time, and how much of that it computed."""
    whole = root.share(ranks)

    def below(node: "Node", row: int, left: float) -> "Iterator[Box]":
        for child in node.children(ranks):
            share = child.share(ranks)
            width = share / whole if whole else 0.0
            if width < _LEAST:
                continue
            yield row, left, width, child, share, child.on_processor(ranks)
            if row + 1 < _DEEP:
                yield from below(child, row + 1, left)
            left += width

    return below(root, 0, 0.0)


def _box(name: FileName, row: int, left: float, width: float, node: "Node", share: float, computed: float) -> str:
    from monarch_nb.profiling.result import line_text
    from monarch_nb.profiling.tree import WAITS

    place = node.place
    kind = "i" if place == WAITS else "u" if place.users else "l"
    where = line_text(place.file, node.line, name)
    told = " · ".join(
        part
        for part in (place.function, where, f"{share:.1%} of the time", f"{computed:.0%} of that computing")
        if part
    )
    text = f'<text x="4" y="13">{escape(place.function)}</text>' if width > 0.02 else ""
    # An SVG inside an SVG cuts off the text that does not fit, at any width of the page.
    return (
        f'<svg x="{100 * left:.3f}%" y="{row * _HIGH}" width="{100 * width:.3f}%" height="{_HIGH}">'
        f'<rect class="{kind}" style="--c:{computed:.2f}" width="100%" height="{_HIGH}"/>{text}'
        f"<title>{escape(told)}</title></svg>"
    )


class ProfileForms:
    """How profiles look in one kernel, whose cells it calls by their numbers."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._formatters = shell.display_formatter.formatters

    def install(self) -> None:
        """Profiles are shown like this from now on."""
        self._formatters["text/html"].for_type(PROFILE, lambda profile: profile_html(profile, self._named))
        self._formatters["text/plain"].for_type(PROFILE, lambda profile, out, _: out.text(profile.text(self._named)))

    def uninstall(self) -> None:
        """No longer."""
        for kind in ("text/html", "text/plain"):
            self._formatters[kind].pop(PROFILE, None)

    def _named(self, file: str) -> str:
        return cell_name(self._shell, file) or os.path.basename(file)
