"""Terminals that show stopped ranks and read commands, until nothing is stopped or the prompt is left."""

import sys
import threading
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from monarch_nb.debug.control.stopped_threads import StoppedThreads
from monarch_nb.debug.prompt.prompt import DebugPrompt
from monarch_nb.debug.records import Stopped
from monarch_nb.debug.render.groups import grouped, named, place

QUIET_S = 0.1  # ranks that stop within that time of each other are drawn together
_AGAIN = frozenset(("n", "s", "next", "step", "r", "return", "l", "list"))  # an empty line repeats these, as in pdb
T = TypeVar("T")

Ask = Callable[[str], str]


class NoPrompt(Exception):
    """No prompt can be shown here."""


class NothingToAsk(BaseException):
    """A question has become useless: no rank is stopped any more."""


class Terminal(Protocol):
    """Output and input of a prompt."""

    @property
    def can_ask(self) -> bool:
        """True if a person can type."""

    @property
    def echoes(self) -> bool:
        """True if typed text stays visible."""

    def write(self, text: str) -> None:
        """Shows text."""

    def table(self, text: str, *, again: bool) -> bool:
        """Shows the stopped ranks, with `again` in place of the last table if possible; returns whether it has."""

    def beside(self) -> None:
        """Shows other views of the stopped ranks; called after the table, before the first question."""

    def question_withdrawn(self) -> None:
        """Called when a question has become useless, since no rank is stopped any more."""

    def ask(self, prompt: str, useless: Callable[[], bool] = ...) -> str:
        """Reads a line. Raises NoPrompt, EOFError, KeyboardInterrupt; NothingToAsk if it can detect that the question
        is `useless()`.
        """


class ScriptTerminal:
    """The terminal of a script."""

    @property
    def can_ask(self) -> bool:
        """True at a terminal with a person."""
        return sys.stdin is not None and not sys.stdin.closed and sys.stdin.isatty()

    @property
    def echoes(self) -> bool:
        """True: typed text stays on the screen."""
        return True

    def write(self, text: str) -> None:
        """Shows text."""
        sys.stdout.write(text)
        sys.stdout.flush()

    def table(self, text: str, *, again: bool) -> bool:
        """Shows the stopped ranks once: text on the screen is not replaced."""
        if not again:
            self.write(f"{text}\n")
        return not again

    def question_withdrawn(self) -> None:
        """Prints that nothing is left to ask."""
        self.write("» no rank is stopped any more\n")

    def beside(self) -> None:
        """Does nothing: a terminal has no other view."""

    def ask(self, prompt: str, useless: Callable[[], bool] = lambda: False) -> str:
        """Returns a typed line; waits even if it becomes useless. Raises NoPrompt, EOFError, KeyboardInterrupt."""
        if not self.can_ask:
            raise NoPrompt
        return input(prompt)


def converse(
    prompt: DebugPrompt, terminal: Terminal, over: Callable[[], bool] = lambda: False, *, ending: str = "quit"
) -> None:
    """Shows the stopped ranks and carries out typed commands until no rank is stopped or the prompt is left."""
    Conversation(prompt, terminal, over, ending).hold()


