"""The prompt of a waiting call: shows what is stopped and asks what to do, or raises where nobody can be asked."""

import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from monarch_nb.debug.control.controller import Controller
from monarch_nb.debug.errors import StoppedAtBreakpoint
from monarch_nb.debug.prompt.commands import Desk
from monarch_nb.debug.prompt.redrawn import Redrawn
from monarch_nb.debug.records import Stopped
from monarch_nb.debug.render.groups import FileName, grouped, named, place, short
from monarch_nb.runtime import Future
from monarch_nb.settings import settings

Ask = Callable[[str], str]
GATHER_S = 0.05  # ranks that stop within that time of each other are shown together
HOW = "Debug them in the next cell: %%mdb NAME, or monarch.debug; then .get() again"


class NoPrompt(Exception):
    """Nobody can be asked here."""


class Vain(BaseException):
    """What is asked for is of no use any more: nothing is stopped."""


class Terminal(Protocol):
    """Where people read and type."""

    @property
    def can_ask(self) -> bool:
        """Whether there is anybody to type."""

    @property
    def echoes(self) -> bool:
        """Whether what was typed stays to be seen."""

    def write(self, text: str) -> None:
        """Shows text."""

    def table(self, text: str, *, again: bool) -> bool:
        """Shows what is stopped; `again` in place of what was shown last, if it can: whether it was shown."""

    def beside(self) -> None:
        """What is stopped has been shown as text, and questions follow: whatever else shows it can be shown now."""

    def gone(self) -> None:
        """A question was of no use any more: nothing is stopped."""

    def ask(self, prompt: str, vain: Callable[[], bool] = ...) -> str:
        """One line that was typed. Raises NoPrompt, EOFError, KeyboardInterrupt; Vain if it can tell that `vain()`."""


class Waiting:
    """Looks, while a thread waits for a call, whether ranks that it waits for are stopped."""

    def __init__(self, controller: Controller, terminal: Terminal, name: FileName = short, *, how: str = HOW) -> None:
        self._how = how  # how to go on, where nobody can be asked; NAME is that of a mesh
        self.controller = controller
        self.terminal = terminal
        self._name = name
        self._asking = threading.Lock()
        self._shown: set[tuple[str, int]] = set()  # stops that people have been told of: session and number
        self._left: set[tuple[str, int]] = set()  # those that are to be left alone by this wait
        self._desks: dict[str, Desk] = {}

    @property
    def can_ask(self) -> bool:
        """Whether there is anybody to type."""
        return self.terminal.can_ask

    def begin(self) -> None:
        """Somebody begins to wait: what was left stopped is asked about again, if it is what is waited for."""
        self._left.clear()

    def look(self, future: Future[Any]) -> None:
        """Asks, or raises StoppedAtBreakpoint, if there is reason to. On the waiting thread."""
        book = self.controller.book
        if not book.any or not self.relevant(future) or not self._asking.acquire(blocking=False):
            return
        book.settle(GATHER_S)
        records = self.relevant(future)
        try:
            if not records:
                return
            if self.terminal.can_ask:
                self._ask(future, records)
            else:
                self._tell(future, records)
        except NoPrompt:
            self._tell(future, records)
        finally:
            self._asking.release()

    def relevant(self, future: Future[Any]) -> list[Stopped]:
        """What is stopped and belongs to this wait: it is waited for, or nobody was told of it yet."""
        records = [one for one in self.controller.book.sessions() if (one.session, one.number) not in self._left]
        related = self._related(future, records)
        return [
            one
            for one in records
            if one in related or (one.in_the_way and (one.session, one.number) not in self._shown)
        ]

    def _related(self, future: Future[Any], records: list[Stopped]) -> list[Stopped]:
        if not records:
            return []
        call = self.controller.engine.calls.get(future.wait_id)
        missing = set(call.missing_ranks()) if call is not None else set()
        return [
            one
            for one in records
            if (future.wait_id and future.wait_id in one.chain)
            or (call is not None and one.in_the_way and one.mesh == call.mesh and one.rank in missing)
        ]

    def _tell(self, future: Future[Any], records: list[Stopped]) -> None:
        """Nobody can be asked: raises if that is what the call waits for, or else shows what is stopped."""
        related = self._related(future, records)
        if related:
            call = self.controller.engine.calls.get(future.wait_id)
            held = {one.rank for one in related if call is not None and one.mesh == call.mesh}
            covered = call is None or set(call.missing_ranks()) <= held
            if covered or time.monotonic() - self.controller.book.changed_at >= settings.debug_patience:
                raise self.error(future, related)
        fresh = [one for one in records if one not in related and (one.session, one.number) not in self._shown]
        if fresh:
            self._shown |= {(one.session, one.number) for one in fresh}
            table = Desk(self.controller, lambda: fresh, self._name).table()
            self.terminal.write(f"{table}\n{self._how.replace('NAME', fresh[0].name).partition(';')[0]}\n")

    def error(self, future: Future[Any], records: list[Stopped]) -> StoppedAtBreakpoint:
        """What a call raises where nobody can be asked."""
        self._shown |= {(one.session, one.number) for one in records}
        table = Desk(self.controller, lambda: records, self._name).table()
        story = future.told() or "the call waits"
        told = f"{story}: {named(records)} stopped in the debugger, and no prompt can be shown here.\n{table}\n"
        how = self._how.replace("NAME", records[0].name)
        return StoppedAtBreakpoint(f"{told}They stay stopped and the call stays under way. {how}", records, table)

    # -- asking -------------------------------------------------------------------------------------------------------

    def _desk(self, future: Future[Any], records: list[Stopped]) -> Desk:
        key = future.wait_id or "any"
        desk = self._desks.get(key)
        if desk is None:
            if len(self._desks) > 32:
                self._desks.clear()
            desk = self._desks[key] = Desk(self.controller, lambda: self.relevant(future), self._name)
        desk.leave, desk.interactive = "", False
        return desk

    def _ask(self, future: Future[Any], records: list[Stopped]) -> None:
        desk = self._desk(future, records)
        self._shown |= {(one.session, one.number) for one in records}
        converse(desk, self.terminal, over=future.done)
        left = desk.candidates()
        self._shown |= {(one.session, one.number) for one in left}
        self._left |= {(one.session, one.number) for one in left}
        if desk.leave == "detach" and not future.done():
            how = self._how.replace("NAME", records[0].name)
            told = f"{named(left)} left stopped in the debugger; the call stays under way. {how}"
            raise StoppedAtBreakpoint(told, left, desk.table(source=False))


