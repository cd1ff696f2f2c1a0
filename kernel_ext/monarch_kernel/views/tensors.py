"""Sharded tensors shown live: a tensor alone in a cell, `%tensors`, and the section of the panel."""

import time
from collections.abc import Callable
from typing import Any

from IPython.core.error import UsageError

from monarch_nb.mesh import state_of
from monarch_nb.runtime import Runtime, current_runtime
from monarch_nb.store import store_of
from monarch_nb.tensor.groups.service import values_on
from monarch_nb.tensor.placement import EDGE, Placement, document, values_document
from monarch_nb.tensor.summary import placement_of
from monarch_nb.tensor.verbs import AskValues

from ..display.tensors import lost_ranks
from ..session import Session
from ..tensors import TENSOR_REPORTER, TensorListing, all_streams, mesh_ranks, name_of, names_of, variables
from .live import LiveView, Shown, Watch, bundled

VALUES_S = 20.0  # for ranks to look at what they have of a tensor
COMES_S = 10.0  # for a tensor that was just issued, on processes that may have just begun
ANSWER_S = 0.5  # for ranks to say how much they use
HANDLE = "monarch_nb.tensor.handle.MeshTensor"  # named, not imported: that would import torch


def placement(key: str, number: int) -> dict[str, Any]:
    """Returns the placement of a live tensor, as JSON: by the key of its mesh in the store, and its number there.

    Raises LookupError.
    """
    for stream, procs in all_streams():
        entry = stream.table.entries.get(number) if str(stream.number) == key else None
        if entry is not None and entry() is not None:
            name = names_of(variables()).get((stream.number, number), "")
            return {"placement": document(placement_of(entry.meta), name), **mesh_ranks(procs)}
    raise LookupError("this tensor is gone")


def values(runtime: Runtime, key: str, number: int) -> dict[str, Any]:
    """Returns the first elements of a live tensor and statistics by rank, as JSON. Blocks for seconds at most.

    Nothing is issued for that: a cell that runs, and a mesh that is being brought back, are left alone. Raises
    LookupError, with a text for people, if there are no values.
    """
    for stream, procs in all_streams():
        entry = stream.table.entries.get(number) if str(stream.number) == key else None
        if entry is None or entry() is None:
            continue
        if stream.lost is not None or number in stream.held.lost:
            raise LookupError(_contents_gone(stream.lost or stream.held.lost[number]))
        if number in stream.held.stale:
            raise LookupError("it is a view of a tensor that has changed since: it is made again when a cell uses it")
        question = AskValues(state_of(procs).uid, stream.number, number, stream.sent(), EDGE)
        until = time.monotonic() + COMES_S
        while True:
            parts = values_on(runtime, procs, question, lost_ranks(stream), VALUES_S)
            coming = [part for part in parts if not isinstance(part, str) and part.state == "coming"]
            if not coming or time.monotonic() > until:
                break
            time.sleep(0.1)
        if all(isinstance(part, str) for part in parts):
            raise LookupError(f"no rank of {stream.title} says what it has: {parts[0]}")
        return values_document(placement_of(entry.meta), parts)
    raise LookupError("this tensor is gone: nothing refers to it any more")


def _contents_gone(reason: str) -> str:
    return f"its contents are gone: {reason.strip().partition(chr(10))[0].rstrip(':,')}"


def tensors(session: Session, line: str) -> TensorListing:
    """Show the live sharded tensors, where they lie, memory by rank, and what the last cell has moved between ranks.

    %tensors           name, shape, placement, bytes on a rank, and the line that made each
    %tensors --sync    which lines of the last cell have waited for the workers (.item(), print, …), and how often

    A tensor alone in a cell shows its placement: where each part of it lies.
    """
    words = line.split()
    if set(words) - {"--sync"}:
        raise UsageError("%tensors takes --sync only; a tensor alone in a cell shows where it lies")
    runtime = current_runtime()
    TENSOR_REPORTER.update(runtime, session.file_name, wait_s=ANSWER_S)
    return TensorListing(runtime, waits=bool(words))


def _shown(tensor: Any) -> Shown:
    stream = tensor.reference.stream
    placement = document(placement_of(tensor.meta), name_of(variables(), tensor))
    ranks = next((mesh_ranks(procs) for candidate, procs in all_streams() if candidate is stream), {})
    of = [str(stream.number), tensor.reference.number]
    return Shown(
        {"placement": placement, "of": of, **ranks},
        ("tensor", stream.number, tensor.reference.number, placement["name"]),
    )


def _list(listed: TensorListing) -> Shown:
    return Shown(
        {"tensors": store_of(current_runtime()).document()["tensors"], "waits": listed.waits}, ("tensors", listed.waits)
    )


def _feed(watch: Watch) -> Callable[[], None]:
    watch.publish()  # confirms the subscription: the data comes through the store
    return TENSOR_REPORTER.watch(watch.runtime, watch.file_name)


TENSORS = LiveView(
    name="tensors",
    **bundled("tensors"),
    feed=_feed,
    shows={HANDLE: _shown, TensorListing: _list, Placement: lambda value: Shown({"placement": document(value)})},
    magic=tensors,
)
