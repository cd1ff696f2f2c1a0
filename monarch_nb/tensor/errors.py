"""What goes wrong with sharded tensors, and what it is called."""

from collections.abc import Mapping, Sequence

from monarch_nb._about import more
from monarch_nb.supervision import DeviceMeshError, SupervisionError
from monarch_nb.tensor.failure import Failure, ranks_text
from monarch_nb.tensor.origin import Origin, Place, origin_of
from monarch_nb.wire import ActorError, RemoteException

RESTORE = "monarch.checkpoint(...).restore(), model.load_state_dict(...), or tensor.copy_(values)"


class TensorError(ActorError, RuntimeError):
    """An operation failed on the workers. The mesh stays usable; what the operation should have made is lost.

    `operation` is its name ("" where none failed, but was cut off), `origin` the line of the program that issued it
    (None where that is not known), `failures` the workers' errors by rank.
    """

    def __init__(self, operation: str, origin: Origin | None, failures: Sequence[Failure], mesh: str = "") -> None:
        first = failures[0]
        told = RemoteException(first.type_name, first.text, first.story, "it was told in words")
        ranks = ranks_text([failure.rank for failure in failures])
        where = f"{ranks} of {mesh}" if mesh else ranks
        if operation:
            summary = f"{operation} failed on {where}: {first.line}"
        else:
            summary = f"this needs a tensor that was lost on {where}: {first.text}\n  restore it: {RESTORE}"
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


def by_operation(failures: Sequence[Failure]) -> Mapping[int, list[Failure]]:
    """Failures by the operation that failed, in order, each with those of all ranks."""
    found: dict[int, list[Failure]] = {}
    for failure in sorted(failures, key=lambda one: (one.number, one.rank)):
        found.setdefault(failure.number, []).append(failure)
    return found


def ended(reason: str) -> str:
    """Why nothing can be done with the tensors of a mesh that was stopped."""
    return f"the mesh was stopped: {reason}"


def gone(mesh: str, reason: str) -> str:
    """Why nothing can be done with the tensors of a mesh, and what to do."""
    return (
        f"the tensors of {mesh} are gone: {reason}. mesh = monarch.heal_mesh(mesh) brings its processes back; then "
        "restore them" + more("manual/tensors.md#failures-and-what-is-lost")
    )


def moved(mesh: str, how: str) -> str:
    """Why nothing can be done with the tensors of a mesh whose processes have become others, and what to do."""
    return (
        f"the tensors of {mesh} are gone: {mesh} has {how}. Make a mesh for tensors on what it has now, with "
        "Mesh.of(procs), and restore them" + more("manual/elastic.md#shrinking")
    )


def broken(mesh: str, error: SupervisionError, places: Sequence[Place | None]) -> SupervisionError:
    """What is raised where somebody waits for operations that were issued at these places, and a process is gone."""
    origin = next((found for each in places if (found := origin_of(each)) is not None), None)
    text = f"mesh {mesh} is broken" + (f"; it was at operations of {origin}" if origin is not None else "")
    story = str(error) if error.failure is None else error.failure.report()
    return SupervisionError(f"{text}\n{story}", failure=error.failure)


def too_old(version: str) -> ImportError:
    """The error for a PyTorch without what sharded tensors are built on: a backend written in Python, and DTensor."""
    return ImportError(
        f"sharded tensors need PyTorch 2.10 or later, and this is {version}; everything else works with it. "
        "pip install -U torch"
    )
