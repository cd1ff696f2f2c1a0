"""%logs: what the ranks of a mesh wrote, shown or not."""

import sys
import time
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import line_magic, magics_class

from monarch_nb.logs import Logs, follow_logs, logs_of

from ..arguments import read_logs
from ..session import SessionMagics
from ..views.displays import LogView
from .pacing import BYTES, BYTES_BURST, Bucket


@magics_class
class LogMagics(SessionMagics):
    """%logs."""

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
        args = read_logs(line)
        part: Any = args.place.of(self._session.find(args.place.name))
        try:
            if args.follow:
                follow(part, args.filters)
                return None
            if args.last is None and not args.filters:
                return LogView(part)
            return logs_of(part, last=args.last, **args.filters)
        except (TypeError, IndexError, ValueError, RuntimeError) as error:
            raise UsageError(f"%logs: {error}") from None


def follow(mesh: Any, filters: dict[str, Any]) -> None:
    """Writes lines as they come, until Ctrl-C or the end of the mesh; at the rate that a front end can take."""
    bucket = Bucket(BYTES, BYTES_BURST)
    missed = 0
    try:
        for record in follow_logs(mesh, **filters):
            text = f"{record}\n"
            if bucket.refill(time.monotonic()) < len(text):
                missed += 1
                continue
            if missed:
                text = f"… {missed:,} lines are not shown; %logs --grep shows what you look for\n{text}"
                missed = 0
            bucket.balance -= len(text)
            sys.stdout.write(text)
    except KeyboardInterrupt:
        pass
