"""What goes wrong with sharded tensors, and what it is called."""

from collections.abc import Mapping, Sequence

import msgspec

from monarch_nb.supervision import DeviceMeshError
from monarch_nb.tensor.origin import Origin
from monarch_nb.wire import ActorError, RemoteException


class Failure(msgspec.Struct, array_like=True, frozen=True):
    """An operation that failed on one rank, as the worker tells it."""

    number: int  # which operation of the mesh's stream
    operation: str
    rank: int
    type_name: str
    text: str
    story: str  # its formatted traceback

    @property
    def line(self) -> str:
        """Type and first line of its text."""
        first = next(iter(self.text.strip().splitlines()), "")
        return f"{self.type_name}: {first}" if first else self.type_name


class TensorError(ActorError, RuntimeError):
    """An operation failed on the workers. The mesh stays usable; what the operation should have made is lost.

    `operation` is its name, `origin` the line of the program that issued it (None where that is not known), `failures`
    the workers' errors by rank.
    """

    def __init__(self, operation: str, origin: Origin | None, failures: Sequence[Failure], mesh: str = "") -> None:
        first = failures[0]
        told = RemoteException(first.type_name, first.text, first.story, "it was told in words")
        ranks = ranks_text([failure.rank for failure in failures])
        where = f"{ranks} of {mesh}" if mesh else ranks
        summary = f"{operation} failed on {where}: {first.line}"
        if origin is not None:
            summary += f"\n  issued at {origin}"
        super().__init__(told, summary, formatted=[first.story])
        self.operation, self.origin = operation, origin
        self.failures = {failure.rank: RemoteException(failure.type_name, failure.text, failure.story, "")
                         for failure in failures}  # fmt: skip
        self._told = (operation, origin, tuple(failures), mesh)

    def again(self) -> "TensorError":
        """The same error, to be raised once more."""
        return TensorError(*self._told)

    def __str__(self) -> str:
        return self.summary

    def __reduce__(self) -> tuple[object, ...]:
        return TensorError, self._told


class ContentsLostError(DeviceMeshError):
    """The shards of a tensor are gone: a process that held one has died, or the mesh was healed since."""


def ranks_text(ranks: Sequence[int]) -> str:
    """`rank 2`, or `ranks 0, 1 and 5 more`."""
    each = sorted(set(ranks))
    if len(each) == 1:
        return f"rank {each[0]}"
    shown = ", ".join(map(str, each[:4]))
    return f"ranks {shown}" + (f" and {len(each) - 4} more" if len(each) > 4 else "")


def by_operation(failures: Sequence[Failure]) -> Mapping[int, list[Failure]]:
    """Failures by the operation that failed, in order, each with those of all ranks."""
    found: dict[int, list[Failure]] = {}
    for failure in sorted(failures, key=lambda one: (one.number, one.rank)):
        found.setdefault(failure.number, []).append(failure)
    return found
