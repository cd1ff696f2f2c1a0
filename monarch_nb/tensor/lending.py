"""Tensors of meshes, by name, for cells that run in the processes."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from monarch_nb.supervision import DeviceMeshError
from monarch_nb.tensor.commands import Run, TensorOf
from monarch_nb.tensor.errors import TensorError
from monarch_nb.tensor.handle import MeshTensor, current
from monarch_nb.tensor.stream import Stream
from monarch_nb.tensor.views import rewriting
from monarch_nb.tensor.workers.lending import lend, take_back


@contextmanager
def lent(tensors: Mapping[str, MeshTensor]) -> Iterator[None]:
    """Inside of it, cells in the processes have their own parts of the tensors, under these names.

    What is written into a part is in the tensor. Blocks until all that was issued before has run; raises what that
    raises, and ContentsLostError for a tensor whose contents are gone.
    """
    by_mesh: dict[Stream, dict[str, TensorOf]] = {}
    for name, tensor in tensors.items():
        stream = tensor.reference.stream
        stream.come_back()
        stream.held.refuse_gone((tensor.reference.number,))
        by_mesh.setdefault(stream, {})[name] = TensorOf(current(tensor))
    try:
        with rewriting(tensor.reference for tensor in tensors.values()):
            for stream, told in by_mesh.items():
                stream.run_everywhere(Run(lend, (told,), {}))
            yield
    finally:
        for stream, told in by_mesh.items():
            with suppress(DeviceMeshError, TensorError):  # of which the next operation tells, too
                stream.run_everywhere(Run(take_back, (list(told),), {}))
