"""The cluster's stopped ranks, as the adapter needs them: the one that a front end shows, the other ones as further
threads, and commands to them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from monarch_nb.debug import Stopped, verbs
from monarch_nb.debug.control import Controller
from monarch_nb.debug.render import FileName, StackGroup, grouped, named, short
from monarch_nb.debug.service import controller_of
from monarch_nb.runtime import Runtime

LEAD = 1  # the thread number of the rank in focus, the only one that front ends always have


class ClusterRanks:
    """Ranks of the current runtime: there is a new one after shutdown_context()."""

    def __init__(self, runtime: Callable[[], Runtime | None]) -> None:
        self._runtime = runtime

    @property
    def controller(self) -> Controller | None:
        """The controller; None while this process is in no cluster."""
        runtime = self._runtime()
        return controller_of(runtime) if runtime is not None and not runtime.closed else None

    def records(self) -> list[Stopped]:
        """Returns all stopped threads."""
        controller = self.controller
        return controller.stopped.records() if controller is not None else []

    def ask(self, records: Sequence[Stopped], command: verbs.Command) -> list[verbs.CommandAnswer]:
        """Sends a command to each record; blocks for the answers."""
        controller = self.controller
        if controller is None:
            return [
                verbs.CommandAnswer(session=record.session, error="the cluster was left", resumed=True)
                for record in records
            ]
        return controller.ask(records, command)

    def arm(self, lines: Sequence[verbs.BreakLine], raised: str | None, uncaught: str | None) -> None:
        """Replaces the breakpoints of all actors."""
        controller = self.controller
        if controller is not None:
            controller.breakpoints.set_everywhere(lines, raised=raised, uncaught=uncaught)

    def release(self) -> None:
        """Removes all breakpoints of actors and resumes all ranks. Blocks until that is done, for a bounded time."""
        controller = self.controller
        if controller is None:
            return
        controller.breakpoints.set_everywhere((), release=True)
        stopped = [record for record in controller.stopped.records() if record.blocks_actor]
        if stopped:  # their messages that they have resumed may still be on the way
            controller.ask(stopped, verbs.Go(session="", force=True))

    def pause(self) -> str:
        """Stops running actors at their next line; returns the reason if none will stop."""
        controller = self.controller
        return controller.breakpoints.pause() if controller is not None else "this process is in no cluster"


@dataclass(frozen=True)
class ThreadOfRanks:
    """Ranks that a front end shows as one thread."""

    number: int
    name: str
    records: tuple[Stopped, ...]


class Focus:
    """The rank in focus. Commands go to all ranks at the same location, or to this rank alone if it is pinned."""

    def __init__(self, file_name: FileName = short) -> None:
        self._file_name = file_name  # display name of a file
        self._lead = ""  # its session
        self._stop = 0
        self._actor: tuple[str, int] = ("", 0)
        self._peers: frozenset[str] = frozenset()  # sessions of ranks at the same location
        self.pinned = False

    def lead(self, records: Sequence[Stopped]) -> Stopped | None:
        """Returns the rank in focus, None if it is not stopped."""
        return next((record for record in records if record.session == self._lead), None)

    def group(self, records: Sequence[Stopped]) -> tuple[Stopped, ...]:
        """Ranks at the location of the rank in focus, which comes first."""
        lead = self.lead(records)
        if lead is None:
            return ()
        peers = next(group.records for group in grouped(records) if lead in group.records)
        return (lead, *(record for record in peers if record is not lead))

    def targets(self, records: Sequence[Stopped], thread: int) -> tuple[Stopped, ...]:
        """Ranks that a command for a thread goes to."""
        if thread == LEAD:
            group = self.group(records)
            return group[:1] if self.pinned else group
        return next((group.records for group in self.threads(records) if group.number == thread), ())

    def threads(self, records: Sequence[Stopped]) -> list[ThreadOfRanks]:
        """Returns the rank in focus, then other ranks at its location, then the other groups."""
        lead = self.lead(records)
        parts: list[tuple[Stopped, ...]] = [] if lead is None else [(lead,)]
        for group in grouped(records):
            rest = tuple(record for record in group.records if record is not lead)
            if rest:
                parts.insert(1 if lead in group.records else len(parts), rest)
        first = LEAD if lead is not None else LEAD + 1
        return [ThreadOfRanks(number, self.title(part), part) for number, part in enumerate(parts, first)]

    def title(self, records: Sequence[Stopped]) -> str:
        """`trainers gpus=1-7 · train.py:42`."""
        frame = records[0].frame
        threads = StackGroup(tuple(records)).thread
        thread = f", thread {threads}" if threads else ""
        return f"{named(records)}{thread} · {self._file_name(frame.file)}:{frame.line}"

    # -- movement -----------------------------------------------------------------------------------------------------

    def move(self, record: Stopped, *, pinned: bool) -> None:
        """Moves the focus to this rank."""
        self._lead, self._stop, self._actor = record.session, 0, record.place
        self.pinned = pinned

    def settle(self, records: Sequence[Stopped]) -> Stopped | None:
        """Updates the focus after a rank has stopped or resumed. Returns the rank in focus if front ends need an event,
        because it is a different rank or has stopped again. If it has resumed, its peers come next, then the largest
        group.
        """
        lead = self.lead(records)
        if lead is None:
            same_actor = [record for record in records if record.place == self._actor and record.blocks_actor]
            peers = [record for record in records if record.session in self._peers]
            groups = sorted(grouped(records), key=lambda group: -len(group.records))
            if not same_actor and self.pinned:
                return None
            lead = next(iter([*same_actor, *peers, *(group.first for group in groups)]), None)
        if lead is None:
            return None
        changed = (lead.session, lead.number) != (self._lead, self._stop)
        self._lead, self._stop, self._actor = lead.session, lead.number, lead.place
        self._peers = frozenset(record.session for record in self.group(records))
        return lead if changed else None

    def has_resumed(self, records: Sequence[Stopped]) -> bool:
        """True once after the rank that front ends show as stopped has resumed."""
        if not self._stop or self.lead(records) is not None:
            return False
        self._stop = 0
        return True
