"""Loggers that ranks have themselves write as under torchrun: without a network, and without a line for the mesh."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.frameworks.needs import need
from tests.notebook.notebook import Notebook
from tests.polling import until

pytestmark = [pytest.mark.timeout(300), pytest.mark.frameworks, pytest.mark.slow]

ENVIRONMENT = """%%spmd procs=2
import os
os.chdir({folder!r})
os.environ["WANDB_MODE"] = "offline"
os.environ["MLFLOW_TRACKING_URI"] = {tracking!r}
os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
"""

BY_HAND = {
    "tensorboard": """
from torch.utils.tensorboard import SummaryWriter
with SummaryWriter(f"runs/{os.environ['RANK']}") as writer:
    for step in range(3):
        writer.add_scalar("loss", 1 / (1 + step), step)
""",
    "wandb": """
import wandb
with wandb.init(project="trial", group="both", name=f"rank{os.environ['RANK']}") as run:
    for step in range(3):
        run.log({"loss": 1 / (1 + step)})
""",
    "mlflow": """
import mlflow
if os.environ["RANK"] == "0":
    mlflow.set_experiment("trial")
    with mlflow.start_run(run_name="first"):
        for step in range(3):
            mlflow.log_metric("loss", 1 / (1 + step), step=step)
""",
}

TRANSFORMERS = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
rows = [{{"input_ids": (row := (torch.arange(8) + start) % 16), "labels": row}} for start in range(16)] * 4
model = LlamaForCausalLM(
    LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
)
os.environ["TENSORBOARD_LOGGING_DIR"] = "runs"
arguments = TrainingArguments(
    output_dir="out", run_name="trial", max_steps=4, logging_steps=1, save_strategy="no", use_cpu=True,
    report_to={name!r},
)
Trainer(model=model, args=arguments, train_dataset=rows).train()
"""

LIGHTNING = """
import lightning as L
from lightning.pytorch import loggers
from lightning.pytorch.demos.boring_classes import BoringModel
class Logged(BoringModel):
    def training_step(self, batch, index):
        given = super().training_step(batch, index)
        self.log("loss", given["loss"])
        return given
L.Trainer(
    accelerator="cpu", devices=2, max_steps=4, log_every_n_steps=1, limit_val_batches=0, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False, logger=loggers.{logger},
).fit(Logged())
"""
LIGHTNING_LOGGERS = {
    "tensorboard": 'TensorBoardLogger("runs")',
    "wandb": 'WandbLogger(project="trial", offline=True)',
    "mlflow": 'MLFlowLogger("trial", tracking_uri=os.environ["MLFLOW_TRACKING_URI"])',
}
WRITTEN: dict[str, Callable[[Path], list[Path]]] = {
    "tensorboard": lambda folder: list(folder.glob("runs/**/events.out.tfevents.*")),
    "wandb": lambda folder: list(folder.glob("wandb/offline-run-*/run-*.wandb")),
    "mlflow": lambda folder: list(folder.glob("mlruns/*/*/metrics/**/loss")),
}


def run(nb: Notebook, folder: Path, program: str) -> None:
    nb.aside("%load_ext monarch")
    nb.run(ENVIRONMENT.format(folder=str(folder), tracking=f"file://{folder}/mlruns") + program, timeout=150).ok()


def check(name: str, folder: Path, runs: int) -> None:
    """The logger writes the loss, in so many runs; wandb by a process of its own."""
    until(lambda: len(WRITTEN[name](folder)) == runs)
    until(lambda: all(path.name == "loss" or b"loss" in path.read_bytes() for path in WRITTEN[name](folder)))


@pytest.mark.parametrize("name", BY_HAND)
def test_loggers_that_a_program_calls_write_in_ranks(fresh: Notebook, tmp_path: Path, name: str) -> None:
    need(name)
    run(fresh, tmp_path, BY_HAND[name])
    check(name, tmp_path, 1 if name == "mlflow" else 2)


@pytest.mark.parametrize("name", WRITTEN)
def test_loggers_of_transformers_write_on_rank_0(fresh: Notebook, tmp_path: Path, name: str) -> None:
    need(name, "transformers", "accelerate")
    run(fresh, tmp_path, TRANSFORMERS.format(name=name))
    check(name, tmp_path, 1)


@pytest.mark.parametrize("name", WRITTEN)
def test_loggers_of_lightning_write_on_rank_0(fresh: Notebook, tmp_path: Path, name: str) -> None:
    need(name, "lightning")
    run(fresh, tmp_path, LIGHTNING.format(logger=LIGHTNING_LOGGERS[name]))
    check(name, tmp_path, 1)
