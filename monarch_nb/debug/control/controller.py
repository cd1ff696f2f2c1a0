"""The controller's side: collects stopped ranks, and sends commands to one of them, some, or all at once."""

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import msgspec

from monarch_nb.debug import messages as m
from monarch_nb.debug import verbs
from monarch_nb.debug.control.asking import ANSWER_S, asking, outcome_of
from monarch_nb.debug.control.breakpoints import Breakpoints
from monarch_nb.debug.control.stopped_threads import StoppedThreads
from monarch_nb.debug.errors import DebugError
from monarch_nb.debug.records import Motion, Over, Stopped, ThreadRecord
from monarch_nb.mesh.mesh_events import Event, HostLost, MeshEvents, MeshStopped, ProcExited, RankPaused, RankResumed
from monarch_nb.mesh.registry import MeshRegistry
from monarch_nb.mesh.requests import ask_ranks, request
from monarch_nb.runtime import Future, MeshState, ProcState, Runtime, pending_future, proc_state_of, resolve_future
from monarch_nb.settings import settings
from monarch_nb.wire import Asker, Done, Verb, host_name, text_of

Q = TypeVar("Q", bound=msgspec.Struct)
STEP_S = 2.0  # for a step to stop again, before the rank is reported as running


class Controller:
    """One per process. Processes that another one has started forward their messages to the root."""

    def __init__(
        self,
        runtime: Runtime,
        *,
        attend: "Callable[[Controller], None]" = lambda controller: None,
        apply_locally: Callable[[str, m.BreakSet], int] = lambda src, breaks: 0,
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
                self.runtime.post(address, verbs.LEASE, m.RenewLease())
            except Exception:  # the process has ended: supervision reports it
                continue

    # -- commands -----------------------------------------------------------------------------------------------------

    def ask(self, records: Sequence[Stopped], command: m.Command) -> list[m.CommandAnswer]:
        """Sends a command to each session and returns their answers in that order; blocks, for a bounded time."""
        verb = verbs.COMMANDS[type(command)]
        replies: list[Future[m.CommandAnswer]] = [
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

    def evaluate(self, records: Sequence[Stopped], expression: str) -> list[m.CommandAnswer]:
        """Values of an expression in the selected frame of each session."""
        return self.ask(records, m.Evaluate(session="", text=expression, much=True))

    def go(
        self, records: Sequence[Stopped], motion: Motion = "continue", line: int | None = None
    ) -> list[m.CommandAnswer]:
        """Resumes each session; does not wait for the end of a step."""
        return self.ask(records, m.Go(session="", motion=motion, line=line))

    def await_stops(
        self, records: Sequence[Stopped], answers: Sequence[m.CommandAnswer], timeout: float = STEP_S
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
        command = m.Autopsy(mesh=mesh, rank=rank, call=call)
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
        self._command_all(addresses, verbs.AUTOPSY, m.Autopsy(mesh="", rank=0, release=True))

    def freeze(self, addresses: Iterable[str], *, on: bool) -> None:
        """Sets whether errors stop the ranks of these processes where they are raised. Raises DebugError on refusal."""
        self._command_all(addresses, verbs.FREEZE, m.Freeze(on))

    def _command_all(self, addresses: Iterable[str], verb: Verb[Q, m.CommandOutcome], body: Q) -> None:
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

    def variables(self, state: MeshState, ranks: Sequence[int], within: float) -> dict[int, m.NamespaceVariables]:
        """Returns the variables that cells on each rank see, by base rank; blocks for at most `within` seconds.

        Ranks that are busy or stopped answer, too; those that have not answered within that time are left out.
        """
        future: Future[dict[int, m.NamespaceVariables]] = pending_future()
        ask_ranks(
            self.runtime,
            proc_state_of(state),
            ranks,
            verbs.NAMESPACE,
            m.ReadNamespace(state.uid),
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


def _answer(record: Stopped, future: "Future[m.CommandAnswer]", limit: float) -> m.CommandAnswer:
    try:
        return asking.answer(future, limit)
    except TimeoutError:
        return m.CommandAnswer(
            session=record.session,
            error=f"no answer within {limit:g} s: it runs C code, or its process does not respond; %stacks shows more",
        )
    except Exception as error:
        return m.CommandAnswer(session=record.session, error=text_of(error), resumed=True)
