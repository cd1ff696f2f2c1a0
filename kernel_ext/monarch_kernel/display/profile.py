"""A profile as static HTML: what differs between ranks first, then a flame graph for each group of them."""

import os
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from monarch_nb.wire import counted

from ..files import cell_name
from ..views.profiles import keep
from .flame import FileName, colour, flame_graph, legend
from .html import LEFT, folded, framed, heading

if TYPE_CHECKING:
    from monarch_nb.profiling import Difference, Profile

PROFILE = "monarch_nb.profiling.result.Profile"  # named, not imported: the profiler is loaded when it is used
_MOST_GROUPS = 8  # that are drawn
_SHARE = ' style="text-align:left;white-space:nowrap"'  # a bar and its number stay on one line
_BAR = "display:inline-block;height:9px;border-radius:2px;margin-right:6px"
STYLE = """
.mnb-y .mnb-flame{font-family:var(--jp-code-font-family,ui-monospace,monospace)!important;print-color-adjust:exact}
.mnb-y .mnb-flame div:hover{outline:1px solid currentColor;outline-offset:-1px}
.mnb-y .mnb-w{margin:8px 0 2px}.mnb-y td code{background:none!important;padding:0}
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
    keys = "".join(f'<span style="margin-right:12px">{key}</span> ' for key in legend())
    return f'<div class="mnb-s" style="margin-top:4px">{keys}</div>'


def _differences(profile: "Profile", groups: Sequence[Sequence[int]], name: FileName) -> str:
    found = profile.differences
    if not found:
        return ""
    head = "".join(f"<th{_SHARE}>{escape(profile.where(group))}</th>" for group in groups)
    rows = "".join(_row(difference, name) for difference in found)
    return (
        '<div class="mnb-w"><b>What differs between ranks</b></div><table class="mnb-t">'
        f"<thead><tr><th{LEFT}>in</th>{head}</tr></thead><tbody>{rows}</tbody></table>"
    )


def _row(difference: "Difference", name: FileName) -> str:
    from monarch_nb.profiling.result import line_text

    where = line_text(difference.file, difference.line, name)
    filled = f"{_BAR};background-color:{colour('your functions', 1.0)}"
    cells = "".join(
        f'<td{_SHARE}><span style="{filled};width:{60 * share:.0f}px"></span>{share:.0%}</td>'
        for share in difference.shares
    )
    return (
        f'<tr><td{LEFT}><code>{escape(difference.names)}</code> <span class="mnb-s">{escape(where)}</span></td>'
        f"{cells}</tr>"
    )


def _group(profile: "Profile", ranks: Sequence[int], name: FileName) -> str:
    count = f"{counted(len(ranks), 'rank')}"
    return (
        f'<div class="mnb-w"><b>{escape(profile.where(ranks))}</b> <span class="mnb-s">{count}</span></div>'
        f"{flame_graph(profile.tree(ranks), ranks, name)}"
    )


class ProfileForms:
    """How profiles look in one kernel, whose cells it calls by their numbers."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._formatters = shell.display_formatter.formatters

    def install(self) -> None:
        """Profiles are shown like this from now on."""
        self._formatters["text/html"].for_type(PROFILE, self._html)
        self._formatters["text/plain"].for_type(PROFILE, lambda profile, out, _: out.text(profile.text(self._named)))

    def uninstall(self) -> None:
        """No longer."""
        for kind in ("text/html", "text/plain"):
            self._formatters[kind].pop(PROFILE, None)

    def _html(self, profile: "Profile") -> str:
        html = profile_html(profile, self._named)
        keep(profile, html)
        return html

    def _named(self, file: str) -> str:
        return cell_name(self._shell, file) or os.path.basename(file)
