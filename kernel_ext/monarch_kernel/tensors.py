"""Sharded tensors in a notebook: how the program calls them, which of them live and what cells have moved, as the store
and `%tensors` have it, and their parts in cells that run on the processes of their mesh.
"""

import ast
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import IPython

from monarch_nb._package import imported
from monarch_nb._parsing import parsed
from monarch_nb.mesh import ActorMesh, ProcMesh, part_of, region_of, state_of
from monarch_nb.runtime import Runtime
from monarch_nb.shape import spans
from monarch_nb.store import store_of
from monarch_nb.store.events import TensorsSeen
from monarch_nb.tensor.groups.service import Asked
from monarch_nb.tensor.placement.text import mesh_text
from monarch_nb.tensor.summary import (
    FileName,
    Summary,
    TensorRow,
    Wait,
    busy_text,
    by_dimension,
    moved_text,
    summary_of,
)
from monarch_nb.tensor.verbs import MemoryUsed
from monarch_nb.wire import converted, counted, size_text, text_table

HEADINGS = ("name", "tensor", "placement", "on a rank", "made at")
MOVED = ("mesh dimension", "collective", "times", "bytes of a rank")
WAITED = ("line", "waited for", "times", "source")
_LISTED = 24  # rows of the text form
NOTHING = "There are no sharded tensors. monarch.distribute(tensor, mesh, sharding_spec=[…]) makes one."
REPORT_S = 0.4  # between two summaries
ASKING_S = 2.0  # between two questions to ranks
_MOST = 2000  # tensors of one module that are named
_OF_CELLS = {"rank", "point", "mesh"}  # names of cells on processes
logger = logging.getLogger(__name__)


def variables() -> dict[str, Any]:
    """Returns the current variables of the notebook."""
    shell = IPython.get_ipython()
    return {} if shell is None else dict(shell.user_ns)


def handle_type() -> Any:
    """Returns the type of sharded tensors; None before the first one, so that torch is not imported for this."""
    module = imported("monarch_nb.tensor.handle")
    return getattr(module, "MeshTensor", None)


def names_of(namespace: Mapping[str, Any]) -> dict[tuple[int, int], str]:
    """Names by number of the mesh's stream and number of the tensor; of several, the one that comes first."""
    handle = handle_type()
    names: dict[tuple[int, int], str] = {}
    if handle is None:
        return names
    for name, tensor in _tensors(namespace, handle):
        reference = tensor.reference
        names.setdefault((reference.stream.number, reference.number), name)
    return names


def name_of(namespace: Mapping[str, object], tensor: object) -> str:
    """Returns the variable that holds this very tensor; "" for none."""
    return next((name for name, value in tuple(namespace.items()) if value is tensor and not name.startswith("_")), "")


def _tensors(namespace: Mapping[str, Any], handle: Any) -> Iterator[tuple[str, Any]]:
    module_type = getattr(imported("torch.nn"), "Module", ())
    modules = []
    for name, value in namespace.items():
        if name.startswith("_"):  # stored outputs of IPython too
            continue
        if isinstance(value, handle):
            yield name, value
            yield from _gradient(name, value, handle)
        elif isinstance(value, module_type):
            modules.append((name, value))
    for name, module in modules:
        for index, (path, value) in enumerate([*module.named_parameters(), *module.named_buffers()]):
            if index >= _MOST:
                break
            if isinstance(value, handle):
                yield f"{name}.{path}", value
                yield from _gradient(f"{name}.{path}", value, handle)


def _gradient(name: str, value: Any, handle: Any) -> Iterator[tuple[str, Any]]:
    gradient = value.grad if value.is_leaf else None
    if isinstance(gradient, handle):
        yield f"{name}.grad", gradient


def all_streams() -> list[tuple[Any, ProcMesh]]:
    """Streams of all meshes of tensors with their processes, those with lost contents included.

    Empty, without an import of torch, until the first one is made.
    """
    module = imported("monarch_nb.tensor.device")
    return [] if module is None else module.streams()


def streams() -> list[tuple[Any, ProcMesh]]:
    """Streams that still have their tensors."""
    return [(stream, procs) for stream, procs in all_streams() if stream.lost is None]


def mesh_ranks(procs: ProcMesh) -> dict[str, Any]:
    """Returns the processes of a mesh of tensors as views name them: the uid of their mesh, and their indices in it."""
    state = state_of(procs)
    indices = {base: index for index, base in enumerate(state.region.ranks())}
    return {"mesh": state.uid, "ranks": [indices[base] for base in region_of(procs).ranks()]}


