"""Which plans that make a tensor of nothing workers know, by what they make."""

from itertools import count

from monarch_nb.tensor.commands import FIRST_MAKING

KEPT = 1024  # the oldest makes place for the next


class Makings:
    """Those of one stream."""

    def __init__(self) -> None:
        self._numbers: dict[object, int] = {}
        self._keys: dict[int, object] = {}
        self._count = count()

    def find(self, key: object) -> int | None:
        """The number of a plan that was told; None where it was not."""
        return self._numbers.get(key)

    def free(self) -> int:
        """A number for another one; what it meant before is forgotten."""
        number = FIRST_MAKING - next(self._count) % KEPT
        self._numbers.pop(self._keys.pop(number, None), None)
        return number

    def told(self, key: object, number: int) -> None:
        """The number means that from now on."""
        self._numbers[key], self._keys[number] = number, key
