"""Transfers between the memory of processes, as a small matrix and tables, and live: `%transfers`, and a section of the
panel.
"""

import threading
from collections.abc import Callable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError

from monarch_nb.runtime import Feature, Runtime, current_runtime
from monarch_nb.store import store_of
from monarch_nb.store.events import TransfersSeen
from monarch_nb.wire import counted

from ..display.html import framed, heading, table
from ..session import Session
from .live import LiveView, Shown, Watch, bundled

if TYPE_CHECKING:
    from monarch_nb.rdma import TransferTable

_MOST_PROCESSES = 16  # processes in the matrix
TABLE = "monarch_nb.rdma.table.TransferTable"  # named, not imported: the data plane is loaded when it is used
RDMA: Feature[object] = Feature("rdma")  # named, not imported, for the same reason
AGAIN_S = 1.0  # rates fall to zero when nothing moves any more


def transfers_html(transfers: "TransferTable") -> str:
    """Returns the static form."""
    from monarch_nb.rdma.table import MOVED, NOTHING, OFFERED

    moved, offered = transfers.moved, transfers.offered
    if not moved and not offered:
        return framed(f'<div class="mnb-s">{escape(NOTHING)}</div>')
    parts = [heading("Transfers", f"{counted(len(moved), 'route')}")]
    names = sorted({name for row in moved for name in row[:2]})
    if 1 < len(names) <= _MOST_PROCESSES:
        parts.append(_matrix(names, moved))
    if moved:
        parts.append(table(MOVED, moved))
    if offered:
        parts.append(table(OFFERED, offered))
    return framed(*parts)


def _matrix(names: Sequence[str], moved: Sequence[tuple[str, ...]]) -> str:
    routes = {(source, target): (size, mover) for source, target, mover, size, *_ in reversed(moved)}
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    rows = []
    for source in names:
        cells = (
            f'<td title="{escape(routes[source, target][1])}">{escape(routes[source, target][0])}</td>'
            if (source, target) in routes
            else "<td></td>"
            for target in names
        )
        rows.append(f"<tr><th>{escape(source)}</th>{''.join(cells)}</tr>")
    return f'<table class="mnb-g"><tbody><tr><th>from \\ to</th>{head}</tr>{"".join(rows)}</tbody></table>'


class TransferReporter:
    """Puts transfers into the store while a page watches. One per process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watchers = 0
        self._running = False
        self._reported: dict[str, dict[str, object]] = {}  # as the store has it

    def watch(self, runtime: Runtime) -> Callable[[], None]:
        """Keeps the store up to date until the result is called."""
        with self._lock:
            self._watchers += 1
            begin = not self._running
            self._running = True
        if begin:
            self._report(runtime)
        return self._leave

    def update(self, runtime: Runtime) -> dict[str, dict[str, Any]]:
        """Puts changed transfers into the store; returns all of them."""
        records: dict[str, dict[str, Any]] = {}
        if runtime.features.loaded(RDMA) is not None:  # otherwise no process has used it
            records = {key: dict(record) for key, record in _table().records.items()}
        put = store_of(runtime).put
        with self._lock:
            for key in self._reported.keys() - records.keys():
                put(TransfersSeen(key, {}))
            for key, record in records.items():
                if self._reported.get(key) != record:
                    put(TransfersSeen(key, record))
            self._reported = records
        return records

    def _report(self, runtime: Runtime) -> None:
        with self._lock:
            if not self._watchers or runtime.closed:
                self._running = False
                return
        self.update(runtime)
        runtime.later(AGAIN_S, lambda: self._report(runtime))

    def _leave(self) -> None:
        with self._lock:
            self._watchers -= 1


REPORTER = TransferReporter()


def show_transfers(session: Session, line: str) -> "TransferTable":
    """Show what has moved between the memory of processes: from where to where, by which mover, how much, how fast.

    %transfers

    From Python: monarch.rdma.transfers(), and monarch.rdma.routes() for the reasons why a better mover was not taken.
    """
    if line.strip():
        raise UsageError("%transfers takes no arguments")
    return _table()


def _table() -> "TransferTable":
    from monarch_nb.rdma import transfers

    return transfers()


def _feed(watch: Watch) -> Callable[[], None]:
    watch.publish()  # confirms the subscription: the data comes through the store
    return REPORTER.watch(watch.runtime)


def _shown(_: "TransferTable") -> Shown:
    return Shown({"transfers": REPORTER.update(current_runtime())}, "transfers")


TRANSFERS = LiveView(name="transfers", **bundled("transfers"), feed=_feed, shows={TABLE: _shown}, magic=show_transfers)