class TensorReporter:
    """Puts summaries of sharded tensors into the store. One per process. `file_name` gives a file's display name."""

    def __init__(self) -> None:
        self._watchers = 0
        self._lock = threading.Lock()
        self._running = False
        self._reported: dict[str, dict[str, object]] = {}  # as the store has it
        self._requests: dict[int, tuple[Asked, float]] = {}  # by stream, with its time
        self._answers: dict[int, Sequence[MemoryUsed]] = {}  # by stream
        self._last: dict[int, tuple[Sequence[Any], Sequence[Any]]] = {}  # moved, waited, by stream

    def begin_cell(self) -> None:
        """Starts the movements of a new cell. Those of the last cell that moved anything stay visible."""
        for stream, _ in streams():
            done = (stream.table.movements(), stream.table.synchronisations())
            if any(done):
                self._last[stream.number] = done
                stream.begin_cell()

    def watch(self, runtime: Runtime, file_name: FileName) -> Callable[[], None]:
        """Keeps the store up to date until the result is called."""
        with self._lock:
            self._watchers += 1
            begin = not self._running
            self._running = True
        if begin:
            self._report(runtime, file_name)
        return self._leave

    def update(self, runtime: Runtime, file_name: FileName, *, wait_s: float = 0.0) -> None:
        """Puts changed summaries into the store. Waits up to `wait_s` for the memory use of ranks."""
        self._ask(runtime, fresh=wait_s > 0)
        names = names_of(variables())
        records: dict[str, dict[str, Any]] = {}
        for stream, procs in all_streams():
            table = stream.table
            live = table.live()
            if stream.lost is not None and not live:
                continue
            moved, waited, cell = table.movements(), table.synchronisations(), table.cell
            if not moved and not waited:
                (moved, waited), cell = self._last.get(stream.number, ((), ())), cell - 1
            used = self._used(stream.number, wait_s)
            own_names = {number: name for (of, number), name in names.items() if of == stream.number}
            summary = summary_of(
                stream.title if stream.lane is None else f"{stream.title}, stream {stream.lane.name}",
                stream.layout,
                live,
                moved,
                waited,
                names=own_names,
                file_name=file_name,
                used=used,
                cell=cell,
                lost=stream.lost or "",
                lost_numbers=stream.held.lost,
            )
            records[str(stream.number)] = {**summary.record, **mesh_ranks(procs)}
        put = store_of(runtime).put
        with self._lock:
            for key in self._reported.keys() - records.keys():
                put(TensorsSeen(key, {}))
            for key, record in records.items():
                if self._reported.get(key) != record:
                    put(TensorsSeen(key, record))
            self._reported = records

    def _ask(self, runtime: Runtime, *, fresh: bool) -> None:
        """Requests the memory use of ranks, where no request is pending."""
        now = time.monotonic()
        numbers = dict.fromkeys(stream.number for stream, _ in streams())
        for stream, procs in streams():
            _, since = self._requests.get(stream.number, (None, 0.0))
            if fresh or now - since > ASKING_S:
                if fresh:
                    stream.flush_nowait()  # the count includes operations issued so far
                self._requests[stream.number] = Asked(runtime, procs, stream.number), now
        for number in self._requests.keys() - numbers.keys():
            del self._requests[number]
            self._answers.pop(number, None)

    def _used(self, number: int, wait_s: float) -> "Sequence[MemoryUsed] | None":
        """Returns the last answer of the ranks; None for streams that have ended."""
        request = self._requests.get(number)
        answer = request[0].answered(wait_s) if request is not None else None
        if answer is not None:
            self._answers[number] = answer
        return self._answers.get(number)

    def _report(self, runtime: Runtime, file_name: FileName) -> None:
        with self._lock:
            if not self._watchers or runtime.closed:
                self._running = False
                return
        try:
            self.update(runtime, file_name)
        except Exception:  # modules and tables may change while they are read; the next summary is complete again
            logger.debug("tensors were not summed up", exc_info=True)
        runtime.later(REPORT_S, lambda: self._report(runtime, file_name))

    def _leave(self) -> None:
        with self._lock:
            self._watchers -= 1


TENSOR_REPORTER = TensorReporter()


