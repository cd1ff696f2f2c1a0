"""Displays of a process follow its output, within bounds: large ones are sent as text."""

import os
import secrets
import sys
import threading
import time
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from monarch_nb.runtime.output.forms import PLAIN, WIDGET, forms_of, sendable
from monarch_nb.runtime.output.forms import text_of as plain_text
from monarch_nb.wire import error_line, text_of
from monarch_nb.wire.display import LATER, NOW, Display, encode_display, size_of

if TYPE_CHECKING:
    from monarch_nb.runtime.output.own_log import OwnLog

MOST = 4 << 20  # bytes of one display
BRIEF = 2000  # characters of the text in logs
BURST, RATE = 16 << 20, 4 << 20  # bytes of all displays of a process: at once, and in each second after
MOST_PENDING = 64  # displays whose latest update waits


class Displays:
    """The displays of one process. Methods from any thread; without a journal they print text."""

    def __init__(self) -> None:
        self._journal: OwnLog | None = None
        self._lock = threading.RLock()
        self._budget = float(BURST)
        self._refilled_at = time.monotonic()
        self._pending: dict[str, tuple[str, Display]] = {}  # by id, with the call
        os.register_at_fork(after_in_child=self._in_child)

    def write_to(self, journal: "OwnLog") -> None:
        """Sends displays to a journal."""
        self._journal = journal

    @property
    def has_viewer(self) -> bool:
        """True if displays go to a viewer that renders them; else they are printed as text."""
        return self._journal is not None

    def publish(
        self, data: dict[str, object], metadata: dict[str, object], id: str = "", *, update: bool = False
    ) -> None:
        """Shows data in its forms; a display with an id can be replaced, with `update` it replaces one."""
        data = {kind: form for kind, form in data.items() if kind != WIDGET}
        text = text_of(data.get(PLAIN) or f"<{', '.join(data)}>")
        if self._journal is None or (set(data) <= {PLAIN} and not id):
            if not update:
                sys.stdout.write(f"{text}\n")
            return
        text = text if len(text) <= BRIEF else f"{text[: BRIEF - 1]}…"
        data = {**data, PLAIN: text_of(data.get(PLAIN, text))}
        forms = {kind: form for kind, form in data.items() if size_of(form) <= MOST}
        if sum(map(size_of, forms.values())) > MOST:
            forms = {PLAIN: text}
        if len(forms) < len(data):
            size = sum(map(size_of, data.values())) / 2**20
            text = f"{text} ({size:.1f} MB are not shown: a display may have {MOST >> 20} MB)"
            forms[PLAIN] = text
            if len(forms) == 1 and not id:
                sys.stdout.write(f"{text}\n")
                return
        self._send(Display(text, forms, {kind: about for kind, about in metadata.items() if kind in forms}, id, update))

    def clear(self, wait: bool = False) -> None:
        """Clears the displays of this call; with `wait`, when the next one arrives."""
        if self._journal is not None:
            self._send(Display(clear=LATER if wait else NOW))

    def relay(self, display: Display, call: str, source: str) -> bool:
        """Shows a display of a process that was started from here. False if only text can be shown."""
        if self._journal is None or display.clear:
            return self._journal is not None
        display_id = f"{source} {display.id}" if display.id else ""
        self._send(Display(display.text, display.data, display.metadata, display_id, display.update), call)
        return True

    def flush(self) -> None:
        """Writes the latest of updates that were held back."""
        if self._pending:
            with self._lock:
                pending, self._pending = self._pending, {}
                for call, display in pending.values():
                    self._write(display, call)

    def _in_child(self) -> None:
        """Resets a process forked by the user's code, which displays text: another thread may have held the lock."""
        self._lock = threading.RLock()
        self._pending = {}

    def _send(self, display: Display, call: str | None = None) -> None:
        assert self._journal is not None
        with self._lock:
            now = time.monotonic()
            self._budget = min(BURST, self._budget + (now - self._refilled_at) * RATE)
            self._refilled_at = now
            size = display.size
            if size > self._budget:
                if display.update:
                    if display.id in self._pending or len(self._pending) < MOST_PENDING:
                        self._pending[display.id] = self._journal.tag()[0] if call is None else call, display
                    return
                display.text += f" (not shown: more than {BURST >> 20} MB were displayed within a few seconds)"
                display.data, size = {PLAIN: display.text}, 0
            self._budget -= size
            self._pending.pop(display.id, None)
            self._write(display, call)

    def _write(self, display: Display, call: str | None) -> None:
        try:
            line = encode_display(display)
        except (TypeError, ValueError, RecursionError) as error:
            sys.stderr.write(f"a display could not be sent ({error_line(error)}); as text it is:\n")
            line = b""
        if (not line or self._journal is None or not self._journal.display(line, call)) and display.text:
            sys.stdout.write(f"{display.text}\n")


class ReplaceableDisplay:
    """A display that can be replaced."""

    def __init__(self, display_id: str) -> None:
        self.display_id = display_id

    def __repr__(self) -> str:
        return f"<display {self.display_id}>"

    def display(self, value: object, **options: Any) -> None:
        """Shows a value again under the same id."""
        display(value, display_id=self.display_id, **options)

    def update(self, value: object, **options: object) -> None:
        """Replaces the display by another object."""
        update_display(value, display_id=self.display_id, **options)


displays = Displays()  # of this process


def display(
    *values: Any,
    include: Collection[str] | None = None,
    exclude: Collection[str] | None = None,
    metadata: dict[str, object] | None = None,
    transient: dict[str, object] | None = None,
    display_id: str | bool | None = None,
    raw: bool = False,
    clear: bool = False,
    update: bool = False,
    **_: object,
) -> ReplaceableDisplay | None:
    """Shows objects in the cell that the running call belongs to, as `IPython.display.display` does in a kernel."""
    if display_id is True:
        display_id = secrets.token_hex(16)
    name = str(display_id or (transient or {}).get("display_id") or "")
    if update and not name:
        raise TypeError("display_id is needed to update a display: display(value, display_id=…) gives one")
    if clear:
        clear_output(wait=True)
    for value in values:
        if raw:
            publish_display_data(value, metadata, transient={"display_id": name}, update=update)
            continue
        own = None if isinstance(value, type) else getattr(type(value), "_ipython_display_", None)
        if own is not None:
            try:
                own(value)
                continue
            except NotImplementedError:
                pass
        forms = forms_of(value, include, exclude)
        displays.publish(forms.data, {**forms.metadata, **(metadata or {})}, name, update=update)
    return ReplaceableDisplay(name) if name and display_id else None


def update_display(value: object, *, display_id: str, **options: Any) -> None:
    """Replaces the display with that id by an object."""
    display(value, display_id=display_id, **{**options, "update": True})


def publish_display_data(
    data: dict[str, object],
    metadata: dict[str, object] | None = None,
    *_: object,
    transient: dict[str, object] | None = None,
    update: bool = False,
    **__: object,
) -> None:
    """Shows data that is given in its forms, by MIME type."""
    forms = sendable(data)
    forms.setdefault(PLAIN, plain_text(data) if not forms else "<" + ", ".join(forms) + ">")
    displays.publish(forms, dict(metadata or {}), str((transient or {}).get("display_id") or ""), update=update)


def clear_output(wait: bool = False) -> None:
    """Removes the displays of this call here so far; with `wait`, when the next display arrives."""
    displays.clear(wait)
