"""A profile as static HTML: what differs between ranks first, then a flame graph for each group of them."""

import os
from collections.abc import Callable, Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING

from monarch_nb.wire import counted

from ..jupyter import cell_name, formatters
from ..views.profiles import keep
from .html import LEFT, folded, framed, heading

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from monarch_nb.profiling import Difference, Profile
    from monarch_nb.profiling.groups import CallNode

PROFILE = "monarch_nb.profiling.result.Profile"  # named, not imported: the profiler is loaded when it is used
_MOST_GROUPS = 8  # that are drawn
_SHARE = ' style="text-align:left;white-space:nowrap"'  # a bar and its number stay on one line
_BAR = "display:inline-block;height:9px;border-radius:2px;margin-right:6px"
STYLE = """
.mnb-y .mnb-flame{font-family:var(--jp-code-font-family,ui-monospace,monospace)!important;print-color-adjust:exact}
.mnb-y .mnb-flame div:hover{outline:1px solid currentColor;outline-offset:-1px}
.mnb-y .mnb-w{margin:8px 0 2px}.mnb-y td code{background:none!important;padding:0}
""".replace("\n", "")
FileName = Callable[[str], str]
_DEEP = 40  # rows
_LEAST = 0.003  # of the width: what is narrower is left out
_NAMED = 0.025  # of the width: what is narrower has no room for its name
_SHARED = 0.15  # of the width: what is narrower has no room for its share beside the name
_FRAME = "font-size:11px;line-height:17px;white-space:nowrap;font-family:monospace"
_ROW = "display:flex;gap:1px;margin:1px 0 0 0;padding:0;list-style:none"
KINDS = {  # the colour, and how opaque it is where all of the time was waiting and where all of it was computing
    "your functions": ((219, 109, 40), 0.22, 0.62),
    "libraries": ((56, 139, 253), 0.15, 0.55),
    "waits for messages": ((128, 128, 128), 0.16, 0.3),
}


def profile_html(profile: "Profile", name: FileName) -> str:
    """Returns the static form, with files as `name` calls them."""
    groups = profile.groups
    drawn = [_group(profile, group, name) for group in groups[:_MOST_GROUPS]]
    if len(groups) > _MOST_GROUPS:
        drawn.append(f'<div class="mnb-s">{len(groups) - _MOST_GROUPS} more groups are in the text below</div>')
    notes = "".join(f'<div class="mnb-n">! {escape(note)}</div>' for note in profile.warnings())
    return framed(
        f"<style>{STYLE}</style>",
        heading(f"Profile of {profile.name}", *profile.heading()),
        notes,
        _differences(profile, groups, name),
        *drawn,
        _legend() if groups else '<div class="mnb-s">no samples: no rank was sampled while the cell ran</div>',
        folded("as text", profile.text(name)),
        kind="mnb-y",
    )


def _legend() -> str:
    keys = "".join(f'<span style="margin-right:12px">{key}</span> ' for key in flame_legend())
    return f'<div class="mnb-s" style="margin-top:4px">{keys}</div>'


def _differences(profile: "Profile", groups: Sequence[Sequence[int]], name: FileName) -> str:
    differences = profile.differences
    if not differences:
        return ""
    head = "".join(f"<th{_SHARE}>{escape(profile.where(group))}</th>" for group in groups)
    rows = "".join(_row(difference, name) for difference in differences)
    return (
        '<div class="mnb-w"><b>What differs between ranks</b></div><table class="mnb-t">'
        f"<thead><tr><th{LEFT}>in</th>{head}</tr></thead><tbody>{rows}</tbody></table>"
    )


def _row(difference: "Difference", name: FileName) -> str:
    from monarch_nb.profiling.result import line_text

    location = line_text(difference.file, difference.line, name)
    filled = f"{_BAR};background-color:{_colour('your functions', 1.0)}"
    cells = "".join(
        f'<td{_SHARE}><span style="{filled};width:{60 * share:.0f}px"></span>{share:.0%}</td>'
        for share in difference.shares
    )
    return (
        f'<tr><td{LEFT}><code>{escape(difference.names)}</code> <span class="mnb-s">{escape(location)}</span></td>'
        f"{cells}</tr>"
    )