class TensorListing:
    """The current tensors by mesh; with `waits`, the lines that waited instead."""

    def __init__(self, runtime: Runtime, *, waits: bool = False) -> None:
        records = store_of(runtime).document().get("tensors", {})
        self.waits = waits
        self.meshes: dict[str, Summary] = {key: converted(record, Summary) for key, record in records.items()}

    def __repr__(self) -> str:
        if not self.meshes:
            return NOTHING
        form = _waits_text if self.waits else _text
        return "\n\n".join(form(summary) for summary in self.meshes.values())


def _text(summary: Summary) -> str:
    lines = [" · ".join(filter(None, (summary.name, *head(summary))))]
    if summary.lost:
        lines.append(summary.lost)
    if summary.rows:
        lines.append(text_table([HEADINGS, *map(cells, summary.rows[:_LISTED])]))
    if summary.count > _LISTED:
        lines.append(f"… and {summary.count - _LISTED} smaller ones")
    if summary.lost:
        return "\n".join(lines)
    lines += [*memory_lines(summary), moved_text(summary.moved)]
    if summary.moved:
        lines.append(text_table([MOVED, *moved_cells(summary)]))
    if summary.busy:
        lines.append(busy_text(summary.busy))
    return "\n".join([*lines, waits_text(summary)])


def _waits_text(summary: Summary) -> str:
    if not summary.waits:
        return f"{summary.name}: the last cell waited for no result"
    return f"{summary.name}: what the last cell waited for\n{text_table([WAITED, *waited_cells(summary.waits)])}"


def head(summary: Summary) -> tuple[str, ...]:
    """Its mesh, how many tensors there are, and how much that is."""
    count = f"{counted(summary.count, 'tensor')}"
    mesh = mesh_text(summary.labels, summary.sizes)
    if summary.lost:
        return mesh, f"{count}, lost", size_text(summary.nbytes)
    lost = f"{summary.gone} of them lost" if summary.gone else ""
    return mesh, count, lost, size_text(summary.nbytes), f"{size_text(summary.largest)} on the fullest rank"


def cells(row: TensorRow) -> tuple[str, ...]:
    """Cells of a table row for one tensor."""
    size = "lost" if row.lost else size_text(row.each)
    return row.name or "·", row.title, " ".join(row.placement), size, row.line.at


def live_text(live: Sequence[int]) -> str:
    """Returns bytes of tensors by rank, equal ones together: `12.0 MB on each rank`, `0-5: 12.0 MB  6-7: 8.00 MB`."""
    ranks: dict[str, list[int]] = {}
    for rank, nbytes in enumerate(live):
        ranks.setdefault(size_text(nbytes), []).append(rank)
    if len(ranks) <= 1:
        return f"{next(iter(ranks), '0 B')} on each rank"
    return "  ".join(f"{spans(of)}: {size}" for size, of in ranks.items())


def memory_lines(summary: Summary) -> list[str]:
    """Memory of tensors on ranks, and the memory that processes or devices have."""
    lines = [f"live: {live_text(summary.live)}"]
    if summary.memory is not None:
        label = "memory of the processes" if summary.memory.of == "process" else "memory allocated on the devices"
        lines.append(f"{label}: {live_text(summary.memory.allocated)}, at most {live_text(summary.memory.peak)} so far")
    return lines


def moved_cells(summary: Summary) -> list[tuple[str, ...]]:
    """Moved data by dimension of the mesh."""
    return [(dim, kind, str(count), size_text(nbytes)) for dim, kind, count, nbytes in by_dimension(summary.moved)]


def waited_cells(waits: tuple[Wait, ...]) -> list[tuple[str, ...]]:
    """Returns the lines that waited, most often first."""
    ordered = sorted(waits, key=lambda wait: -wait.count)
    return [(wait.line.at or "·", wait.what, str(wait.count), wait.line.source) for wait in ordered]


def waits_text(summary: Summary) -> str:
    """Returns the number of times that the last cell has waited for the workers."""
    times = sum(wait.count for wait in summary.waits)
    if not times:
        return "the last cell waited for no result"
    return f"the last cell waited {counted(times, 'time')} for a result: %tensors --sync shows where"


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


def _names(source: str) -> set[str]:
    """Variables that occur in a cell."""
    try:
        tree = parsed(source)
    except SyntaxError:  # running it reports the error
        return set()
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def workers_on(mesh: Any) -> list[ActorMesh[Any]]:
    """Workers that execute operations on the tensors of a proc mesh, or of a slice of it."""
    module = imported("monarch_nb.tensor.processes")
    if module is None or not isinstance(mesh, ProcMesh):
        return []
    return [part_of(workers, region_of(mesh)) for workers in module.workers_on(state_of(mesh))]
