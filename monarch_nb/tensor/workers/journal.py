"""What one stream has run lately, so that it can be taken back where other ranks have not come so far."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from monarch_nb.tensor.commands import FREE, NUMBER, OBJECT, REPLAY, SHARDS, WHOLE, Number
from monarch_nb.tensor.workers.plans import Told

ASKING = frozenset({WHOLE, NUMBER, SHARDS})
KEPT = 8192  # operations; a rank cannot be further ahead of another than the controller lets any run ahead of it


class Journal:
    """The batches of one stream. `plans` are those that it uses."""

    def __init__(self, plans: Mapping[Number, Told]) -> None:
        self._plans = plans
        self._steps: deque[tuple[int, int, Sequence[Number], Sequence[Number]]] = deque()
        self._batches: deque[tuple[int, Sequence[Number], tuple[Number | None, ...]]] = deque()

    def note(self, first: int, numbers: Sequence[Number], objects: Sequence[Any]) -> None:
        """A batch begins with operation `first`."""
        self._batches.append((first, numbers, tuple(getattr(one, "result", None) for one in objects)))
        while self._batches[0][0] < first - KEPT:
            self._batches.popleft()

    def replayed(self, first: int, count: int, made: Sequence[Number], written: Sequence[Number]) -> None:
        """A compiled step of so many operations has begun, or was passed over."""
        self._steps.append((first, first + count, made, written))
        while self._steps[0][0] < first - KEPT:
            self._steps.popleft()

    def touched(self, start: int, stop: int) -> tuple[set[Number], set[Number]]:
        """Tensors that operations from `start` up to `stop` make, and those they write to, but for what is freed."""
        made: set[Number] = set()
        written: set[Number] = set()
        freed: set[Number] = set()
        for number, results, targets in self._operations():
            if number is None:
                freed.update(results)
            elif start <= number < stop:
                made.update(results)
                written.update(targets)
        for begin, end, results, targets in self._steps:
            if begin < stop and start < end:  # all of it, since nobody knows how far it came
                made.update(results)
                written.update(targets)
        return made - freed, written - freed

    def _operations(self) -> Iterator[tuple[int | None, Sequence[Number], Sequence[Number]]]:
        """Number of each operation, what it makes and what it writes to; None with what is freed."""
        for first, numbers, made in self._batches:
            number, at, objects = first - 1, 0, iter(made)
            while at < len(numbers):
                code = numbers[at]
                if code == FREE:
                    yield None, numbers[at + 1 : at + 2], ()
                    at += 2
                    continue
                number += 1
                if code == OBJECT:
                    result = next(objects)
                    yield number, () if result is None else (result,), ()
                    at += 1
                elif code in ASKING:
                    at += 2
                elif code == REPLAY:
                    _, operations, inputs, outputs = map(int, numbers[at + 1 : at + 5])
                    number += operations - 1
                    at += 6 + inputs + outputs
                else:
                    plan = self._plans[code]
                    tensors = numbers[at + plan.tensors.start : at + plan.tensors.stop]
                    results = numbers[at + plan.results.start : at + plan.results.stop]
                    yield number, results, [tensors[place] for place in plan.writes]
                    at += plan.length
