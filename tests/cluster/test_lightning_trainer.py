"""A `Trainer` created here runs on the ranks of a mesh, and ends in the state of a local training."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

L = pytest.importorskip("lightning", reason="Lightning is not installed here: make test-frameworks")

import torch  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from monarch_nb.actor import ActorError, ProcMesh, SupervisionError, heal_mesh  # noqa: E402
from monarch_nb.connect import shutdown  # noqa: E402
from monarch_nb.lightning import MonarchModelParallelStrategy, MonarchStrategy  # noqa: E402
from tests.cluster.actor_tools import Faults, spawned  # noqa: E402
from tests.effort import AS_LATER  # noqa: E402
from tests.polling import until  # noqa: E402

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.timeout(180),
    pytest.mark.filterwarnings("ignore"),  # Lightning's advice about workers of data loaders
]


class Line(L.LightningModule):  # type: ignore[misc]
    def __init__(self, wrong: str = "", folder: Path = Path()) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.wrong, self.folder = wrong, folder

    def training_step(self, batch: Any, index: int) -> Any:
        if index == 2 and self.trainer.global_rank == 1:
            if self.wrong == "raises":
                raise ValueError("no such batch")
            if self.wrong == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
        if index == 2 and self.wrong == "waits":
            (self.folder / f"waits{self.trainer.global_rank}").touch()
            threading.Event().wait()
        loss = torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1]), sync_dist=True)

    def predict_step(self, batch: Any, index: int) -> Any:
        return self.layer(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def data() -> Any:
    x = torch.linspace(-1, 1, 128).unsqueeze(1)
    return DataLoader(TensorDataset(x, 3 * x + 1), batch_size=8)


def trainer(mesh: ProcMesh | None, **options: Any) -> Any:
    arguments = {"logger": False, "enable_checkpointing": False, "max_epochs": 8, **options}
    arguments.setdefault("strategy", MonarchStrategy(mesh))
    return L.Trainer(accelerator="cpu", enable_progress_bar=False, enable_model_summary=False, **arguments)


@pytest.fixture(scope="module", autouse=True)
def born_with_lightning() -> Iterator[None]:
    """As procs of users of it soon are; importing it dominates these tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MONARCH_NB_PRELOAD", f"{AS_LATER},lightning")
        shutdown()
        yield
        shutdown()


@pytest.fixture
def workers() -> Iterator[ProcMesh]:
    spawning = spawned(2, "workers")
    yield next(spawning)
    next(spawning, None)


def test_a_fit_leaves_weights_metrics_counters_and_checkpoints_here(workers: ProcMesh, tmp_path: Path) -> None:
    model = Line()
    first = trainer(workers, default_root_dir=tmp_path, enable_checkpointing=True)
    first.fit(model, data(), data())
    assert (first.world_size, first.num_devices, first.global_step, first.current_epoch) == (2, 2, 64, 8)
    assert model.layer.weight.item() == pytest.approx(3, abs=0.2)
    assert first.callback_metrics["val_loss"].item() < 0.1
    best = Path(first.checkpoint_callback.best_model_path)
    assert best.is_file()
    assert tmp_path in best.parents
    with pytest.raises(RuntimeError, match=r"has run fit\(\) before"):
        first.fit(model, data())
    assert first.validate(model, data(), verbose=False)[0]["val_loss"] < 0.1
    predicted = trainer(workers).predict(model, data())
    assert sum(map(len, predicted)) == 64
    reported = {rank: [step for step, _ in points] for rank, points in workers.metrics["loss"].items()}
    assert [steps[:7] for steps in reported.values()] == [[8, 16, 24, 32, 40, 48, 50]] * 2
    assert "val_loss" in workers.metrics
    larger = trainer(None, devices=3, max_epochs=9, default_root_dir=tmp_path)
    larger.fit(model, data(), ckpt_path=str(best))
    assert (larger.world_size, larger.current_epoch, larger.global_step) == (3, 9, 64 + 6)


class Sharded(L.LightningModule):  # type: ignore[misc]
    """A model of two layers that FSDP2 shards over all ranks."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Linear(8, 1))
        self.folder = folder

    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard

        for layer in (*self.layers, self.layers):
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, index: int) -> Any:
        if index == 0:
            local = sum(part.to_local().numel() for part in self.layers.parameters())
            (self.folder / f"rank{self.trainer.global_rank}").write_text(str(local))
        loss = torch.nn.functional.mse_loss(self.layers(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def test_a_sharded_model_trains_and_has_all_weights_here_afterwards(workers: ProcMesh, tmp_path: Path) -> None:
    model = Sharded(tmp_path)
    strategy = MonarchModelParallelStrategy(workers, data_parallel_size=2, tensor_parallel_size=1)
    sharded = trainer(None, strategy=strategy, max_epochs=16)
    sharded.fit(model, data())
    assert (sharded.world_size, sharded.global_step) == (2, 128)
    sizes = [int((tmp_path / f"rank{rank}").read_text()) for rank in range(2)]
    assert sum(sizes) == 8 + 8 + 8 + 1
    assert max(sizes) < 25, "each rank has a part of the parameters"
    with torch.no_grad():
        assert model.layers(torch.ones(1, 1)).item() == pytest.approx(4, abs=0.2)
    assert "loss" in sharded.callback_metrics


def test_arguments_that_shard_are_refused_with_what_takes_them(workers: ProcMesh) -> None:
    with pytest.raises(TypeError, match=r"takes no sharding_strategy: use MonarchModelParallelStrategy\(mesh"):
        MonarchStrategy(workers, sharding_strategy="FULL_SHARD")
    with pytest.raises(TypeError, match=r"MonarchModelParallelStrategy\(\) takes a mesh of processes, not"):
        MonarchModelParallelStrategy("workers")


@pytest.mark.slow
def test_an_exception_on_a_rank_ends_the_fit_everywhere(workers: ProcMesh) -> None:
    with pytest.raises(ActorError, match="no such batch") as raised:
        trainer(workers).fit(Line("raises"), data())
    assert "gpus=1" in str(raised.value)
    trainer(workers, max_epochs=1).fit(Line(), data())


@pytest.mark.slow
def test_a_killed_rank_ends_the_fit_until_healed(workers: ProcMesh, faults: Faults) -> None:
    with pytest.raises(SupervisionError, match=r"ended     by signal 9 \(SIGKILL\)"):
        trainer(workers).fit(Line("dies"), data())
    assert "gpus': 1/2" in str(faults.next())
    trainer(heal_mesh(workers), max_epochs=1).fit(Line(), data())


@pytest.mark.slow
def test_stop_ends_the_training_on_all_ranks(workers: ProcMesh, tmp_path: Path) -> None:
    def press() -> None:
        until(lambda: len(list(tmp_path.glob("waits*"))) == 2)
        os.kill(os.getpid(), signal.SIGINT)

    handler = signal.getsignal(signal.SIGINT)
    presses = threading.Thread(target=press)
    presses.start()
    with pytest.raises(RuntimeError, match="the training on workers was interrupted; its processes can be used"):
        trainer(workers).fit(Line("waits", tmp_path), data())
    presses.join()
    assert signal.getsignal(signal.SIGINT) is handler
    trainer(workers, max_epochs=1).fit(Line(), data())
