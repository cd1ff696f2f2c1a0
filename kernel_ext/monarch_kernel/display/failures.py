"""Failures in a notebook: cards that grow in place, bars above errors that have the details; and notices of hosts."""

import secrets
import sys
import threading
import time
from collections.abc import Callable
from html import escape
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from monarch_nb.mesh.mesh_events import HostMessage, HostNoticed, HostNoticeWithdrawn
from monarch_nb.settings import settings
from monarch_nb.store import FailureFields, Store
from monarch_nb.store.failures import clock, record, rows, tails, text
from monarch_nb.supervision import MeshFailure
from monarch_nb.supervision.failure import gathered
from monarch_nb.wire import ActorError

from ..front import Bundle, Front
from .html import facts, folded, framed, heading, lab_button

if TYPE_CHECKING:
    from ..views.widgets import Widgets

GATHER_S = 0.1  # without another failed rank of the same event
SETTLE_S = 0.6  # limit: an error waits so long for other ranks of its event, or a card for an error
MOST_EVENTS = 256  # events whose display is remembered


def ansi(text: str, style: str) -> str:
    """Terminal colours, which notebooks show as well."""
    codes = {"title": "1", "dim": "2", "strong": "1"}  # the error box is red already
    return f"\033[{codes[style]}m{text}\033[0m" if style in codes else text


def failure_bundle(failure: FailureFields) -> dict[str, Any]:
    """Returns a failure as a display of its own."""
    parts = [heading(failure["title"]), facts(rows(failure))]
    trace = failure.get("traceback")
    if trace:
        parts.append(folded("traceback", trace, opened=len(trace.splitlines()) < 16))
    for index, (source, lines) in enumerate(tails(failure)):
        title = (
            f"the last lines of {source}" if source else "its last lines" if len(failure["ranks"]) < 2 else "last lines"
        )
        parts.append(folded(title, "\n".join(lines[-20:]), opened=index == 0))
    dump = failure.get("dump")
    if dump:
        parts.append(folded("where it crashed", "\n".join(dump), opened=True))
    parts += [facts([("next", failure["next"])]), _heal_button(failure)]
    return {"text/plain": f"{failure['title']}\n{text(failure)}", "text/html": framed(*parts, kind="mnb-f")}


def failure_bar(failure: FailureFields) -> dict[str, object]:
    """One line about a failure, above the error that describes it."""
    return {
        "text/plain": failure["title"],
        "text/html": framed(heading(failure["title"]), _heal_button(failure), kind="mnb-f"),
    }


def raised_bar(error: ActorError) -> dict[str, object]:
    """One line about a call that raised, above its error."""
    head = raised_title(error)
    return {"text/plain": head, "text/html": framed(heading(head), kind="mnb-f")}


def raised_title(error: ActorError) -> str:
    """Returns the call that failed, and its ranks."""
    return error.summary.partition("\n")[0].removeprefix("Actor call ").rstrip(".")


def _heal_button(failure: FailureFields) -> str:
    """Returns a button that heals the mesh, in JupyterLab with the panel."""
    if not failure.get("mesh"):
        return ""
    return lab_button(f"Heal {failure['name']}", "monarch-nb:heal", {"mesh": failure["mesh"]})


class FailureNotice(Struct, frozen=True):
    """A failure for the text of an error; `brief` says where its details were already shown, "" if nowhere."""

    record: FailureFields
    key: str = ""
    brief: str = ""
    barred: bool = True  # a bar stands above the error


class _ShownEvent(Struct):
    """The cell in which an event was shown, and the number of its ranks then."""

    cell: Any
    card: bool
    ranks: int
    display: str = ""  # id of the display that can be updated


class _Due(Struct):
    """An unawaited failure that is to be shown."""

    failure: MeshFailure
    cell: Any
    running: bool
    since: float


