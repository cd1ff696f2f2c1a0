"""The same small training by each framework, as people write it in a cell, with a fault in the data of rank 1."""

from dataclasses import dataclass

FAULTS = {
    "none": "pass",
    "raises": 'raise ValueError("bad batch")',
    "dies": "os.kill(os.getpid(), signal.SIGKILL)",
    "hangs": 'print("no more batches", flush=True); time.sleep(600)',
}

DATA = """
import os, signal, time
import torch
from torch.utils.data import DataLoader, TensorDataset, default_collate

def faulty(collate):
    read = 0
    def collated(rows):
        nonlocal read
        read += 1
        if read == 4 and os.environ["RANK"] == "1":
            {fault}
        return collate(rows)
    return collated

torch.manual_seed(0)
x = torch.randn(64, 8)
data = TensorDataset(x, x.sum(1, keepdim=True))
"""

BY_HAND = """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
steps = 0
while steps < {steps}:
    for inputs, targets in DataLoader(data, batch_size=8, collate_fn=faulty(default_collate)):
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps += 1
        if steps == 6:
            print("under way", flush=True)
"""

ACCELERATE = """
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = DataLoader(data, batch_size=4, collate_fn=faulty(default_collate))
model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
steps = 0
while steps < {steps}:
    for inputs, targets in batches:
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        steps += 1
        if steps == 6:
            print("under way", flush=True)
"""

WORDS = """
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

class UnderWay(TrainerCallback):
    def on_step_end(self, args, state, control, **more):
        if state.global_step == 6:
            print("under way", flush=True)

config = LlamaConfig(
    vocab_size=12, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
    pad_token_id=0, bos_token_id=None, eos_token_id=1,
)
"""

TRANSFORMERS = (
    WORDS
    + """
from transformers import Trainer, TrainingArguments, default_data_collator

rows = [{{"input_ids": (row := (torch.arange(8) + start) % 12), "labels": row}} for start in range(12)] * 8
arguments = TrainingArguments(
    output_dir="/tmp/monarch_trainings", max_steps={steps}, per_device_train_batch_size=4, save_strategy="no",
    disable_tqdm=True, use_cpu=True,
)
Trainer(
    model=LlamaForCausalLM(config), args=arguments, train_dataset=rows, callbacks=[UnderWay()],
    data_collator=faulty(default_data_collator),
).train()
"""
)

TRL = (
    WORDS
    + """
import datasets
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

datasets.disable_progress_bars()
words = [f"word{{number}}" for number in range(10)]
vocabulary = {{word: index for index, word in enumerate(["<pad>", "<eos>", *words])}}
splitter = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
splitter.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
texts = [{{"text": " ".join(words[start:] + words[:start])}} for start in range(10)] * 8
arguments = SFTConfig(
    output_dir="/tmp/monarch_trainings", max_steps={steps}, per_device_train_batch_size=4, save_strategy="no",
    disable_tqdm=True, use_cpu=True, bf16=False,
)
trainer = SFTTrainer(
    model=LlamaForCausalLM(config), args=arguments, callbacks=[UnderWay()],
    train_dataset=datasets.Dataset.from_list(texts),
    processing_class=PreTrainedTokenizerFast(tokenizer_object=splitter, pad_token="<pad>", eos_token="<eos>"),
)
trainer.data_collator = faulty(trainer.data_collator)
trainer.train()
"""
)

LIGHTNING = """
import lightning

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch, number):
        inputs, targets = batch
        return torch.nn.functional.mse_loss(self.layer(inputs), targets)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_batch_end(self, *found):
        if self.global_step == 6:
            print("under way", flush=True)

lightning.Trainer(
    accelerator="cpu", devices=2, strategy="ddp", max_steps={steps}, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
).fit(Module(), DataLoader(data, batch_size=4, collate_fn=faulty(default_collate)))
"""


@dataclass(frozen=True)
class Training:
    """A training by one framework."""

    name: str
    packages: tuple[str, ...]
    source: str

    def cell(self, fault: str = "none", steps: int = 8) -> str:
        """A cell that trains on two ranks, with a fault in the fourth batch of rank 1; its value is 'trained'."""
        data = DATA.format(fault=FAULTS[fault])
        return f"%%spmd procs=2\n{data}{self.source.format(steps=steps)}\n'trained'"


TRAININGS = (
    Training("DDP by hand", ("torch",), BY_HAND),
    Training("Accelerate", ("torch", "accelerate"), ACCELERATE),
    Training("Transformers", ("torch", "transformers", "accelerate"), TRANSFORMERS),
    Training("TRL", ("torch", "trl", "datasets", "tokenizers"), TRL),
    Training("Lightning", ("torch", "lightning"), LIGHTNING),
)
