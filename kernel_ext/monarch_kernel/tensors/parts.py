"""Sharded tensors of the notebook in cells that run on the processes of their mesh."""

import ast
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from monarch_nb._parsing import parsed
from monarch_nb.mesh import ActorMesh, ProcMesh, part_of, region_of, state_of

from .naming import handle_type, variables
from .reporter import all_streams

_OF_CELLS = {"rank", "point", "mesh"}  # names of cells on processes


@contextmanager
def parts_on(mesh: Any, source: str) -> Iterator[None]:
    """Inside of it, a cell on processes of a mesh of tensors has those tensors of the notebook that it names.

    Each process has its own part. Blocks until they are there.
    """
    handle = handle_type()
    if handle is None or not isinstance(mesh, ProcMesh):
        yield
        return
    streams = {stream for stream, procs in all_streams() if state_of(procs) is state_of(mesh)}
    scope = variables()
    named = {name: scope[name] for name in _names(source) & scope.keys() - _OF_CELLS if isinstance(scope[name], handle)}
    on_mesh = {name: tensor for name, tensor in named.items() if tensor.reference.stream in streams}
    if not on_mesh:
        yield
        return
    from monarch_nb.tensor.lending import lent  # imports torch, which is loaded already

    with lent(on_mesh):
        yield


def workers_on(mesh: Any) -> list[ActorMesh[Any]]:
    """Workers that execute operations on the tensors of a proc mesh, or of a slice of it."""
    module = sys.modules.get("monarch_nb.tensor.processes")
    if module is None or not isinstance(mesh, ProcMesh):
        return []
    return [part_of(workers, region_of(mesh)) for workers in module.workers_on(state_of(mesh))]


def _names(source: str) -> set[str]:
    """Variables that occur in a cell."""
    try:
        tree = parsed(source)
    except SyntaxError:  # running it reports the error
        return set()
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
