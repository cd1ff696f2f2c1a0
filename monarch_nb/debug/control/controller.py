"""The controller's side: collects stopped ranks, sends commands to some or all, and sets breakpoints from outside."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import msgspec

from monarch_nb.debug import verbs
from monarch_nb.debug.control.stopped_threads import StoppedThreads
from monarch_nb.debug.records import DebugError, Motion, Over, Stopped, ThreadRecord
from monarch_nb.mesh import AnyMesh, region_of, state_of
from monarch_nb.mesh.mesh_events import Event, HostLost, MeshEvents, MeshStopped, ProcExited, RankPaused, RankResumed
from monarch_nb.mesh.registry import MeshRegistry
from monarch_nb.mesh.requests import ask_ranks, request
from monarch_nb.runtime import Future, MeshState, ProcState, Runtime, pending_future, proc_state_of, resolve_future
from monarch_nb.settings import settings
from monarch_nb.store import describe
from monarch_nb.wire import Asker, Done, Verb, host_name, text_of

PLACING_S = 3.0  # for processes to take breakpoints; slower ones take them later
ANSWER_S = 5.0  # in addition to debug_command_timeout, for an answer to arrive
STEP_S = 2.0  # for a step to stop again, before the rank is reported as running
T = TypeVar("T")
Q = TypeVar("Q", bound=msgspec.Struct)


class Asking(threading.local):
    """Marks threads that wait for an answer to the debugger."""

    waiting = False

    def answer(self, future: "Future[T]", timeout: float) -> T:
        """Returns the answer; blocks. Raises what `Future.get` does."""
        self.waiting = True
        try:
            return future.get(timeout)
        finally:
            self.waiting = False


asking = Asking()


def outcome_of(future: "Future[verbs.CommandOutcome]") -> verbs.CommandOutcome:
    """Returns the outcome, or an outcome with the error."""
    try:
        return asking.answer(future, settings.debug_command_timeout)
    except Exception as error:
        return verbs.CommandOutcome(error=text_of(error))


class Breakpoint:
    """A breakpoint that was set from outside."""

    def __init__(
        self, number: int, where: str, condition: str, mesh: AnyMesh, ranks: dict[int, verbs.CommandOutcome]
    ) -> None:
        self.number = number
        self.where = where
        self.condition = condition
        self.mesh = mesh
        self.ranks = ranks

    def __repr__(self) -> str:
        condition = f" if {self.condition}" if self.condition else ""
        errors = [f"rank {rank}: {outcome.error}" for rank, outcome in self.ranks.items() if outcome.error]
        refusals = f" (not {'; '.join(errors)})" if errors else ""
        return f"breakpoint {self.number} at {self.where}{condition} on {state_of(self.mesh).name}{refusals}"


class Breakpoints:
    """The breakpoints of one controller, by number."""

    def __init__(self, runtime: Runtime, apply_locally: Callable[[str, verbs.BreakSet], int]) -> None:
        """`apply_locally` sets breakpoints for all actors in those of this process."""
        self._runtime = runtime
        self._apply_locally = apply_locally
        self._setting = threading.Lock()
        self._version = 0
        self._by_number: dict[int, Breakpoint] = {}
        self._adding = threading.Lock()
        self._last = 0

    def __iter__(self) -> Iterator[Breakpoint]:
        return iter(tuple(self._by_number.values()))

    def set(
        self,
        mesh: AnyMesh,
        where: str,
        condition: str = "",
        *,
        hit_condition: str = "",
        log: str = "",
        temporary: bool = False,
    ) -> Breakpoint:
        """Sets one in each actor of a mesh, or, for processes, in their cells and all their actors; it takes
        effect from the next endpoint call or cell on. Blocks until they are constructed, and for their answers.

        Raises DebugError where no rank has taken it, SyntaxError for a condition that is none.
        """
        if condition:
            compile(condition, "<condition>", "eval")
        mesh.initialized.get()  # the ranks have no actors before
        with self._adding:
            number = self._last + 1
            command = verbs.Break(
                mesh=state_of(mesh).uid,
                rank=0,
                number=number,
                where=where,
                condition=condition,
                hit_condition=hit_condition,
                log=log,
                temporary=temporary,
            )
            outcomes = self._send_each(mesh, command)
            wrong = {outcome.error for outcome in outcomes.values() if outcome.error}
            if wrong and all(outcome.error for outcome in outcomes.values()):
                raise DebugError(f"{where}: {'; '.join(sorted(wrong))}")
            self._last = number  # the number of a refused breakpoint is used again
            added = self._by_number[number] = Breakpoint(number, where, condition, mesh, outcomes)
            return added

    def clear(self, number: int) -> None:
        """Removes a breakpoint. Raises DebugError for an unknown number."""
        cleared = self._by_number.pop(number, None)
        if cleared is None:
            numbers = ", ".join(map(str, self._by_number)) or "none"
            raise DebugError(f"there is no breakpoint {number}; the breakpoints are: {numbers}")
        mesh = cleared.mesh
        self._send_each(mesh, verbs.Break(mesh=state_of(mesh).uid, rank=0, number=number, clear=True))

    def _send_each(self, mesh: AnyMesh, command: verbs.Break) -> dict[int, verbs.CommandOutcome]:
        state: MeshState = state_of(mesh)
        procs = proc_state_of(state)
        uids = [state.uid, *(state.actors if isinstance(state, ProcState) else ())]
        replies: dict[int, list[Future[verbs.CommandOutcome]]] = {}
        for uid in uids:
            mesh_state = self._runtime.meshes[uid]
            if mesh_state.stopped is not None:
                continue
            for rank in set(region_of(mesh).ranks()) & set(mesh_state.region.ranks()):
                message = msgspec.structs.replace(command, mesh=uid, rank=rank)
                replies.setdefault(rank, []).append(request(self._runtime, procs.address(rank), verbs.BREAK, message))
        outcomes = {rank: [outcome_of(future) for future in replies[rank]] for rank in sorted(replies)}
        # A rank has the breakpoint if any of its actors has it.
        return {
            rank: next((outcome for outcome in outcomes_of if not outcome.error), outcomes_of[0])
            for rank, outcomes_of in outcomes.items()
        }

    def set_everywhere(
        self,
        lines: Sequence[verbs.BreakLine],
        *,
        raised: str | None = None,
        uncaught: str | None = None,
        release: bool = False,
    ) -> dict[str, str]:
        """Replaces the breakpoints that a front end with a gutter has in all actors, present and future. `raised` and
        `uncaught` are the ranks that stop where exceptions are raised, or where an endpoint fails: "" for all, None
        for none. With `release` all stopped ranks resume, and running steps do not stop again. Blocks for the answers,
        at most `PLACING_S`; returns the addresses of processes that have not answered, with the reasons.
        """
        with self._setting:
            self._version += 1
            breaks = verbs.BreakSet(
                version=self._version, lines=tuple(lines), raised=raised, uncaught=uncaught, release=release
            )
            self._apply_locally(self._runtime.address, breaks)
            replies = {dst: request(self._runtime, dst, verbs.BREAK_SET, breaks) for dst in self._addresses()}
        until = time.monotonic() + PLACING_S
        wrong: dict[str, str] = {}
        for address, future in replies.items():
            try:
                asking.answer(future, max(0.0, until - time.monotonic()))
            except Exception as error:
                wrong[address] = text_of(error)
        return wrong

    def pause(self, actors: Sequence[tuple[str, int]] = ()) -> str:
        """Stops actors (all, if none are named) at their next traced line; returns the reason if none will stop."""
        command = verbs.Pause(actors=tuple(actors))
        replies = [request(self._runtime, address, verbs.PAUSE, command) for address in self._addresses()]
        outcomes = [outcome_of(future) for future in replies]
        errors = dict.fromkeys(outcome.error for outcome in outcomes if outcome.error)
        return "" if any(not outcome.error for outcome in outcomes) else "; ".join(errors)

    def _addresses(self) -> list[str]:
        """Returns all processes that may hold actors, except this one and failed ones."""
        addresses = []
        for state in tuple(self._runtime.meshes.values()):
            if isinstance(state, ProcState) and state.stopped is None:
                failed = {view.rank for view in describe(state).having("failed")}
                addresses += [state.address(rank) for rank in state.region.ranks() if rank not in failed]
        return [address for address in dict.fromkeys(addresses) if address != self._runtime.address]


class Controller:
    """One per process. Processes that another one has started forward their messages to the root."""

    def __init__(
        self,
        runtime: Runtime,
        *,
        attend: "Callable[[Controller], None]" = lambda controller: None,
        apply_locally: Callable[[str, verbs.BreakSet], int] = lambda src, breaks: 0,
    ) -> None:
        """`attend` is called when something stops and no wait shows it yet, to install a prompt; `apply_locally`
        sets breakpoints for all actors in those of this process.
        """
        self.runtime = runtime
        self.stopped = StoppedThreads()
        self.breakpoints = Breakpoints(runtime, apply_locally)
        self._attended = False  # waits show stopped ranks
        self._attend = attend
        self._lock = threading.Lock()
        self._leasing = False
        runtime.verbs.handle(verbs.STOPPED, self._is_stopped)
        runtime.verbs.handle(verbs.RESUMED, self._is_resumed)
        runtime.verbs.handle(verbs.OVER, self._is_over)
        runtime.part(MeshEvents).listeners.append(self._on_mesh_event)

    def mark_attended(self) -> None:
        """Records that waits show stopped ranks."""
        self._attended = True

    # -- messages of ranks (reading thread) ---------------------------------------------------------------------------

    def _forwarded(self, verb: Verb[Q, None], message: Q) -> bool:
        home = self.runtime.part(MeshRegistry).started_by
        if home in ("", self.runtime.address):
            return False
        self.runtime.post(home, verb, message)
        return True

    def _is_stopped(self, record: Stopped, asker: Asker[None]) -> None:
        if self._forwarded(verbs.STOPPED, record):
            return
        if not self._attended and not self.runtime.is_worker:
            self._attend(self)
        self.stopped.add(record)
        self.runtime.part(MeshEvents).publish(_paused(record))
        self._keep_leases()

    def _is_resumed(self, message: Over, asker: Asker[None]) -> None:
        if not self._forwarded(verbs.RESUMED, message):
            self._report_resumed(self.stopped.resume(message.session))

    def _is_over(self, message: Over, asker: Asker[None]) -> None:
        if not self._forwarded(verbs.OVER, message):
            self._report_resumed(self.stopped.end(message.session, message.why))

    def _report_resumed(self, record: Stopped | None) -> None:
        if record is not None:
            self.runtime.part(MeshEvents).publish(RankResumed(record.session))

    def _on_mesh_event(self, event: Event) -> None:
        match event:
            case ProcExited(address, reason):
                self._lose(address, reason)
            case HostLost(host):
                for address in {record.address for record in self.stopped.records() if record.host == host}:
                    self._lose(address, f"its host {host_name(host)} is lost")
            case MeshStopped(ProcState() as state) if state.stopped is not None and self.stopped.any:
                # The mesh may live on: its ranks report to their new owner.
                meshes = {state.uid, *state.actors}
                addresses = {state.address(rank) for rank in state.region.ranks()}
                for record in self.stopped.records():
                    if record.mesh in meshes or record.address in addresses:
                        self._report_resumed(self.stopped.end(record.session, state.stopped))
            case _:
                return

    def _lose(self, address: str, reason: str) -> None:
        for record in self.stopped.lose(address, reason):
            self._report_resumed(record)

    def _keep_leases(self) -> None:
        """Renews the leases of stopped ranks, while there are any."""
        with self._lock:
            if self._leasing:
                return
            self._leasing = True

        def wait() -> None:  # the setting may change meanwhile
            self.runtime.later(max(0.2, settings.debug_lease / 4), beat)

        def beat() -> None:
            with self._lock:
                addresses = {record.address for record in self.stopped.records()}
                self._leasing = bool(addresses)
            self._lease(addresses)
            if addresses and not self.runtime.closed:
                wait()

        wait()

    def _lease(self, addresses: Iterable[str]) -> None:
        for address in addresses:
            try:
                self.runtime.post(address, verbs.LEASE, verbs.RenewLease())
            except Exception:  # the process has ended: supervision reports it
                continue

    # -- commands -----------------------------------------------------------------------------------------------------

    def ask(self, records: Sequence[Stopped], command: verbs.Command) -> list[verbs.CommandAnswer]:
        """Sends a command to each session and returns their answers in that order; blocks, for a bounded time."""
        verb = verbs.COMMANDS[type(command)]
        replies: list[Future[verbs.CommandAnswer]] = [
            request(self.runtime, record.address, verb, msgspec.structs.replace(command, session=record.session))
            for record in records
        ]
        limit = settings.debug_command_timeout + ANSWER_S
        answers = [_answer(record, future, limit) for record, future in zip(records, replies, strict=True)]
        for record, answer in zip(records, answers, strict=True):
            if answer.resumed:  # its RESUMED message may still be on its way
                self._report_resumed(self.stopped.resume(record.session, record.number))
            elif answer.source:
                self.stopped.look(record.session, answer.current, answer.source, answer.first)
        return answers

    def evaluate(self, records: Sequence[Stopped], expression: str) -> list[verbs.CommandAnswer]:
        """Values of an expression in the selected frame of each session."""
        return self.ask(records, verbs.Evaluate(session="", text=expression, much=True))

    def go(
        self, records: Sequence[Stopped], motion: Motion = "continue", line: int | None = None
    ) -> list[verbs.CommandAnswer]:
        """Resumes each session; does not wait for the end of a step."""
        return self.ask(records, verbs.Go(session="", motion=motion, line=line))

    def await_stops(
        self, records: Sequence[Stopped], answers: Sequence[verbs.CommandAnswer], timeout: float = STEP_S
    ) -> None:
        """Blocks until sessions that step have stopped again or will not, for at most `timeout` seconds."""
        resumed = [
            (answer.session, record.number)
            for answer, record in zip(answers, records, strict=True)
            if answer.resumed and not answer.error
        ]
        if resumed:
            self.stopped.wait_steps(resumed, timeout)

    # -- post-mortem, freezing, stacks --------------------------------------------------------------------------------

    def autopsy(self, mesh: str, address: str, rank: int, call: str = "") -> Stopped:
        """Opens the frames of a failure that a rank has stored. Raises DebugError if there are none."""
        command = verbs.Autopsy(mesh=mesh, rank=rank, call=call)
        outcome = outcome_of(request(self.runtime, address, verbs.AUTOPSY, command))
        if outcome.error:
            raise DebugError(f"rank {rank}: {outcome.error}")
        self.stopped.wait(ANSWER_S, lambda: self.stopped.get(outcome.session) is not None)
        record = self.stopped.get(outcome.session)
        if record is None:
            raise DebugError(f"rank {rank}: its frames were found, but not opened within {ANSWER_S:g} s")
        return record

    def release(self, addresses: Iterable[str]) -> None:
        """Discards the frames of failures that processes have stored."""
        self._command_all(addresses, verbs.AUTOPSY, verbs.Autopsy(mesh="", rank=0, release=True))

    def freeze(self, addresses: Iterable[str], *, on: bool) -> None:
        """Sets whether errors stop the ranks of these processes where they are raised. Raises DebugError on refusal."""
        self._command_all(addresses, verbs.FREEZE, verbs.Freeze(on))

    def _command_all(self, addresses: Iterable[str], verb: Verb[Q, verbs.CommandOutcome], body: Q) -> None:
        replies = [request(self.runtime, address, verb, body) for address in addresses]
        wrong = [outcome.error for outcome in [outcome_of(future) for future in replies] if outcome.error]
        if wrong:
            raise DebugError("; ".join(dict.fromkeys(wrong)))

    def threads(self, addresses: Iterable[str], timeout: float = 2.0) -> dict[str, tuple[ThreadRecord, ...] | str]:
        """Returns the threads of each process, or why they are unknown."""
        replies = {address: request(self.runtime, address, verbs.STACKS, Done()) for address in addresses}
        by_address: dict[str, tuple[ThreadRecord, ...] | str] = {}
        for address, future in replies.items():
            try:
                by_address[address] = asking.answer(future, timeout).threads
            except Exception as error:
                by_address[address] = text_of(error)
        return by_address

    def variables(self, state: MeshState, ranks: Sequence[int], within: float) -> dict[int, verbs.NamespaceVariables]:
        """Returns the variables that cells on each rank see, by base rank; blocks for at most `within` seconds.

        Ranks that are busy or stopped answer, too; those that have not answered within that time are left out.
        """
        future: Future[dict[int, verbs.NamespaceVariables]] = pending_future()
        ask_ranks(
            self.runtime,
            proc_state_of(state),
            ranks,
            verbs.NAMESPACE,
            verbs.ReadNamespace(state.uid),
            lambda answers, _: resolve_future(future, dict(answers)),
            within=within,
        )
        return asking.answer(future, within + ANSWER_S)


def _paused(record: Stopped) -> RankPaused:
    frame = record.frame
    return RankPaused(
        record.session,
        record.mesh,
        record.rank,
        record.name,
        frame.file,
        frame.line,
        frame.function,
        record.since,
        record.blocks_actor,
    )


def _answer(record: Stopped, future: "Future[verbs.CommandAnswer]", limit: float) -> verbs.CommandAnswer:
    try:
        return asking.answer(future, limit)
    except TimeoutError:
        return verbs.CommandAnswer(
            session=record.session,
            error=f"no answer within {limit:g} s: it runs C code, or its process does not respond; %stacks shows more",
        )
    except Exception as error:
        return verbs.CommandAnswer(session=record.session, error=text_of(error), resumed=True)
