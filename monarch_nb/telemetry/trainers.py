"""What trainers of frameworks log on a rank is reported as `log` reports it, without a line of the program."""

from collections.abc import Mapping
from typing import Any

from monarch_nb import telemetry
from monarch_nb._imported import when_imported

__all__ = ["install"]


def install() -> None:
    """Has a framework's trainers report once the program imports it."""
    when_imported("transformers.trainer", _report_from_transformers)


def _report_from_transformers(module: Any) -> None:
    callback: Any = getattr(module, "TrainerCallback", None)
    defaults = getattr(module, "DEFAULT_CALLBACKS", None)
    if callback is None or not isinstance(defaults, list):  # another version of it
        return

    module.DEFAULT_CALLBACKS = [*defaults, type("MeshMetricsCallback", (callback,), {"on_log": _on_log})]


def _on_log(_: Any, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **more: Any) -> None:
    """Reports what a `Trainer` logs, for `mesh.metrics` and `%metrics`."""
    if logs is None or "train_runtime" in logs:  # the summary at the end is no point of a curve
        return
    numbers = {name: value for name, value in logs.items() if isinstance(value, int | float) and name != "epoch"}
    telemetry.log(step=state.global_step, **numbers)
