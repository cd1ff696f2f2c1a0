"""Export of a mesh's metrics to TensorBoard, Weights & Biases and MLflow, by the controller alone, on arrival."""

import importlib
import logging
import queue
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from monarch_nb._package import on_exit
from monarch_nb.telemetry.verbs import MetricPoint
from monarch_nb.wire import error_line

__all__ = ["TARGETS", "MetricsExport"]

logger = logging.getLogger("monarch_nb.telemetry")
_CLOSE_S = 30.0  # for the remaining values when an export is closed


class Target(Protocol):
    """A destination of metrics. Its methods are called on one thread, and may block."""

    def write(self, points: Sequence[tuple[str, MetricPoint]]) -> None:
        """Writes values, each with the text of its rank; "" for a mesh of one."""

    def close(self) -> None:
        """Writes buffered values, and ends the run."""


class TensorBoard:
    """A run for each rank in a folder, so that the curves of a metric share one chart."""

    def __init__(self, name: str, folder: str | None = None) -> None:
        self._folder = folder or f"runs/{name}"
        self._module = importlib.import_module("torch.utils.tensorboard")
        self._writers: dict[str, Any] = {}
        Path(self._folder).mkdir(parents=True, exist_ok=True)

    def _writer(self, rank: str) -> Any:
        if rank not in self._writers:
            self._writers[rank] = self._module.SummaryWriter(f"{self._folder}/{rank}" if rank else self._folder)
        return self._writers[rank]

    def write(self, points: Sequence[tuple[str, MetricPoint]]) -> None:
        """Writes values, with the times of their reports."""
        for rank, point in points:
            self._writer(rank).add_scalar(point.name, point.value, round(point.step or 0), walltime=point.at)
        for writer in self._writers.values():
            writer.flush()

    def close(self) -> None:
        """Closes the files."""
        for writer in self._writers.values():
            writer.close()


class WeightsAndBiases:
    """A run with a chart for each name and rank, over the steps of the mesh. `options` are those of `wandb.init`."""

    def __init__(self, name: str, **options: Any) -> None:
        self._run = importlib.import_module("wandb").init(**{"name": name, **options})
        self._run.define_metric("*", step_metric="step")

    def write(self, points: Sequence[tuple[str, MetricPoint]]) -> None:
        """Logs values; all values of a step together."""
        by_step: dict[float, dict[str, float]] = {}
        for rank, point in points:
            by_step.setdefault(point.step or 0.0, {})[f"{point.name}/{rank}" if rank else point.name] = point.value
        for step, values in by_step.items():
            self._run.log({**values, "step": step})

    def close(self) -> None:
        """Finishes the run."""
        self._run.finish()


class MLflow:
    """A run with a metric for each name and rank. `options` are those of `start_run`, and `experiment`."""

    def __init__(self, name: str, experiment: str | None = None, **options: Any) -> None:
        mlflow = importlib.import_module("mlflow")
        self._metric = importlib.import_module("mlflow.entities").Metric
        self._client = mlflow.MlflowClient()
        entity = None if experiment is None else mlflow.set_experiment(experiment)
        options = {"run_name": name, **({} if entity is None else {"experiment_id": entity.experiment_id}), **options}
        self._run: str = mlflow.start_run(**options).info.run_id
        mlflow.end_run("RUNNING")  # not the program's active run

    def write(self, points: Sequence[tuple[str, MetricPoint]]) -> None:
        """Logs values, at most 1,000 at a time, the service's limit."""
        metrics = [
            self._metric(_mlflow_name(point.name, rank), point.value, round(point.at * 1000), round(point.step or 0))
            for rank, point in points
        ]
        for start in range(0, len(metrics), 1000):
            self._client.log_batch(self._run, metrics=metrics[start : start + 1000])

    def close(self) -> None:
        """Marks the run as finished."""
        self._client.set_terminated(self._run)


def _mlflow_name(name: str, rank: str) -> str:
    """Returns a name of the characters that MLflow accepts."""
    return re.sub(r"[^\w\-. :/]", "-", f"{name}/{rank}" if rank else name)


TARGETS: dict[str, Callable[..., Target]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases, "mlflow": MLflow}


class MetricsExport:
    """Writes the values of a mesh to a target as they arrive, on its own thread, until it or the mesh ends.

    `rank_of` returns the text of a value's rank, None for values of other meshes. `close` calls `finish` first.
    """

    def __init__(
        self,
        name: str,
        target: str,
        options: dict[str, Any],
        rank_of: Callable[[MetricPoint], str | None],
        finish: "Callable[[MetricsExport], object]",
    ) -> None:
        if target not in TARGETS:
            raise ValueError(f"metrics.export({target!r}): the targets are {', '.join(TARGETS)}")
        try:
            self._target = TARGETS[target](name, **options)
        except ImportError as error:
            missing = error.name or target
            raise ImportError(f"metrics.export({target!r}) needs {missing}: pip install {target}") from error
        self.name, self.target, self.options = name, target, options
        self.written = 0  # values
        self.error = ""  # of the last write, if it failed
        self._rank_of, self._finish = rank_of, finish
        self._queue: queue.SimpleQueue[list[MetricPoint] | None] = queue.SimpleQueue()
        self._closing = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"monarch-metrics-{target}", daemon=True)
        self._thread.start()
        self._cancel_exit = on_exit(self.close)

    def put(self, points: Sequence[MetricPoint]) -> None:
        """Queues values, except those of other meshes, to be written. Does not block."""
        self._queue.put(list(points))

    def close(self) -> None:
        """Writes the queued values, and ends the run. Blocks for up to 30 s. A second call does nothing."""
        with self._closing:
            first, self._closed = not self._closed, True
        if first:
            self._cancel_exit()
            self._finish(self)
            self._queue.put(None)
        self._thread.join(_CLOSE_S)

    def __enter__(self) -> "MetricsExport":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = f"failed: {self.error}" if self.error else "closed" if self._closed else "open"
        return f"<export of {self.name}'s metrics to {self.target}: {self.written:,} values written, {state}>"

    # -- its thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (points := self._next()) is not None:
            self._attempt(
                self._write, [(rank, point) for point in points if (rank := self._rank_of(point)) is not None]
            )
        self._attempt(self._target.close)

    def _next(self) -> list[MetricPoint] | None:
        """Waits for values, and returns all queued ones; None at the end."""
        points = self._queue.get()
        while points is not None and not self._queue.empty():
            more = self._queue.get()
            if more is None:
                self._queue.put(None)
                break
            points += more
        return points

    def _write(self, points: Sequence[tuple[str, MetricPoint]]) -> None:
        if points:
            self._target.write(points)
            self.written += len(points)

    def _attempt(self, action: Callable[..., None], *arguments: Any) -> None:
        """Runs an action, and reports the first failure; later values are still attempted."""
        try:
            action(*arguments)
        except Exception as error:
            if not self.error:
                text = "metrics of %s are not written to %s: %s; mesh.metrics has them"
                logger.warning(text, self.name, self.target, error_line(error))
            self.error = error_line(error)
        else:
            self.error = ""
