"""Who still refers to a tensor on the workers, and what becomes of those that nobody refers to."""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from torch.utils.weak import TensorWeakRef

from monarch_nb.tensor.batch import Item
from monarch_nb.tensor.commands import FREE
from monarch_nb.tensor.errors import RESTORE, ContentsLostError
from monarch_nb.tensor.origin import Place, origin_of
from monarch_nb.tensor.propagation import Meta, Plan

if TYPE_CHECKING:
    from monarch_nb.tensor.stream import Stream


class Reference:
    """Stands for a tensor on the workers, in all handles of it: with the last of them, the tensor goes.

    `stream` is that of its mesh, `number` its name there. `memory` it shares with its views, and with what it is a view
    of; None where there are none. `copied` says how it is made again, where it is a view that has memory of its own on
    the workers. `is_view` is true of any view. `offset` is where it would begin in that memory, in bytes,
    if nothing were cut.
    """

    __slots__ = ("__weakref__", "copied", "is_view", "memory", "number", "offset", "stream")

    def __init__(self, stream: "Stream", number: int) -> None:
        self.stream, self.number = stream, number
        self.is_view = False
        self.offset = 0
        self.memory: Memory | None = None
        self.copied: Copied | None = None


class Memory:
    """What a tensor and its views are to the program.

    `copies` have memory of their own on the workers. `reshaped` had their shape changed in place.
    """

    __slots__ = ("__weakref__", "copies", "reshaped")

    def __init__(self) -> None:
        self.copies: weakref.WeakSet[Reference] = weakref.WeakSet()
        self.reshaped: weakref.WeakSet[Reference] = weakref.WeakSet()


class Copied(NamedTuple):
    """From which tensor a view was copied that cuts a sharded dimension: by which plans, and which of their results."""

    base: Reference
    steps: tuple[tuple[Plan, int], ...]


class LiveEntry(weakref.ref[Reference]):
    """What the controller knows of a tensor. It tells of the end of its reference by `ended`, which gets the entry.

    That is a weak reference and no finalizer, since Ctrl-C may come in a finalizer, which then is cut off.
    """

    __slots__ = ("meta", "number", "place")

    number: int
    meta: Meta
    place: Place | None

    def __new__(  # noqa: D102
        cls, reference: Reference, ended: Callable[["LiveEntry"], None], meta: Meta, place: Place | None
    ) -> "LiveEntry":
        entry = super().__new__(cls, reference, ended)
        entry.number, entry.meta, entry.place = reference.number, meta, place
        return entry

    def __init__(self, *arguments: Any) -> None:
        pass


class Held:
    """What workers keep for a stream, by number. `entries` are the tensors, also for those who display them."""

    def __init__(self, entries: dict[int, LiveEntry]) -> None:
        self.entries = entries
        self.aside: dict[int, LiveEntry] = {}  # what workers keep under a number, and is no tensor
        self.ended: deque[LiveEntry] = deque()  # of what nobody refers to any more
        self.gone: dict[int, str] = {}  # tensors whose contents are, and why; nothing can be done with them
        self.stale: dict[int, Copied] = {}  # what is to be made again before it is used
        self.leaves: dict[int, TensorWeakRef] = {}  # handles that gather gradients, from their first operation on
        self.next = count(1).__next__  # numbers
        self._freeing = threading.RLock()  # a finalizer may issue operations

    def hold(self, stream: "Stream", meta: Meta, where: Place | None) -> Reference:
        """A reference to a tensor that the next command makes."""
        reference = Reference(stream, self.next())
        self.entries[reference.number] = LiveEntry(reference, self.ended.append, meta, where)
        return reference

    def hold_aside(self, stream: "Stream") -> Reference:
        """A reference to what the next command makes, which is no tensor."""
        reference = Reference(stream, self.next())
        self.aside[reference.number] = LiveEntry(reference, self.ended.append, cast(Meta, None), None)
        return reference

    def note_leaf(self, number: int, handle: Any) -> None:
        """A handle takes part in an operation, and gathers gradients."""
        known = self.leaves.get(number)
        if known is None or known.ref() is not handle:
            self.leaves[number] = TensorWeakRef(handle)

    def is_alone(self, reference: Reference) -> bool:
        """Whether nothing else that is held shows the same memory."""
        memory = reference.memory
        others = (entry() for entry in tuple(self.entries.values())) if memory is not None else ()
        return all(other is None or other is reference or other.memory is not memory for other in others)

    def free(self, tell: Callable[[Item], None]) -> None:
        """Has workers let go of what nobody refers to any more.

        Ctrl-C may cut this off: what was being freed is then freed once more, which workers do not mind. To hold it
        back would cost each operation as much as the rest of this does.
        """
        ended = self.ended
        with self._freeing:
            while ended:
                entry = ended[0]
                number = entry.number
                tell(((FREE, number), None))
                if self.entries.pop(number, None) is None:
                    self.aside.pop(number, None)
                self.gone.pop(number, None)
                self.stale.pop(number, None)
                self.leaves.pop(number, None)
                if ended and ended[0] is entry:
                    ended.popleft()

    def all_gone(self, why: str, tell: Callable[[Item], None]) -> None:
        """The contents of all tensors are; what is left of them on workers is let go of."""
        self.gone = dict.fromkeys(tuple(self.entries), why)
        for number in self.gone:
            tell(((FREE, number), None))

    def refuse_gone(self, numbers: Iterable[int]) -> None:
        """Raises ContentsLostError where contents of one of these tensors are gone."""
        for number in numbers:
            why = self.gone.get(number)
            if why is not None:
                entry = self.entries[number]
                made = origin_of(entry.place)
                raise ContentsLostError(
                    f"the contents of {entry.meta!r} are gone, since the mesh was healed. Restore them: {RESTORE}"
                    + (f"\n  it was made at {made}" if made else "")
                    + f"\n  {why}"
                )
