"""%logs: what the ranks of a mesh wrote, shown or not."""

import shlex
import sys
import time
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_magic, magics_class

from monarch_nb.logs import Logs, follow_logs, logs_of

from ..arguments import Place, place
from ..session import Session
from ..views.displays import LogView
from .pacing import BYTES, BYTES_BURST, Bucket

OPTIONS = ("--follow", "--grep", "--level", "--since", "--last", "--stderr", "--stdout")
_VALUED = frozenset({"--grep", "--level", "--since", "--last"})


@magics_class
class LogMagics(Magics):
    """%logs."""

    def __init__(self, shell: Any, session: Session) -> None:
        super().__init__(shell)
        self._session = session

    @line_magic
    def logs(self, line: str) -> Logs | LogView | None:
        """Show the last lines that the ranks of a mesh wrote, also those that no cell has shown.

        %logs NAME [dim=0] [dim=0-2,5] ... [--follow] [--grep RE] [--level L] [--since T] [--last N] [--stderr]

            %logs workers                        # all ranks, in the order of time; live where widgets are
            %logs workers gpus=3 --since 5m
            %logs workers --grep "loss|nan"      # a regular expression
            %logs workers --level WARNING        # only records of logging, from there on
            %logs workers --follow               # goes on till Ctrl-C, or till the mesh stops

        What was held back in a cell, what background threads and child processes wrote when no call ran, and the last
        words of the dead are here too. From Python: workers.logs("loss|nan", since="5m", level="WARNING", last=100),
        whose .files says where all that each rank wrote is kept.
        """
        where, options = read(line)
        part: Any = where.of(self._session.find(where.name))
        try:
            last = int(options["--last"]) if "--last" in options else None
            stream = next((name[2:] for name in ("--stderr", "--stdout") if name in options), None)
            wanted: Any = {
                "grep": options.get("--grep"),
                "level": options.get("--level"),
                "since": options.get("--since"),
                "stream": stream,
            }
            if "--follow" in options:
                follow(part, wanted)
                return None
            return logs_of(part, last=last, **wanted) if options else LogView(part)
        except (TypeError, IndexError, ValueError, RuntimeError) as error:
            raise UsageError(f"%logs: {error}") from None


def read(line: str) -> tuple[Place, dict[str, str]]:
    """The mesh and the options of a line. Raises UsageError."""
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise UsageError(f"%logs: {error} in {line!r}") from None
    options: dict[str, str] = {}
    rest = []
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if not name.startswith("--"):
            rest.append(word)
            continue
        if name not in OPTIONS:
            raise UsageError(
                f"%logs knows no option {name}; its options are {', '.join(OPTIONS)}. %logs? shows its help"
            )
        if name in _VALUED and not equals:
            if not words:
                raise UsageError(f"%logs: {name} needs a value")
            value = words.pop(0)
        options[name] = value
    return place("%logs", " ".join(rest)), options


def follow(mesh: Any, wanted: dict[str, Any]) -> None:
    """Writes lines as they come, until Ctrl-C or the end of the mesh; no more of them than a front end takes."""
    bucket = Bucket(BYTES, BYTES_BURST)
    missed = 0
    try:
        for record in follow_logs(mesh, **wanted):
            text = f"{record}\n"
            if bucket.refill(time.monotonic()) < len(text):
                missed += 1
                continue
            if missed:
                text = f"… {missed:,} lines are not shown; %logs --grep shows what you look for\n{text}"
                missed = 0
            bucket.left -= len(text)
            sys.stdout.write(text)
    except KeyboardInterrupt:
        pass
