"""Records of the live tensors and collectives of one mesh, for displays.

The records are written on the hot path, so only existing objects are stored; the rest is computed on demand. Nothing
here sends or waits.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from monarch_nb.tensor.origin import CallSite, ProgramLine, origin_of
from monarch_nb.tensor.propagation import Collective, Meta, OperationPlan
from monarch_nb.tensor.references import LiveEntry

Calls = Counter[tuple[CallSite | None, str, tuple[Collective, ...]]]  # by line, operation and its collectives


@dataclass(frozen=True)
class LiveTensor:
    """A tensor with a handle. `number` identifies it on the workers, `origin` is the line that made it."""

    number: int
    meta: Meta
    origin: ProgramLine | None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return self.meta.shape

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor, once."""
        return self.meta.nbytes


@dataclass(frozen=True)
class Moved:
    """Collectives of one kind that one line has issued since the record was cleared: their number and bytes.

    `nbytes` counts the input of each rank, of the largest shard.
    """

    origin: ProgramLine | None
    operation: str
    collective: str
    dimension: str
    count: int
    nbytes: int


@dataclass(frozen=True)
class Synchronised:
    """Number of waits of a line for the workers since the record was cleared, and the operation (`item`, …)."""

    origin: ProgramLine | None
    what: str
    count: int


class TensorTable:
    """Records of one mesh, written by the thread that issues operations and read by any."""

    def __init__(self) -> None:
        self.entries: dict[int, LiveEntry] = {}  # by number
        self._calls: Calls = Counter()
        self._repeated: dict[int, tuple[Calls, int]] = {}  # those of compiled steps, and the numbers of their runs
        self._syncs: Counter[tuple[CallSite | None, str]] = Counter()
        self.cell = 0  # grows with each `clear`

    def moved(self, site: CallSite | None, plan: OperationPlan) -> None:
        """Records a call of a plan that has collectives."""
        self._calls[site, plan.operation, plan.collectives] += 1

    @property
    def calls(self) -> Calls:
        """Calls with collectives since `clear`, without those of compiled steps."""
        return self._calls.copy()

    def moved_again(self, calls: Calls) -> None:
        """Records that a compiled step has made all these calls, which must not change."""
        self._repeated[id(calls)] = (calls, self._repeated.get(id(calls), (calls, 0))[1] + 1)

    def synchronised(self, site: CallSite | None, operation: str) -> None:
        """Records that a line waits for the workers."""
        self._syncs[site, operation] += 1

    def live(self) -> list[LiveTensor]:
        """Returns tensors with handles, oldest first."""
        entries = tuple(self.entries.values())
        return [
            LiveTensor(entry.number, entry.meta, origin_of(entry.call_site)) for entry in entries if entry() is not None
        ]

    def movements(self) -> list[Moved]:
        """Returns collectives by line since `clear`, in order of the first."""
        by_line: dict[tuple[ProgramLine | None, str, str, str], tuple[int, int]] = {}
        total = self.calls
        for calls, times in tuple(self._repeated.values()):
            for call, count_per_call in calls.items():
                total[call] += count_per_call * times
        for (site, operation, collectives), times in total.items():
            for collective in collectives:
                key = (origin_of(site), operation, collective.kind, collective.dim)
                count, nbytes = by_line.get(key, (0, 0))
                by_line[key] = (count + times, nbytes + times * collective.nbytes)
        return [Moved(*key, *sums) for key, sums in by_line.items()]

    def synchronisations(self) -> list[Synchronised]:
        """Returns waits by line since `clear`."""
        return list(self._waits())

    def _waits(self) -> Iterator[Synchronised]:
        for (site, operation), count in tuple(self._syncs.items()):
            yield Synchronised(origin_of(site), operation, count)

    def clear(self) -> None:
        """Clears the records for a new cell; live tensors stay."""
        self._calls.clear()
        self._repeated.clear()
        self._syncs.clear()
        self.cell += 1
