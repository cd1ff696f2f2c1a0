"""Sharded tensors shown live: a tensor alone in a cell, `%tensors`, and the section of the panel."""

from collections.abc import Callable
from typing import Any

from IPython.core.error import UsageError

from monarch_nb.runtime import runtime
from monarch_nb.store import store_of
from monarch_nb.tensor.placement import Placement, document
from monarch_nb.tensor.summary import placement_of

from ..session import Session
from ..tensors import TELLING, Tensors, all_streams, name_of, names_of, place_of, variables
from .bundle import bundled
from .live import LiveView, Shown, Watch

ANSWER_S = 0.5  # for ranks to say how much they use
HANDLE = "monarch_nb.tensor.handle.MeshTensor"  # named, not imported: that would import torch


def placement(key: str, number: int) -> dict[str, Any]:
    """The placement of a live tensor, as JSON: by the key of its mesh in the store, and its number there.

    Raises LookupError.
    """
    for stream, procs in all_streams():
        entry = stream.table.entries.get(number) if str(stream.number) == key else None
        if entry is not None:
            name = names_of(variables()).get((stream.number, number), "")
            return {"placement": document(placement_of(entry.meta), name), **place_of(procs)}
    raise LookupError("this tensor is gone")


def tensors(session: Session, line: str) -> Tensors:
    """Show the live sharded tensors, where they lie, memory by rank, and what the last cell has moved between ranks.

    %tensors           name, shape, placement, bytes on a rank, and the line that made each
    %tensors --sync    which lines of the last cell have waited for the workers (.item(), print, …), and how often

    A tensor alone in a cell shows its placement: where each part of it lies.
    """
    words = line.split()
    if set(words) - {"--sync"}:
        raise UsageError("%tensors takes --sync only; a tensor alone in a cell shows where it lies")
    engine = runtime()
    TELLING.tell(engine, session.file_name, wait_s=ANSWER_S)
    return Tensors(engine, waits=bool(words))


def _shown(tensor: Any) -> Shown:
    stream = tensor.reference.stream
    told = document(placement_of(tensor.meta), name_of(variables(), tensor))
    place = next((place_of(procs) for one, procs in all_streams() if one is stream), {})
    return Shown({"placement": told, **place}, ("tensor", stream.number, tensor.reference.number, told["name"]))


def _list(listed: Tensors) -> Shown:
    return Shown(
        {"tensors": store_of(runtime()).document()["tensors"], "waits": listed.waits}, ("tensors", listed.waits)
    )


def _feed(watch: Watch) -> Callable[[], None]:
    watch.tell()  # that it is heard: what there is comes through the store
    return TELLING.watch(watch.engine, watch.file_name)


TENSORS = LiveView(
    name="tensors",
    **bundled("tensors"),
    feed=_feed,
    shows={HANDLE: _shown, Tensors: _list, Placement: lambda value: Shown({"placement": document(value)})},
    magic=tensors,
)