def _group(profile: "Profile", ranks: Sequence[int], name: FileName) -> str:
    count = f"{counted(len(ranks), 'rank')}"
    return (
        f'<div class="mnb-w"><b>{escape(profile.where(ranks))}</b> <span class="mnb-s">{count}</span></div>'
        f"{flame_graph(profile.tree(ranks), ranks, name)}"
    )


class ProfileForms:
    """Displays of profiles in one kernel, with its cells' numbers as file names."""

    def __init__(self, shell: "InteractiveShell") -> None:
        self._shell = shell
        self._formatters = formatters(shell)

    def install(self) -> None:
        """Profiles are shown like this from now on."""
        self._formatters["text/html"].for_type(PROFILE, self._html)
        self._formatters["text/plain"].for_type(PROFILE, lambda profile, out, _: out.text(profile.text(self._named)))

    def uninstall(self) -> None:
        """Removes the displays."""
        for kind in ("text/html", "text/plain"):
            self._formatters[kind].pop(PROFILE, None)

    def _html(self, profile: "Profile") -> str:
        html = profile_html(profile, self._named)
        keep(profile, html)
        return html

    def _named(self, file: str) -> str:
        return cell_name(self._shell, file) or os.path.basename(file)


def flame_graph(root: "CallNode", ranks: Sequence[int], name: FileName) -> str:
    """Returns a flame graph of some ranks, with display names of files from `name`."""
    return f'<div class="mnb-flame" style="{_FRAME}">{_flame_row(root, ranks, name, root.share(ranks), 0)}</div>'


def _colour(kind: str, computed: float) -> str:
    """Translucent, so that it is right on any background: the fuller, the more of the time was computing."""
    rgb, least, most = KINDS[kind]
    return f"rgba({','.join(map(str, rgb))},{least + (most - least) * computed:.2f})"


def flame_legend() -> Iterator[str]:
    """Legend of the colours."""
    box = "display:inline-block;width:11px;height:11px;border-radius:2px;margin-right:5px;vertical-align:-1px"
    for kind in KINDS:
        yield f'<span style="{box};background-color:{_colour(kind, 1.0)}"></span>{kind}'
    yield "pale: it waited, full: it computed"


def _flame_row(node: "CallNode", ranks: Sequence[int], name: FileName, total: float, row: int) -> str:
    above = node.share(ranks)
    calls = [child for child in node.children(ranks) if total and child.share(ranks) / total >= _LEAST]
    if not calls or row == _DEEP:
        return ""
    drawn = "".join(
        f'<li style="width:{100 * child.share(ranks) / above:.2f}%;overflow:hidden">'
        f"{_box(child, ranks, name, total)}{_flame_row(child, ranks, name, total, row + 1)}</li>"
        for child in calls
    )
    return f'<ul style="{_ROW}">{drawn}</ul>'


def _box(node: "CallNode", ranks: Sequence[int], name: FileName, total: float) -> str:
    from monarch_nb.profiling.groups import WAITS
    from monarch_nb.profiling.result import line_text

    location, share, computed = node.place, node.share(ranks), node.on_processor(ranks)
    kind = "waits for messages" if location == WAITS else "your functions" if location.users else "libraries"
    facts = (
        location.function,
        line_text(location.file, node.line, name),
        f"calls itself, {node.deep} deep" if node.deep > 1 else "",
        f"{share:.1%} of the time",
        f"{computed:.0%} of that computing",
    )
    ink = "" if share / total > _NAMED else ";color:transparent"
    size = "opacity:.6" if share / total > _SHARED else "display:none"
    return (
        f'<div title="{escape(" · ".join(filter(None, facts)))}" style="background-color:{_colour(kind, computed)};'
        f'padding-left:4px;overflow:hidden;text-overflow:ellipsis{ink}">{escape(node.name)} '
        f'<span style="{size}">{share:.0%}</span></div>'
    )
