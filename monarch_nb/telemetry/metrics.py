"""Metrics that the actors of a mesh have reported, for people."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from monarch_nb.mesh import Handle, region_of, state_of
from monarch_nb.runtime import MeshState
from monarch_nb.telemetry.exports import MetricsExport
from monarch_nb.telemetry.series import ByName
from monarch_nb.wire import text_table


class Metrics:
    """Values that the actors of a mesh (or of the procs of one) have reported with `monarch.telemetry.log`.

    `series_of` returns the stored values of a mesh by its uid; `fetch` fetches unsent values; `export` begins to write
    values elsewhere, and `exports_of` returns the exports that have begun.
    """

    def __init__(
        self,
        mesh: Handle[MeshState],
        series_of: Callable[[str], ByName],
        fetch: Callable[[Handle[MeshState]], None] = lambda mesh: None,
        export: Callable[[Handle[MeshState], str, dict[str, object]], MetricsExport] | None = None,
        exports_of: Callable[[Handle[MeshState]], Sequence[MetricsExport]] = lambda mesh: (),
    ) -> None:
        self._mesh = mesh
        self._series_of = series_of
        self._fetch = fetch
        self._export = export
        self._exports_of = exports_of

    @property
    def mesh(self) -> Handle[MeshState]:
        """The mesh, or slice, whose values these are."""
        return self._mesh

    @property
    def name(self) -> str:
        """The name of the mesh."""
        return str(state_of(self._mesh).name)

    def _read(self) -> ByName:
        """Returns the values of the ranks of the mesh, or slice."""
        self._fetch(self._mesh)
        bases = {base: index for index, base in enumerate(region_of(self._mesh).ranks())}
        by_name: ByName = {}
        for state in (state_of(self._mesh), *getattr(state_of(self._mesh), "actors", {}).values()):
            for name, ranks in self._series_of(state.uid).items():
                for base, samples in ranks.items():
                    if base in bases:
                        by_name.setdefault(name, {}).setdefault(bases[base], []).extend(samples)
        return by_name

    def __getitem__(self, name: str) -> dict[int, list[tuple[float, float]]]:
        """Returns the (step, value) pairs of each rank. Raises KeyError for a name without reports."""
        series = self._read()[name]
        return {rank: [(sample.step, sample.value) for sample in samples] for rank, samples in series.items()}

    def __iter__(self) -> Iterator[str]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())

    def __contains__(self, name: object) -> bool:
        return name in self._read()

    def latest(self) -> Mapping[str, dict[int, float]]:
        """Returns the newest value of each name, by rank."""
        return {
            name: {rank: samples[-1].value for rank, samples in ranks.items()} for name, ranks in self._read().items()
        }

    def export(self, target: str, **options: object) -> MetricsExport:
        """Writes these values, and all later ones, to "tensorboard", "wandb" or "mlflow". Does not block afterwards.

        The controller writes; the ranks need none of these packages. `options` are `folder` of TensorBoard (by default
        `runs/NAME`), those of `wandb.init`, or `experiment` and those of `mlflow.start_run`. The export ends with the
        mesh, the program, or `close()` of the result. A later failure is reported once, and writes are tried again.
        Raises ValueError for another target, ImportError without its package, and the package's own errors.
        """
        if self._export is None:
            raise ValueError("only metrics of a mesh can be exported")
        return self._export(self._mesh, target, options)

    @property
    def exports(self) -> Sequence[MetricsExport]:
        """The exports of the mesh, or of this slice, that have not ended."""
        return self._exports_of(self._mesh)

    def __repr__(self) -> str:
        by_name = self._read()
        if not by_name:
            return "<no metrics yet: call monarch.telemetry.log(loss=..., step=...) in an actor>"
        rows = [("metric", "ranks", "steps", "latest (mean)", "lowest", "highest")]
        for name, ranks in by_name.items():
            latest = [samples[-1].value for samples in ranks.values()]
            values = [sample.value for samples in ranks.values() for sample in samples]
            most = max(len(samples) for samples in ranks.values())
            cells = (f"{sum(latest) / len(latest):.6g}", f"{min(values):.6g}", f"{max(values):.6g}")
            rows.append((name, str(len(ranks)), str(most), *cells))
        return text_table(rows)
