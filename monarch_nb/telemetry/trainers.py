"""Reports, as by `log`, of the values that frameworks' trainers log on a rank, without a line of the program.

In programs of a notebook's cell, the first rank shows tables of losses like the framework in a notebook.
"""

import os
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from typing import Any

from monarch_nb import telemetry
from monarch_nb._package import when_imported
from monarch_nb.runtime import started

__all__ = ["install", "lightning_callbacks", "pytorch_lightning_callbacks", "show_tables"]
_shows_tables = False


def install() -> None:
    """Has a framework's trainers report once the program imports it."""
    when_imported("transformers.trainer", _report_from_transformers)


def _report_from_transformers(module: Any) -> None:
    callback: Any = getattr(module, "TrainerCallback", None)
    defaults = getattr(module, "DEFAULT_CALLBACKS", None)
    if callback is None or not isinstance(defaults, list):  # another version of the framework
        return

    module.DEFAULT_CALLBACKS = [*defaults, type("MeshMetricsCallback", (callback,), {"on_log": _on_log})]
    plain = getattr(module, "DEFAULT_PROGRESS_CALLBACK", None)
    if isinstance(plain, type):
        module.DEFAULT_PROGRESS_CALLBACK = type("MeshProgressCallback", (), {"__new__": lambda _: _progress(plain)()})


def show_tables(enabled: bool) -> None:
    """Sets whether the next program of this process is shown by a cell with tables."""
    global _shows_tables
    _shows_tables = enabled


def _progress(plain: type) -> Any:
    """Returns the callback class for the progress of a `Trainer`: a table on the first rank, if it is displayed."""
    if _shows_tables and os.environ.get("RANK", "0") == "0":
        with suppress(ImportError, AttributeError):  # without IPython, or with another version
            return import_module("transformers.utils.notebook").NotebookProgressCallback
    return plain


def _on_log(
    _: object, args: object, state: Any, control: object, logs: Mapping[str, object] | None = None, **more: object
) -> None:
    """Reports values that a `Trainer` logs, for `mesh.metrics` and `%metrics`."""
    if logs is None or "train_runtime" in logs:  # the summary at the end is not a point of a curve
        return
    numbers = {name: value for name, value in logs.items() if isinstance(value, int | float) and name != "epoch"}
    telemetry.log(step=state.global_step, **numbers)


def lightning_callbacks() -> list[object]:
    """Returns the callbacks that Lightning, through an entry point, adds to every `Trainer` of a cluster."""
    return _callbacks_of("lightning.pytorch")


def pytorch_lightning_callbacks() -> list[object]:
    """Returns the same callbacks for the package `pytorch_lightning`."""
    return _callbacks_of("pytorch_lightning")


def _callbacks_of(package: str) -> list[object]:
    if started() is None:  # a program of Lightning alone
        return []
    methods = {"on_train_batch_end": _on_train_batch_end, "on_validation_end": _on_validation_end}
    return [type("MeshMetricsCallback", (import_module(package).Callback,), {**methods, "reported": {}})()]


def _on_train_batch_end(callback: Any, trainer: Any, *_: object) -> None:
    """Reports values that a `LightningModule` logs in its steps, as often as the trainer's loggers get them."""
    if trainer.global_step % trainer.log_every_n_steps == 0:
        _report_from_lightning(callback, trainer)


def _on_validation_end(callback: Any, trainer: Any, _: object) -> None:
    if not trainer.sanity_checking:
        _report_from_lightning(callback, trainer)


def _report_from_lightning(callback: Any, trainer: Any) -> None:
    """Reports the metrics that have changed since the last report."""
    numbers = {name: float(value) for name, value in trainer.callback_metrics.items() if value.numel() == 1}
    changed = {name: value for name, value in numbers.items() if callback.reported.get(name) != value}
    callback.reported = numbers
    if changed:
        telemetry.log(step=trainer.global_step, **changed)
