"""The controller's side: hears of stopped ranks, and sends commands to one of them, some, or all at once."""

import itertools
import logging
import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from monarch_nb.debug import records as r
from monarch_nb.debug.control.stopped import Book
from monarch_nb.debug.errors import DebugError
from monarch_nb.mesh.requests import request
from monarch_nb.runtime import Future, Runtime, runtime
from monarch_nb.runtime.features import feature
from monarch_nb.settings import settings
from monarch_nb.wire import Header, text_of

if TYPE_CHECKING:
    from monarch_nb.transport import Parcel

logger = logging.getLogger(__name__)
T = TypeVar("T")
ANSWER_S = 5.0  # beyond debug_command_timeout, for an answer to arrive
STEP_S = 2.0  # for a step to stop again, before it is said that the rank still runs


class Asking(threading.local):
    """Whether this thread waits for an answer to the debugger: no prompt opens in waits of its own."""

    now = False

    def answer(self, future: "Future[T]", timeout: float) -> T:
        """What was answered; blocks. Raises what `Future.get` does."""
        self.now = True
        try:
            return future.get(timeout)
        finally:
            self.now = False


asking = Asking()


class Controller:
    """One per process. Those that somebody else has started pass on what they hear, up to the root."""

    def __init__(self, engine: Runtime) -> None:
        self.engine = engine
        self.book = Book()
        self.breakpoints: dict[int, Breakpoint] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._leasing = False
        self.attended = False  # somebody shows in waits what is stopped
        engine.controls.update(
            {"debug.stopped": self._stopped, "debug.resumed": self._resumed, "debug.over": self._is_over}
        )
        engine.keeper.on_event.append(self._happened)

    # -- hearing (reading thread) -------------------------------------------------------------------------------------

    def _passed_on(self, header: Header, parcel: "Parcel") -> bool:
        mesh = self.engine.keeper._mesh
        if mesh is None or mesh._state.home == self.engine.address:
            return False
        self.engine.control(mesh._state.home, header.method, msgspec.msgpack.decode(parcel.frames[0]))
        return True

    def _stopped(self, header: Header, parcel: "Parcel") -> None:
        if self._passed_on(header, parcel):
            return
        record = msgspec.msgpack.decode(parcel.frames[0], type=r.Stopped)
        if not self.attended and not self.engine.is_worker:
            from monarch_nb.debug.prompt.waits import attend  # it needs this module

            attend(self)
        if record.in_the_way:  # before somebody who waits for the book looks
            self.engine.keeper.paused[record.place] = _where(record)
        self.book.stopped(record)
        self._mark(record.place)
        self.engine.keeper.event("paused", record)
        self._keep_leases()

    def _resumed(self, header: Header, parcel: "Parcel") -> None:
        if not self._passed_on(header, parcel):
            self._gone(msgspec.msgpack.decode(parcel.frames[0], type=r.Over), over=False)

    def _is_over(self, header: Header, parcel: "Parcel") -> None:
        if not self._passed_on(header, parcel):
            self._gone(msgspec.msgpack.decode(parcel.frames[0], type=r.Over), over=True)

    def _gone(self, told: r.Over, *, over: bool) -> None:
        record = self.book.get(told.session)
        self.book.over(told.session, told.why) if over else self.book.resumed(told.session)
        if record is not None:
            self._unpause(record)

    def _mark(self, place: tuple[str, int]) -> None:
        """Has a rank shown as the book has it, whichever thread has changed that last."""
        with self._lock:
            record = self.book.in_the_way(place)
            if record is None:
                self.engine.keeper.paused.pop(place, None)
            else:
                self.engine.keeper.paused[place] = _where(record)

    def _unpause(self, record: r.Stopped) -> None:
        self._mark(record.place)
        self.engine.keeper.event("resumed", record)

    def _happened(self, kind: str, about: Any) -> None:
        if kind == "exited":
            for record in self.book.lost(about.address, about.reason):
                self._unpause(record)
        elif kind == "host lost":
            for address in {one.address for one in self.book.sessions() if one.host == about}:
                for record in self.book.lost(address, f"its host {about} is lost"):
                    self._unpause(record)

    def _keep_leases(self) -> None:
        """Stopped ranks hear that somebody is there, for as long as there are any."""
        with self._lock:
            if self._leasing:
                return
            self._leasing = True

        def wait() -> None:  # the setting may change meanwhile
            self.engine.later(max(0.2, settings.debug_lease / 4), beat)

        def beat() -> None:
            with self._lock:
                addresses = {record.address for record in self.book.sessions()}
                self._leasing = bool(addresses)
            self._lease(addresses)
            if addresses and not self.engine.closed:
                wait()

        wait()

    def _lease(self, addresses: Iterable[str]) -> None:
        for address in addresses:
            try:
                self.engine.control(address, "debug.lease", r.Lease())
            except Exception:  # gone: supervision tells
                continue

    # -- commands -----------------------------------------------------------------------------------------------------

    def send(
        self, sessions: Sequence[r.Stopped], kind: r.Kind, text: str = "", *, frame: int | None = None,
        force: bool = False,
    ) -> "dict[str, Future[r.Answer]]":  # fmt: skip
        """Sends a command to each; does not block."""
        return {
            one.session: request(
                self.engine,
                one.address,
                "debug.command",
                r.Command(session=one.session, kind=kind, text=text, frame=frame, force=force),
                r.Answer,
            )
            for one in sessions
        }

    def ask(
        self, sessions: Sequence[r.Stopped], kind: r.Kind, text: str = "", *, frame: int | None = None,
        force: bool = False,
    ) -> list[r.Answer]:  # fmt: skip
        """Sends a command to each and gives their answers in that order; blocks, for a bounded time."""
        asked = self.send(sessions, kind, text, frame=frame, force=force)
        limit = settings.debug_command_timeout + ANSWER_S
        answers = [_answer(one, asked[one.session], limit) for one in sessions]
        for one, answer in zip(sessions, answers, strict=True):
            if answer.resumed:  # its own word of that may still be on its way
                if self.book.resumed(one.session, one.number):
                    self._unpause(one)
            elif answer.source:
                self.book.looked(one.session, answer.current, answer.source, answer.first)
        return answers

    def step(self, sessions: Sequence[r.Stopped], text: str, timeout: float = STEP_S) -> list[r.Answer]:
        """A pdb command that lets ranks go on and stop again: returns when they have, or after `timeout` seconds."""
        answers = self.ask(sessions, "pdb", text)
        gone = [(a.session, one.number) for a, one in zip(answers, sessions, strict=True) if a.resumed and not a.error]
        if gone and text.split(maxsplit=1)[:1] not in (["c"], ["cont"], ["continue"]):
            self.book.wait_steps(gone, timeout)
        return answers

    # -- breakpoints from outside -------------------------------------------------------------------------------------

    def set_break(self, mesh: Any, where: str, condition: str = "", *, temporary: bool = False) -> "Breakpoint":
        """Sets one in each actor of a mesh; it is looked at from the next endpoint call on. Blocks until they are
        constructed, and for their answers.

        Raises DebugError where no rank has taken it, SyntaxError for a condition that is none.
        """
        if condition:
            compile(condition, "<condition>", "eval")
        mesh.initialized.get()  # before, there is nothing in the ranks that it could be set in
        number = next(self._numbers)
        found = Breakpoint(number, where, condition, mesh, {})
        answers = self._tell_each(mesh, number, where=where, condition=condition, temporary=temporary)
        found.ranks.update(answers)
        wrong = {told.error for told in answers.values() if told.error}
        if wrong and all(told.error for told in answers.values()):
            raise DebugError(f"{where}: {'; '.join(sorted(wrong))}")
        self.breakpoints[number] = found
        return found

    def clear_break(self, number: int) -> None:
        """Takes one away again. Raises DebugError for a number that there is not."""
        found = self.breakpoints.pop(number, None)
        if found is None:
            known = ", ".join(map(str, self.breakpoints)) or "none"
            raise DebugError(f"there is no breakpoint {number}; the breakpoints are: {known}")
        self._tell_each(found.mesh, number, clear=True)

    def _tell_each(self, mesh: Any, number: int, **wish: Any) -> dict[int, r.Told]:
        state = mesh._state
        ranks = list(mesh._region.ranks())
        asked: dict[int, Future[r.Told]] = {
            rank: request(
                self.engine,
                state.procs.address(rank),
                "debug.break",
                r.Break(mesh=state.uid, rank=rank, number=number, **wish),
                r.Told,
            )
            for rank in ranks
        }
        return {rank: told_of(future) for rank, future in asked.items()}

    # -- post-mortem, freezing, stacks --------------------------------------------------------------------------------

    def autopsy(self, mesh: str, address: str, rank: int, call: str = "") -> r.Stopped:
        """Opens the frames of a failure that a rank has kept. Raises DebugError if it has not."""
        told = told_of(
            request(self.engine, address, "debug.autopsy", r.Autopsy(mesh=mesh, rank=rank, call=call), r.Told)
        )
        if told.error:
            raise DebugError(f"rank {rank}: {told.error}")
        self.book.wait(ANSWER_S, lambda: self.book.get(told.session) is not None)
        found = self.book.get(told.session)
        if found is None:
            raise DebugError(f"rank {rank}: its frames were found, but not opened within {ANSWER_S:g} s")
        return found

    def release(self, addresses: Iterable[str]) -> None:
        """Lets processes forget the frames that they have kept."""
        self._each(addresses, "debug.autopsy", r.Autopsy(mesh="", rank=0, release=True))

    def freeze(self, addresses: Iterable[str], *, on: bool) -> None:
        """Whether errors stop the ranks of these processes at the raise. Raises DebugError where that is not known."""
        self._each(addresses, "debug.freeze", r.Freeze(on))

    def _each(self, addresses: Iterable[str], verb: str, body: Any) -> None:
        asked: list[Future[r.Told]] = [request(self.engine, address, verb, body, r.Told) for address in addresses]
        wrong = [told.error for told in [told_of(one) for one in asked] if told.error]
        if wrong:
            raise DebugError("; ".join(dict.fromkeys(wrong)))

    def threads(self, addresses: Iterable[str], timeout: float = 2.0) -> dict[str, tuple[r.Thread, ...] | str]:
        """The threads of each process, or why they are not known."""
        asked: dict[str, Future[r.Threads]] = {
            a: request(self.engine, a, "debug.stacks", r.Lease(), r.Threads) for a in addresses
        }
        found: dict[str, tuple[r.Thread, ...] | str] = {}
        for address, future in asked.items():
            try:
                found[address] = asking.answer(future, timeout).threads
            except Exception as error:
                found[address] = text_of(error)
        return found


