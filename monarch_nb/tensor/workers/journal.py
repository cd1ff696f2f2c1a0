"""The recent operations of one stream in one worker: the tensors that they make and write to."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence

from monarch_nb.tensor.commands import FREE, NUMBER, OBJECT, OWN, REPLAY, SHARDS, WHOLE, CallRemote, Name, Number
from monarch_nb.tensor.workers.plans import PlanSignature

REQUESTS = frozenset({WHOLE, NUMBER, SHARDS})
JOURNAL_LENGTH = 8192  # operations; more than ranks can be apart, which the controller's window limits


def _effects(command: object) -> tuple[Sequence[Number], Sequence[Number]]:
    """Returns the tensors that a command makes, and those that it writes to."""
    if isinstance(command, CallRemote | Name):
        return command.results, getattr(command, "writes", ())
    result = getattr(command, "result", None)
    return () if result is None else (result,), ()


class BatchJournal:
    """Recent batches of one stream. `plans` are the plans that it uses."""

    def __init__(self, plans: Mapping[Number, PlanSignature]) -> None:
        self._plans = plans
        self._steps: deque[tuple[int, int, Sequence[Number], Sequence[Number]]] = deque()
        self._batches: deque[tuple[int, Sequence[Number], tuple[tuple[Sequence[Number], Sequence[Number]], ...]]]
        self._batches = deque()

    def note(self, first: int, numbers: Sequence[Number], objects: Sequence[object]) -> None:
        """Adds a batch that begins with operation `first`."""
        self._batches.append((first, numbers, tuple(map(_effects, objects))))
        while self._batches[0][0] < first - JOURNAL_LENGTH:
            self._batches.popleft()

    def replayed(self, first: int, count: int, results: Sequence[Number], targets: Sequence[Number]) -> None:
        """Adds a compiled step of `count` operations that has begun or was skipped."""
        self._steps.append((first, first + count, results, targets))
        while self._steps[0][0] < first - JOURNAL_LENGTH:
            self._steps.popleft()

    def touched(self, start: int, stop: int) -> tuple[set[Number], set[Number]]:
        """Returns tensors that operations in [start, stop) make, and those they write to, without freed ones."""
        outputs: set[Number] = set()
        written: set[Number] = set()
        freed: set[Number] = set()
        for number, results, targets in self._operations():
            if number is None:
                freed.update(results)
            elif start <= number < stop:
                outputs.update(results)
                written.update(targets)
        for begin, end, results, targets in self._steps:
            if begin < stop and start < end:  # the whole step, since its progress is unknown
                outputs.update(results)
                written.update(targets)
        return outputs - freed, written - freed

    def _operations(self) -> Iterator[tuple[int | None, Sequence[Number], Sequence[Number]]]:
        """Yields the number of each operation, its results and the tensors it writes to; or None and freed tensors."""
        for first, numbers, effects in self._batches:
            number, position, objects = first - 1, 0, iter(effects)
            while position < len(numbers):
                code = numbers[position]
                if code == FREE:
                    yield None, numbers[position + 1 : position + 2], ()
                    position += 2
                    continue
                number += 1
                if code == OBJECT:
                    yield number, *next(objects)
                    position += 1
                elif code in REQUESTS:
                    position += 2
                elif code == OWN:
                    position += 3
                elif code == REPLAY:
                    _, operations, inputs, outputs = map(int, numbers[position + 1 : position + 5])
                    number += operations - 1
                    position += 6 + inputs + outputs
                else:
                    plan = self._plans[code]
                    tensors = numbers[position + plan.tensors.start : position + plan.tensors.stop]
                    results = numbers[position + plan.results.start : position + plan.results.stop]
                    yield number, results, [tensors[index] for index in plan.writes]
                    position += plan.length