class Notices:
    """Shows unawaited failures, from any thread, and provides notices for errors of calls."""

    def __init__(self, front: Front, store: Store, widgets: "Widgets", before: Callable[[], None]) -> None:
        self._front = front
        self._store = store
        self._widgets = widgets
        self._before = before  # called before anything is shown, so that earlier output comes first
        self._due: list[_Due] = []
        self._shown: dict[str, _ShownEvent] = {}
        self._lock = threading.RLock()
        front.ending.append(self.flush)

    def close(self) -> None:
        """Shows due output; nothing is shown afterwards."""
        if self.flush in self._front.ending:
            self._front.ending.remove(self.flush)
        self.flush()

    # -- unawaited failures ----------------------------------------------------------------------------------------

    def show(self, failure: MeshFailure) -> None:
        """Shows a failure in a moment, with others of the same event; does not block."""
        with self._lock:
            self._due.append(_Due(failure, self._front.parent, self._front.running, time.monotonic()))
            if len(self._due) == 1:
                self._schedule()

    def _schedule(self) -> None:
        timer = threading.Timer(GATHER_S, self._show_due)
        timer.daemon = True
        timer.start()

    def flush(self) -> None:
        """Shows all that is due."""
        self._show_due(final=True)

    def _show_due(self, *, final: bool = False) -> None:
        with self._lock:
            due: dict[str, list[_Due]] = {}  # by event; "" for failures that no owner receives
            for failed in self._due:
                due.setdefault(self._event(failed.failure), []).append(failed)
            events = {key: self._store.failure(key) for key in due if key}
            waiting = [] if final else [key for key, event in events.items() if self._waits(key, event, due[key])]
            self._due = [failed for key in waiting for failed in due.pop(key)]
            if self._due:
                self._schedule()
            if not due:
                return
            self._before()
            for key, failures in due.items():
                event = events.get(key)
                if event is not None:
                    self._show_event(key, event, failures[0].cell)
                    continue
                for failure in gathered(failed.failure for failed in failures):
                    self._front.display(failure_bundle(record(failure, time.time())), cell=failures[0].cell)
            # A cell that has begun since then is not affected.
            every = [failed for failures in due.values() for failed in failures]
            current = any(failed.running and failed.cell is self._front.parent for failed in every)
            if current and self._front.running and settings.interrupt_on_failure:
                self._front.interrupt()

    def _event(self, failure: MeshFailure) -> str:
        return self._store.event_of(failure.failure_id) if failure.failure_id else ""

    def _waits(self, key: str, event: FailureFields | None, due: list[_Due]) -> bool:
        """Returns whether the error of a call, which is on its way, is about to report this event."""
        called = event is not None and any(receiver == "a call" for receiver, _ in event["told"])
        return called and key not in self._shown and time.monotonic() - due[0].since < SETTLE_S

    def _show_event(self, key: str, event: FailureFields, cell: object) -> None:
        shown = self._shown.get(key)
        if shown is not None and len(event["ranks"]) <= shown.ranks:
            return
        update = shown is not None and bool(shown.display)
        if shown is None:
            shown = self._remember(key, _ShownEvent(cell, True, 0))
        shown.ranks, shown.display = len(event["ranks"]), shown.display or f"monarch-{secrets.token_hex(8)}"
        self._front.display(self._form(key, event, bar=not shown.card), shown.display, update=update, cell=shown.cell)

    def _form(self, key: str, event: FailureFields, *, bar: bool) -> Bundle:
        return {**(failure_bar(event) if bar else failure_bundle(event)), **self._widgets.failure(key, bar=bar)}

    def _remember(self, key: str, shown: _ShownEvent) -> _ShownEvent:
        self._shown[key] = shown
        while len(self._shown) > MOST_EVENTS:
            del self._shown[next(iter(self._shown))]
        return shown

    # -- failures that an error reports -----------------------------------------------------------------------------

    def error(self, failure: MeshFailure) -> FailureNotice:
        """Returns the notice for the error of a call; blocks for a moment, in which other ranks may join the event."""
        key, event = self._settled(failure)
        if event is None:
            return FailureNotice(record(failure, time.time()))
        with self._lock:
            self._due = [failed for failed in self._due if self._event(failed.failure) != key]
            shown = self._shown.get(key)
            if shown is None or not shown.card:
                self._remember(key, _ShownEvent(self._front.parent, False, len(event["ranks"])))
                return FailureNotice(event, key)
            if shown.cell is self._front.parent:
                return FailureNotice(event, key, "above", False)
            return FailureNotice(
                event,
                key,
                f"the details were shown when it happened, at {clock(event['at'])}; %failures shows them again",
            )

    def bar(self, notice: FailureNotice) -> None:
        """Shows the actions for a failure above its error; nothing where there are no live displays."""
        live = self._widgets.failure(notice.key, bar=True) if notice.key and notice.barred else {}
        if not live or not self._front.in_cell:
            return
        name = f"monarch-{secrets.token_hex(8)}"
        with self._lock:
            shown = self._shown.get(notice.key)
            if shown is not None and not shown.card:
                shown.cell, shown.display = self._front.parent, name
        self._front.display({**failure_bar(notice.record), **live}, name)

    def _settled(self, failure: MeshFailure) -> tuple[str, FailureFields | None]:
        """Returns the event of a failure, once no more ranks join it; None if it belongs to none."""
        if not failure.failure_id:
            return "", None
        begun = since = time.monotonic()
        ranks = -1
        while True:
            with self._lock:
                key = self._event(failure)
                if key and key not in self._shown:  # no card is made of it any more
                    self._remember(key, _ShownEvent(self._front.parent, False, sys.maxsize))
            event = self._store.failure(key) if key else None
            now = time.monotonic()
            count = -1 if event is None else len(event["ranks"])
            if count != ranks:
                ranks, since = count, now
            old = event is not None and time.time() - event["detected"] > SETTLE_S
            if old or count == failure.size or now - since > GATHER_S or now - begun > SETTLE_S:
                return key, event
            time.sleep(0.01)


# -- of hosts ----------------------------------------------------------------------------------------------------------


def show_notice(
    front: Front, before: Callable[[], None], event: HostNoticed | HostNoticeWithdrawn | HostMessage
) -> None:
    """Shows a notice, from any thread; does not block. `before` is called first, so that earlier output comes first."""
    cell = front.parent

    def show() -> None:
        before()
        front.display(notice_bundle(event), cell=cell)

    threading.Thread(target=show, name="monarch-notice", daemon=True).start()


def notice_bundle(event: HostNoticed | HostNoticeWithdrawn | HostMessage) -> Bundle:
    """Returns a card: the host, its remaining time, its meshes and the possible actions."""
    head, *lines = event.text.splitlines()
    parts = [f"<b>{escape(head)}</b>", *(f'<div class="mnb-s">{escape(line.strip())}</div>' for line in lines)]
    return {"text/plain": event.text, "text/html": framed(*parts)}
