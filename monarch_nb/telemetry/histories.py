"""The resources that the processes of a mesh have used over the last hour, for people."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from monarch_nb.mesh import ActorMesh, AnyMesh, ProcMesh, region_of, state_of
from monarch_nb.runtime import current_runtime
from monarch_nb.shape import MeshTrait, places_of
from monarch_nb.store import store_of
from monarch_nb.store.history import UsagePart, UsageSample, common
from monarch_nb.wire import kind_of, size_text, text_table

_SPARK = "▁▂▃▄▅▆▇█"
_SPARKS = 24  # characters
HEAD = ("", "now (mean)", "peak", "of", "at", "over time")
NOTHING = "no samples yet: processes report what they use every few seconds from when the history is first asked for"


def _cores(value: float) -> str:
    return f"{value:.2f} cores"


def _share(value: float) -> str:
    return f"{value:.0%}"


def _rate(value: float) -> str:
    return f"{size_text(value)}/s"


class Measure(NamedTuple):
    """A measured quantity, the format of its numbers, and their divisor in curves."""

    field: str
    name: str
    text: Callable[[float], str]
    unit: float = 1.0
    title: str = ""

    @property
    def place(self) -> int:
        """The index of the quantity in the values of a part."""
        return _field(self.field)


MEASURES = (
    Measure("cpu", "CPU", _cores, title="CPU, cores"),
    Measure("memory", "memory", size_text, 1 << 20, "memory, MB"),
    Measure("gpu", "GPU", _share, 0.01, "GPU, %"),
    Measure("gpu_memory", "GPU memory", size_text, 1 << 20, "GPU memory, MB"),
    Measure("received", "bytes in", _rate, 1 << 10, "bytes in, kB/s"),
    Measure("sent", "bytes out", _rate, 1 << 10, "bytes out, kB/s"),
)


class Peak(NamedTuple):
    """The highest use of a rank: the rank, the amount, and the time (wall clock)."""

    rank: int
    value: float
    at: float


class History:
    """CPU, memory, GPU, and bytes in and out, of the processes of a mesh: at most an hour, older samples less densely.

    It is a view: each access reads the current samples. Bytes are those of messages between actors and of transfers of
    memory, without other traffic of the program, such as NCCL's.
    """

    def __init__(self, mesh: AnyMesh) -> None:
        self.mesh = mesh
        self.name = state_of(mesh).name
        self._procs = state_of(mesh) if isinstance(mesh, ProcMesh) else state_of(mesh).procs
        store_of(current_runtime()).keep_history()

    @property
    def procs(self) -> str:
        """The uid of the processes."""
        return self._procs.uid

    @property
    def samples(self) -> dict[int, list[UsageSample]]:
        """The samples by rank (row-major in the whole mesh, also of a slice), the oldest first."""
        samples = store_of(current_runtime()).history.of(self._procs.uid)
        return {rank: samples[rank] for rank in region_of(self.mesh).ranks() if rank in samples}

    @property
    def ranks(self) -> list[int]:
        """The ranks with samples."""
        ranks = set(region_of(self.mesh).ranks())
        return [rank for rank in store_of(current_runtime()).history.ranks(self._procs.uid) if rank in ranks]

    @property
    def parts(self) -> list[UsagePart]:
        """The use of all ranks together, in parts of the time, the oldest first."""
        if len(region_of(self.mesh)) == len(self._procs.region):
            return store_of(current_runtime()).history.common(self._procs.uid)
        return common(self.samples)

    @staticmethod
    def measured(parts: Sequence[UsagePart]) -> Iterator[Measure]:
        """Yields the measures with values: those of GPUs only if there are any."""
        for measure in MEASURES:
            least = 0.0 if measure.field.startswith("gpu") else -1.0
            if any(part.high[measure.place] > least for part in parts):
                yield measure

    def peak(self, field: str, parts: Sequence[UsagePart] | None = None) -> Peak:
        """Returns the peak `cpu`, `memory`, `gpu`, `gpu_memory`, `received` or `sent`. Raises ValueError if unknown."""
        index = _field(field)
        part = max(self.parts if parts is None else parts, key=lambda part: part.high[index], default=None)
        if part is None:
            raise ValueError(NOTHING)
        return Peak(part.rank[index], part.high[index], part.when[index])

    def where(self, rank: int) -> str:
        """Returns a rank by its coordinates."""
        return places_of(state_of(self.mesh).region, [rank]) or "it"

    def rows(self) -> list[tuple[str, ...]]:
        """Returns a row of texts for each measure: its name, the mean now, the peak, its rank and time, a curve."""
        samples, parts = self.samples, self.parts
        rows: list[tuple[str, ...]] = []
        for measure in self.measured(parts) if samples else ():
            latest = [getattr(ranks[-1], measure.field) for ranks in samples.values() if ranks]
            peak = self.peak(measure.field, parts)
            now = measure.text(sum(latest) / len(latest))
            when = time.strftime("%H:%M:%S", time.localtime(peak.at))
            rows.append(
                (
                    measure.name,
                    now,
                    measure.text(peak.value),
                    self.where(peak.rank),
                    when,
                    _spark(samples, measure.field),
                )
            )
        return rows

    def __repr__(self) -> str:
        rows = self.rows()
        if not rows:
            return f"<history of {self.name}: {NOTHING}>"
        return text_table([HEAD, *rows])


def _field(name: str) -> int:
    """Returns the index of a field in the values of a part."""
    return UsageSample._fields.index(name) - 1


def _spark(samples: dict[int, list[UsageSample]], field: str) -> str:
    """Returns the peak of all ranks over time, a character for each part of it."""
    points = [(sample.at, getattr(sample, field)) for ranks in samples.values() for sample in ranks]
    begin, end = min(moment for moment, _ in points), max(moment for moment, _ in points)
    most = [0.0] * min(_SPARKS, max(map(len, samples.values())))
    for moment, value in points:
        part = min(len(most) - 1, int((moment - begin) / max(end - begin, 1e-6) * len(most)))
        most[part] = max(most[part], value)
    top = max(most) or 1.0
    return "".join(_SPARK[min(7, int(7.99 * max(0.0, value) / top))] for value in most)


def history(mesh: AnyMesh | MeshTrait) -> History:
    """Returns CPU, memory, GPU, and bytes in and out of the processes of a mesh over the last hour.

    Processes report every few seconds from the first call on, in a notebook with the extension from the beginning.
    Does not block. Raises TypeError for a value that is not a mesh of processes or actors.
    """
    if not isinstance(mesh, (ActorMesh, ProcMesh)):
        raise TypeError(f"a mesh of actors or processes has a history, not {kind_of(mesh)}")
    return History(mesh)