class Redrawn(Generic[T]):
    """Redraws when further ranks stop, on its own thread, until `close`."""

    def __init__(self, stopped: StoppedThreads, draw: Callable[[], T], show: Callable[[T], None]) -> None:
        self._stopped = stopped
        self._draw = draw
        self._show = show
        self._due = threading.Event()
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._unlisten = stopped.listen(self._on_event)

    def close(self) -> None:
        """Stops the redraws."""
        with self._lock:
            self._closed.set()
        self._unlisten()
        self._due.set()

    def _on_event(self, kind: str, record: Stopped) -> None:
        if kind != "stopped":
            return
        self._due.set()
        with self._lock:
            if self._thread is None and not self._closed.is_set():
                self._thread = threading.Thread(target=self._run, name="monarch-table", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while not self._closed.is_set():
            self._due.wait()
            self._due.clear()
            self._stopped.settle(QUIET_S)
            if self._closed.is_set():
                return
            drawn = self._draw()
            with self._lock:
                if not self._closed.is_set():
                    self._show(drawn)


class Conversation:
    """A sequence of questions. `over()` ends it; with `ending="close"` the word quit only leaves the prompt."""

    def __init__(self, prompt: DebugPrompt, terminal: Terminal, over: Callable[[], bool], ending: str) -> None:
        self._prompt = prompt
        self._terminal = terminal
        self._over = over
        self._ending = ending
        self._shown: set[str] = set()  # sessions that were shown
        self._redrawn: Redrawn[tuple[str, set[str]]] | None = None

    def hold(self) -> None:
        """Runs it to its end."""
        self._show(self._draw(), again=False)
        self._terminal.beside()
        # Ranks that stop later are added to the table until the first answer.
        self._redrawn = Redrawn(self._prompt.controller.stopped, self._draw, self._show)
        try:
            self._take_commands()
        finally:
            self._redrawn.close()

    def _draw(self) -> tuple[str, set[str]]:
        sessions = {record.session for record in self._prompt.candidates()}
        return "\n".join([self._prompt.table(), *self._prompt.watched()]), sessions

    def _show(self, drawn: tuple[str, set[str]], again: bool = True) -> None:
        if self._terminal.table(drawn[0], again=again):
            self._shown.update(drawn[1])

    def _ask(self, question: str) -> str:
        try:
            return self._terminal.ask(question, lambda: self._over() or not self._prompt.candidates())
        finally:
            if self._redrawn is not None:
                self._redrawn.close()

    def _take_commands(self) -> None:
        last = ""
        while not self._over() and self._prompt.candidates():
            self._show_new_stops()
            try:
                try:
                    line = self._command(last)
                except KeyboardInterrupt:
                    if self._interrupted():
                        return
                    continue
            except NothingToAsk:
                self._terminal.question_withdrawn()
                return
            except EOFError:
                line = "detach"
            if line is None:
                return
            if not line.strip() and not self._prompt.interactive:
                continue
            if line == last or not self._terminal.echoes:
                self._terminal.write(f"» {line}\n")
            last = line if line.split(" ")[0] in _AGAIN else ""
            text = self._prompt.do(line).text
            if text:
                self._terminal.write(f"{text}\n")
            if self._prompt.leave:
                return

    def _show_new_stops(self) -> None:
        records = [record for record in self._prompt.candidates() if record.session not in self._shown]
        if records:
            self._shown |= {record.session for record in records}
            name = self._prompt.name
            locations = "; ".join(f"{group.where} at {place(group.first.frame, name)}" for group in grouped(records))
            self._terminal.write(f"other ranks have stopped: {locations}\n")

    def _command(self, last: str) -> str | None:
        """Returns the complete input; "" for nothing to do, None for the end."""
        prompt = self._prompt
        prompt.gather()
        line = self._ask(prompt.question)
        if line.rstrip().endswith(":"):
            line = self._block(line)
        if prompt.interactive:
            return line
        if line.strip() in ("q", "quit", "exit"):
            if self._ending == "close":  # frames of a failure: there is no endpoint to end
                return None
            sure = self._ask(quit_question(prompt.focused()))
            return line if sure.strip().lower() in ("y", "yes") else ""
        return "" if line.startswith("#") else line if line.strip() else last

    def _block(self, line: str) -> str:
        """Reads the further lines of a statement, up to an empty line."""
        lines = [line]
        while True:
            more = self._ask("... ")
            if not more.strip():
                return "\n".join(lines) + "\n"
            lines.append(more)

    def _interrupted(self) -> bool:
        """Asks, after Ctrl-C, whether ranks stay stopped or continue. True if the prompt has to end."""
        try:
            reply = self._ask("leave them stopped (l), continue them (c), or return to the prompt (Enter)? ")
            reply = reply.strip().lower()
        except (KeyboardInterrupt, EOFError):
            reply = "l"
        if reply.startswith(("c", "l")):
            answer = self._prompt.do("c all" if reply.startswith("c") else "detach")
            self._terminal.write(f"{answer.text}\n")
            return True
        return False


def quit_question(records: Sequence[Stopped]) -> str:
    """Asks what quitting ends: endpoints, or threads that endpoints have started."""
    threads = [record for record in records if record.thread and not record.endpoint]
    endpoints = [record for record in records if record not in threads]
    ends = []
    if endpoints:
        ends.append(f"the endpoints of {named(endpoints)}, so that their calls fail")
    if threads:
        names = ", ".join(sorted({record.thread for record in threads}))
        ends.append(f"thread {names} of {named(threads)}, while its endpoint goes on")
    return f"end {'; and '.join(ends)}? [y/N] "
