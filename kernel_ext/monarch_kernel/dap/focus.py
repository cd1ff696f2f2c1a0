"""Which of the stopped ranks a front end looks at, and the others as its further threads. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from monarch_nb.debug import Stopped
from monarch_nb.debug.render import FileName, Group, grouped, named, short

LEAD = 1  # the thread of the rank that is looked at: front ends have no other one


@dataclass(frozen=True)
class Thread:
    """Ranks as one thread of a front end."""

    number: int
    name: str
    records: tuple[Stopped, ...]


class Focus:
    """One rank is looked at; commands go to all that are where it is, or to it alone if it is pinned."""

    def __init__(self, name: FileName = short) -> None:
        self._name = name  # what people call a file
        self._lead = ""  # its session
        self._stop = 0
        self._place: tuple[str, int] = ("", 0)  # its actor
        self._peers: frozenset[str] = frozenset()  # the sessions that were where it was
        self.pinned = False

    def lead(self, records: Sequence[Stopped]) -> Stopped | None:
        """The rank that is looked at, if it stands."""
        return next((record for record in records if record.session == self._lead), None)

    def group(self, records: Sequence[Stopped]) -> tuple[Stopped, ...]:
        """Those that are where it is, itself first."""
        lead = self.lead(records)
        if lead is None:
            return ()
        peers = next(group.records for group in grouped(records) if lead in group.records)
        return (lead, *(record for record in peers if record is not lead))

    def meant(self, records: Sequence[Stopped], thread: int) -> tuple[Stopped, ...]:
        """To whom a command for a thread goes."""
        if thread == LEAD:
            group = self.group(records)
            return group[:1] if self.pinned else group
        return next((each.records for each in self.threads(records) if each.number == thread), ())

    def threads(self, records: Sequence[Stopped]) -> list[Thread]:
        """The rank that is looked at, then the others that are where it is, then the other groups."""
        lead = self.lead(records)
        parts: list[tuple[Stopped, ...]] = [] if lead is None else [(lead,)]
        for group in grouped(records):
            rest = tuple(record for record in group.records if record is not lead)
            if rest:
                parts.insert(1 if lead in group.records else len(parts), rest)
        first = LEAD if lead is not None else LEAD + 1
        return [Thread(number, self.title(part), part) for number, part in enumerate(parts, first)]

    def title(self, records: Sequence[Stopped]) -> str:
        """`trainers gpus=1-7 · train.py:42`."""
        at = records[0].frame
        threads = Group(tuple(records)).thread
        thread = f", thread {threads}" if threads else ""
        return f"{named(records)}{thread} · {self._name(at.file)}:{at.line}"

    # -- how it moves -------------------------------------------------------------------------------------------------

    def move(self, record: Stopped, *, pinned: bool) -> None:
        """Looks at this rank from now on."""
        self._lead, self._stop, self._place = record.session, 0, record.place
        self.pinned = pinned

    def settle(self, records: Sequence[Stopped]) -> Stopped | None:
        """After something has stopped or gone on: the rank that is looked at if front ends have to hear of it, since
        it is another one, or stands anew. Where it has gone on, those that were with it come next, then the most.
        """
        lead = self.lead(records)
        if lead is None:
            again = [record for record in records if record.place == self._place and record.in_the_way]
            peers = [record for record in records if record.session in self._peers]
            groups = sorted(grouped(records), key=lambda group: -len(group.records))
            if not again and self.pinned:
                return None
            lead = next(iter([*again, *peers, *(group.first for group in groups)]), None)
        if lead is None:
            return None
        changed = (lead.session, lead.number) != (self._lead, self._stop)
        self._lead, self._stop, self._place = lead.session, lead.number, lead.place
        self._peers = frozenset(record.session for record in self.group(records))
        return lead if changed else None

    def has_gone(self, records: Sequence[Stopped]) -> bool:
        """Whether the rank that front ends were told of stands no more; they are to be told once."""
        if not self._stop or self.lead(records) is not None:
            return False
        self._stop = 0
        return True