class Breakpoint:
    """A breakpoint that was set from outside."""

    def __init__(self, number: int, where: str, condition: str, mesh: Any, ranks: dict[int, r.Told]) -> None:
        self.number = number
        self.where = where
        self.condition = condition
        self.mesh = mesh
        self.ranks = ranks

    def __repr__(self) -> str:
        condition = f" if {self.condition}" if self.condition else ""
        wrong = [f"rank {rank}: {told.error}" for rank, told in self.ranks.items() if told.error]
        told = f" (not {'; '.join(wrong)})" if wrong else ""
        return f"breakpoint {self.number} at {self.where}{condition} on {self.mesh._state.name}{told}"


def _where(record: r.Stopped) -> str:
    return f"{record.frame.function}, line {record.frame.line}"


def _answer(one: r.Stopped, future: "Future[r.Answer]", limit: float) -> r.Answer:
    try:
        return asking.answer(future, limit)
    except TimeoutError:
        return r.Answer(
            session=one.session,
            error=f"no answer within {limit:g} s: it runs C code, or its process does not respond; %stacks shows more",
        )
    except Exception as error:
        return r.Answer(session=one.session, error=text_of(error), resumed=True)


def told_of(future: "Future[r.Told]") -> r.Told:
    """What was answered, or why nothing was."""
    try:
        return asking.answer(future, settings.debug_command_timeout)
    except Exception as error:
        return r.Told(error=text_of(error))


def controller() -> Controller:
    """That of this process."""
    service = feature(runtime(), "debug")
    found: Controller = service.controller
    return found
