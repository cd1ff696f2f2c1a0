"""%monarch: first commands, running meshes, and the doctor, as text and as tables."""

from html import escape
from typing import TYPE_CHECKING

from IPython.core.error import UsageError
from IPython.core.magic import line_magic, magics_class

from monarch_nb._package import __version__, page

from .display.html import LEFT, framed, swatch, table
from .display.meshes import overview_html
from .namespace import Overview
from .session import SessionMagics

if TYPE_CHECKING:
    from monarch_nb.doctor import Check

    from .doctor import Checkup

# Commands, and their effects.
FIRST = (
    ("%mesh workers gpus=4", "start four processes on this machine; the variable workers holds them"),
    ("%%on workers", "as the first line of a cell: run the rest of the cell on each process"),
    (
        "%%actor trainers on workers",
        "as the first line of a cell that defines a class: make one object in each process",
    ),
    ("trainers.step.call().get()", "call an endpoint of all of them, and wait for the results"),
)
NEXT = (
    ("%meshes", "list the meshes: their shape, how their ranks are, and which variables hold them"),
    ("%logs workers", "show what the processes have printed"),
    ("%heal workers", "start again what has died"),
    ("%stop workers", "end the processes"),
    ("%mesh?", "show the help of a magic"),
    ("%monarch doctor", "check this kernel and all hosts, and say what to do"),
)
Row = tuple[str, str]
_LOOKS = {"ok": "idle", "warning": "healing", "error": "failed"}  # like ranks in these states


class Guide:
    """Content of %monarch as text; the HTML form is registered with the other displays."""

    def __init__(self, meshes: Overview, word: str = "") -> None:
        """`word` is how a line names one of these meshes."""
        self.meshes = meshes
        self._next_steps = tuple((command.replace("workers", word or "workers"), text) for command, text in NEXT)

    @property
    def steps(self) -> list[tuple[str, tuple[Row, ...]]]:
        """Headings, and what to type below each: at first how to begin, later what else there is."""
        if self.meshes.rows:
            return [("What you can type", self._next_steps), ("To begin something new", FIRST)]
        return [("What to type first", FIRST), ("And then", self._next_steps)]

    def __repr__(self) -> str:
        width = max(len(command) for _, rows in self.steps for command, _ in rows)
        parts = [title(), f"{running(self.meshes)}\n{self.meshes!r}" if self.meshes.rows else running(self.meshes)]
        for heading, rows in self.steps:
            parts.append("\n".join([heading, *(f"  {command.ljust(width)}  {text}" for command, text in rows)]))
        return "\n\n".join([*parts, f"The manual: {manual()}"])


def title() -> str:
    """Returns the first line."""
    return f"Monarch-NB {__version__}: this notebook's kernel is the controller of its processes."


def running(meshes: Overview) -> str:
    """Returns a line about the running meshes."""
    return "Running now:" if meshes.rows else "No processes have been started yet."


def manual() -> str:
    """Address of the manual."""
    return page("manual/README.md")


def guide_html(guide: Guide) -> str:
    """HTML of %monarch."""
    parts = [f"<div><b>{escape(title())}</b></div><div>{escape(running(guide.meshes))}</div>"]
    if guide.meshes.rows:
        parts.append(overview_html(guide.meshes))
    parts += [table((heading, ""), rows, mono=(0,)) for heading, rows in guide.steps]
    parts.append(
        f'<div style="overflow-wrap:anywhere">The manual: <a href="{escape(manual())}">{escape(manual())}</a></div>'
    )
    return framed(*parts, kind="mnb-d")


def checkup_html(diagnosis: "Checkup") -> str:
    """HTML of %monarch doctor."""
    parts = [f"<div><b>{escape(diagnosis.summary)}</b></div>"]
    for name, findings in diagnosis.findings.items():
        rows = "".join(map(_check_row, findings))
        head = f'<thead><tr><th colspan="2"{LEFT}>{escape(name)}</th></tr></thead>'
        parts.append(f'<table class="mnb-t">{head}<tbody>{rows}</tbody></table>')
    return framed(*parts, kind="mnb-d")


def _check_row(finding: "Check") -> str:
    title = f"{finding.mark} {finding.about}"
    advice = f"<div><b>{escape(finding.advice)}</b></div>" if finding.advice else ""
    mark = swatch(_LOOKS[finding.level])
    return f"<tr><td{LEFT}>{mark}{escape(title)}</td><td{LEFT}>{escape(finding.found)}{advice}</td></tr>"


@magics_class
class GuideMagics(SessionMagics):
    """%monarch."""

    @line_magic
    def monarch(self, line: str) -> "Guide | Checkup":
        """Show the way in: what to type first, and what is running.

        %monarch            # what to type, and what is running
        %monarch doctor     # check this kernel and every host, and say what to do

        The doctor starts one process on each host, which looks around there, and stops it again. From a shell:
        monarch-nb doctor.
        """
        match line.split():
            case []:
                rows = self._session.rows()
                words = (self._session.word(row.view.uid) for row in rows)
                return Guide(Overview(rows), next(filter(None, words), ""))
            case ["doctor"]:
                from .doctor import checkup

                return checkup(self.shell)
            case _:
                raise UsageError(f"%monarch does not know {line.strip()!r}. Write %monarch, or %monarch doctor")
