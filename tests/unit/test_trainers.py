"""What a framework's trainer logs is reported without a line of the program."""

import sys
import types
from typing import Any

import pytest

from monarch_nb import telemetry
from monarch_nb.telemetry import trainers

pytestmark = pytest.mark.timeout(20)


class Callback:
    """As `transformers.TrainerCallback` is: all events do nothing."""


def test_numbers_that_a_trainer_of_transformers_logs_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[dict[str, Any]] = []
    monkeypatch.setattr(telemetry, "log", lambda **values: reported.append(values), raising=False)
    module = types.ModuleType("transformers.trainer")
    vars(module).update(TrainerCallback=Callback, DEFAULT_CALLBACKS=[Callback])
    monkeypatch.setitem(sys.modules, "transformers.trainer", module)
    trainers.install()
    first, added = module.DEFAULT_CALLBACKS
    assert first is Callback
    state = types.SimpleNamespace(global_step=3)
    added().on_log(None, state, None, logs={"loss": 0.5, "note": "text", "epoch": 0.1}, model=None)
    added().on_log(None, state, None, logs={"train_runtime": 2.0, "train_loss": 0.5})
    assert reported == [{"step": 3, "loss": 0.5}]


def test_an_unknown_version_of_transformers_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("transformers.trainer")
    monkeypatch.setitem(sys.modules, "transformers.trainer", module)
    trainers.install()
    assert not hasattr(module, "DEFAULT_CALLBACKS")
