"""`monarch-nb top`: the cluster of a controller of this user, in a terminal."""

import argparse
import importlib.util
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from monarch_nb.top.connection import ConnectionFile, Watching, connections, read
from monarch_nb.top.rows import HEADS, SORTS, ViewChoice, cells, is_measured, rows, summary
from monarch_nb.wire import text_table

_FIRST_S = 10.0
_MEASURED_S = 3.0  # processes measure their use only while a display watches
_NOBODY = """\
No controller of this user can be watched. A notebook's kernel can be once a cell has used its cluster; in a program,
`import monarch.top; monarch.top.serve()` lets it be watched, and gives the connection file."""


def main(words: Sequence[str]) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="monarch-nb top", description="Shows the ranks of a running controller. It changes nothing there."
    )
    parser.add_argument(
        "connection", nargs="?", help="a connection file, or a process (default: the newest controller)"
    )
    parser.add_argument("--list", action="store_true", help="the controllers that can be watched")
    parser.add_argument("--once", action="store_true", help="write the table once, as text, for pipes and scripts")
    parser.add_argument("--find", default="", help="only ranks that fit, such as 'failed hosts=3' or 'memory>2GB'")
    parser.add_argument("--sort", choices=SORTS, default="place")
    options = parser.parse_args(words)
    try:
        if options.list:
            return _list()
        connection = _find(options.connection)
        if not options.once and importlib.util.find_spec("textual") is None:
            sys.stderr.write("pip install 'monarch-nb[top]' for the live table; --once writes it as text\n")
            return 1
        watching = Watching(connection)
        if not watching.wait(_FIRST_S):
            sys.stderr.write(f"{watching.over or f'{connection.what} has not answered within {_FIRST_S:g} s'}\n")
            return 1
    except BrokenPipeError:
        raise
    except (LookupError, OSError, ValueError) as error:
        sys.stderr.write(f"monarch-nb top: {error.args[0] if isinstance(error, LookupError) else error}\n")
        return 1
    look = ViewChoice(query=options.find, sort=options.sort)
    return _once(watching, look) if options.once else _live(watching, look)


def _list() -> int:
    running = connections()
    lines = [
        (str(connection.pid), time.strftime("%H:%M:%S", time.localtime(connection.since)), connection.what, str(path))
        for path, connection in running
    ]
    heads = ("process", "since", "what", "connection file")
    sys.stdout.write(f"{text_table([heads, *lines]) if lines else _NOBODY}\n")
    return 0


def _find(choice: str | None) -> ConnectionFile:
    if choice is not None and not choice.isdigit():
        try:
            return read(Path(choice).expanduser())
        except FileNotFoundError:
            raise LookupError(
                f"there is no connection file {choice}: monarch-nb top --list shows the controllers that can be watched"
            ) from None
    chosen = [connection for _, connection in connections() if choice is None or connection.pid == int(choice)]
    if not chosen:
        raise LookupError(
            _NOBODY
            if choice is None
            else f"process {choice} cannot be watched; monarch-nb top --list shows those that can"
        )
    return chosen[0]


def _once(watching: Watching, look: ViewChoice) -> int:
    watching.wait(_MEASURED_S, is_measured)
    with watching.lock:
        shown, totals = rows(watching.document, look), summary(watching.document)
    now = time.time()
    sys.stdout.write(f"{totals}\n{text_table([HEADS, *(cells(row, now) for row in shown)])}\n")
    watching.close()
    return 0


def _live(watching: Watching, look: ViewChoice) -> int:
    from monarch_nb.top.app import Top

    app = Top(watching)
    app.look = look
    app.run()
    watching.close()
    return 0
