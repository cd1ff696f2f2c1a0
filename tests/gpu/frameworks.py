"""Frameworks that people train with, in actors on one GPU."""

import os
import tempfile
from typing import Any

from monarch_nb.actor import Actor, endpoint, this_host
from tests.gpu import DEVICE, NotTried, fact, need_gpu


def _ready(module: str) -> None:
    import importlib.util

    if importlib.util.find_spec(module) is None:
        raise NotTried(f"{module} is not installed")
    if DEVICE == "cuda":
        need_gpu()


class Trainer(Actor):
    """One rank of a training."""

    @endpoint
    def transformers(self) -> tuple[str, list[float]]:
        """Steps of a small Llama by transformers' own Trainer."""
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

        torch.manual_seed(0)
        config = LlamaConfig(vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=4,
                             num_attention_heads=4, num_key_value_heads=4)  # fmt: skip
        model = LlamaForCausalLM(config)
        rows = [{"input_ids": (row := torch.randint(0, 512, (64,))), "labels": row} for _ in range(8)] * 16
        arguments = TrainingArguments(
            output_dir=tempfile.mkdtemp(), max_steps=30, per_device_train_batch_size=8, learning_rate=1e-3,
            logging_steps=5, report_to=[], disable_tqdm=True, use_cpu=DEVICE == "cpu", bf16=DEVICE == "cuda",
            save_strategy="no",
        )  # fmt: skip
        trainer = Trainer(model=model, args=arguments, train_dataset=rows)  # type: ignore[arg-type]
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return str(next(model.parameters()).device), losses

    @endpoint
    def lightning(self) -> tuple[str, list[float]]:
        """Steps by Lightning's Trainer."""
        import lightning
        import torch
        from torch import nn

        losses: list[float] = []

        class Module(lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.layers = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))

            def training_step(self, batch: Any, number: int) -> torch.Tensor:
                x, y = batch
                loss = nn.functional.mse_loss(self.layers(x), y)
                losses.append(float(loss))
                return loss

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return torch.optim.AdamW(self.parameters(), 1e-2)

        torch.manual_seed(0)
        x = torch.randn(512, 32)
        data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
        module = Module()
        trainer = lightning.Trainer(
            accelerator="gpu" if DEVICE == "cuda" else "cpu", devices=1, max_epochs=4, enable_checkpointing=False,
            logger=False, enable_progress_bar=False, enable_model_summary=False,
            precision="bf16-mixed" if DEVICE == "cuda" else "32-true",
        )  # fmt: skip
        trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=64))
        return str(trainer.strategy.root_device), losses

    @endpoint
    def fsdp2(self, backend: str) -> tuple[str, list[float]]:
        """Steps of a sharded model by `fully_shard`."""
        import torch
        import torch.distributed as dist
        from torch import nn
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        if DEVICE == "cuda":
            torch.cuda.set_device(0)
        if not dist.is_initialized():
            dist.init_process_group(backend)
        mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)), nn.Linear(64, 1)).to(
            DEVICE
        )
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in model:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        x = torch.randn(64, 64, device=DEVICE)
        y = x.sum(1, keepdim=True)
        losses = []
        for _ in range(20):
            loss = nn.functional.mse_loss(model(x).float(), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
        dist.destroy_process_group()
        return f"{next(model.parameters()).to_local().device}", losses  # type: ignore[attr-defined]

    @endpoint
    def generate(self) -> tuple[str, int]:
        """Tokens of a model that transformers generates."""
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=4,
                             num_attention_heads=4, num_key_value_heads=4)  # fmt: skip
        model = LlamaForCausalLM(config).to(DEVICE)
        tokens = model.generate(torch.ones(2, 4, dtype=torch.long, device=DEVICE), max_new_tokens=16, do_sample=False)
        return str(tokens.device), tokens.shape[1]


def _spawn(count: int = 1) -> tuple[Any, Any]:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    procs = this_host().spawn_procs(per_host={"ranks": count})
    return procs, procs.spawn("trainers", Trainer)


def _learns(result: tuple[str, list[float]]) -> str:
    device, losses = result
    assert losses[-1] < losses[0] * 0.9, losses
    assert device.startswith(DEVICE), device
    return f"on {device}: loss {losses[0]:.3f} to {losses[-1]:.3f}"


@fact(limit_s=120)
def transformers_trainer() -> str:
    """Transformers: a small Llama learns by its Trainer, in an actor"""
    _ready("transformers")
    procs, trainers = _spawn()
    result = trainers.transformers.call_one().get(100)
    procs.stop().get(20)
    return _learns(result)


@fact(limit_s=120)
def transformers_generate() -> str:
    """Transformers: generate(), in an actor"""
    _ready("transformers")
    procs, trainers = _spawn()
    device, length = trainers.generate.call_one().get(100)
    procs.stop().get(20)
    assert device.startswith(DEVICE)
    assert length > 4
    return f"{length} tokens on {device}"


@fact(limit_s=120)
def lightning_trainer() -> str:
    """Lightning: Trainer.fit in mixed precision, in an actor"""
    _ready("lightning")
    procs, trainers = _spawn()
    result = trainers.lightning.call_one().get(100)
    procs.stop().get(20)
    return _learns(result)


@fact(limit_s=120)
def fsdp2_on_one_rank() -> str:
    """FSDP2: fully_shard on one rank with NCCL, in an actor"""
    _ready("torch")
    procs, trainers = _spawn()
    result = trainers.fsdp2.call_one("nccl" if DEVICE == "cuda" else "gloo").get(100)
    procs.stop().get(20)
    return _learns(result)


@fact(limit_s=120)
def fsdp2_on_two_ranks_of_one_gpu() -> str:
    """FSDP2: fully_shard on two ranks that share the GPU, with gloo, in actors"""
    _ready("torch")
    procs, trainers = _spawn(2)
    results = trainers.fsdp2.call("cpu:gloo,cuda:gloo" if DEVICE == "cuda" else "gloo").get(100)
    procs.stop().get(20)
    return "; ".join(sorted({_learns(result) for result in results.values()}))
