"""Names of shards for cells that run in the processes of a mesh."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from monarch_nb.supervision import DeviceMeshError
from monarch_nb.tensor.commands import RunFunction, TensorOf
from monarch_nb.tensor.errors import TensorError
from monarch_nb.tensor.handle import MeshTensor, current
from monarch_nb.tensor.references import UNSENT
from monarch_nb.tensor.stream import Stream
from monarch_nb.tensor.views import rewriting

_UNBOUND = object()
_previous: dict[str, tuple[object, object]] = {}  # the former value of a name, and the tensor bound to it


@contextmanager
def lent(tensors: Mapping[str, MeshTensor]) -> Iterator[None]:
    """Binds names to the local shards of tensors for cells in the processes, in a `with` block.

    Writes to a shard change the tensor. Blocks until all issued operations have run, and raises their errors;
    ContentsLostError for a tensor whose contents are lost.
    """
    by_mesh: dict[Stream, dict[str, TensorOf]] = {}
    for name, tensor in tensors.items():
        stream = tensor.reference.stream
        stream.resume_if_healed()
        stream.held.require_contents((tensor.reference.number,))
        by_mesh.setdefault(stream, {})[name] = TensorOf(current(tensor))
    try:
        with rewriting(tensor.reference for tensor in tensors.values()):
            for stream, references in by_mesh.items():
                stream.run_everywhere(RunFunction(_lend, (references,), {}))
            for tensor in tensors.values():  # a rank may be lost while the cell writes
                tensor.reference.writes.written = UNSENT
            yield
    finally:
        for stream, references in by_mesh.items():
            with suppress(DeviceMeshError, TensorError):  # the next operation reports it, too
                written = [tensors[name].reference for name in references]
                stream.run_everywhere(RunFunction(_take_back, (list(references),), {}), written)


def _lend(tensors: dict[str, object]) -> None:
    """Binds the shards of this process to names in cells."""
    names = vars(sys.modules["__main__"])
    for name, part in tensors.items():
        _previous[name] = (names.get(name, _UNBOUND), part)
        names[name] = part


def _take_back(lent: list[str]) -> None:
    """Restores the previous values of the names, except those that a cell has assigned."""
    names = vars(sys.modules["__main__"])
    for name in lent:
        before, part = _previous.pop(name, (_UNBOUND, _UNBOUND))
        if names.get(name, _UNBOUND) is not part:
            continue
        if before is _UNBOUND:
            names.pop(name, None)
        else:
            names[name] = before