def converse(desk: Desk, terminal: Terminal, over: Callable[[], bool] = lambda: False, *, ending: str = "quit") -> None:
    """Shows what is stopped, asks for commands and carries them out until nothing is stopped, or the desk is left."""
    told: set[str] = set()

    def draw() -> tuple[str, set[str]]:
        shown = {one.session for one in desk.candidates()}
        return "\n".join([desk.table(), *desk.watched()]), shown

    def show(drawn: tuple[str, set[str]], again: bool = True) -> None:
        if terminal.table(drawn[0], again=again):
            told.update(drawn[1])

    show(draw(), again=False)
    terminal.beside()
    # Ranks that stop a moment later than the first are in the table, too, until somebody has answered.
    redrawn = Redrawn(desk.controller.book, draw, show)

    def ask(question: str) -> str:
        try:
            return terminal.ask(question, lambda: over() or not desk.candidates())
        finally:
            redrawn.close()

    try:
        _commands(desk, terminal, ask, over, told, ending)
    finally:
        redrawn.close()


def _commands(desk: Desk, terminal: Terminal, ask: Ask, over: Callable[[], bool], told: set[str], ending: str) -> None:
    last = ""
    while not over() and desk.candidates():
        late = [one for one in desk.candidates() if one.session not in told]
        if late:
            told |= {one.session for one in late}
            places = "; ".join(f"{group.where} at {place(group.first.frame, desk.name)}" for group in grouped(late))
            terminal.write(f"other ranks have stopped: {places}\n")
        try:
            try:
                line = _command(desk, ask, last, ending)
            except KeyboardInterrupt:
                if _interrupted(desk, ask, terminal):
                    return
                continue
        except Vain:
            terminal.gone()
            return
        except EOFError:
            line = "detach"
        if line is None:
            return
        if not line.strip() and not desk.interactive:
            continue
        if line == last or not terminal.echoes:
            terminal.write(f"» {line}\n")
        last = line if line.split(" ")[0] in _AGAIN else ""
        text = desk.do(line).text
        if text:
            terminal.write(f"{text}\n")
        if desk.leave:
            return


_AGAIN = frozenset(("n", "s", "next", "step", "r", "return", "l", "list"))  # an empty line means it again, as in pdb


def _command(desk: Desk, ask: Ask, last: str, ending: str) -> str | None:
    """What was typed, whole; "" for nothing to do, None for the end."""
    line = ask(desk.prompt)
    if line.rstrip().endswith(":"):
        line = _block(line, ask)
    if desk.interactive:
        return line
    if line.strip() in ("q", "quit", "exit"):
        if ending == "close":  # frames of a failure: nothing runs that could be ended
            return None
        sure = ask(f"end the endpoints of {named(desk.focused())}, so that their calls fail? [y/N] ")
        return line if sure.strip().lower() in ("y", "yes") else ""
    return "" if line.startswith("#") else line if line.strip() else last


def _block(line: str, ask: Ask) -> str:
    """The rest of a statement that goes on, up to an empty line."""
    lines = [line]
    while True:
        more = ask("... ")
        if not more.strip():
            return "\n".join(lines) + "\n"
        lines.append(more)


def _interrupted(desk: Desk, ask: Ask, terminal: Terminal) -> bool:
    """Ctrl-C at the prompt: leave them stopped, or let them go on? True if the prompt is to end."""
    try:
        said = ask("leave them stopped (l), continue them (c), or return to the prompt (Enter)? ")
        said = said.strip().lower()
    except (KeyboardInterrupt, EOFError):
        said = "l"
    if said.startswith("c"):
        terminal.write(f"{desk.do('c all').text}\n")
        return True
    if said.startswith("l"):
        terminal.write(f"{desk.do('detach').text}\n")
        return True
    return False
