"""After an error, or Stop, in a training on several ranks the next cell works, with the same names."""

import importlib.util
from collections.abc import Iterator

import pytest

from monarch_nb.collectives.connections import CAN_CUT
from tests.effort import daily
from tests.notebook.notebook import Cell, Notebook

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="torch is not installed"),
    pytest.mark.skipif(not CAN_CUT, reason="gloo's connections can be told apart on Linux alone"),
]

TRAIN = """
%%on workers
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
kept = {}  # modules that earlier cells have made

def train(kind, leaves):
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    model = kept.get(kind)
    if model is None:
        model = torch.nn.Linear(4, 4)
        if kind == "ddp":
            model = DistributedDataParallel(model)
        elif kind == "fsdp2":
            fully_shard(model)
        kept[kind] = model
    for step in range(3):
        if step == 1 and rank in leaves:
            leaves[rank]()
        loss = model(torch.ones(2, 4)).sum()
        loss.backward()
        if kind == "all_reduce":
            dist.all_reduce(loss.detach())
    return "trained"

def fail():
    raise ValueError("nan in batch 1")

def sleep():
    import time
    print("asleep", flush=True)
    time.sleep(600)
"""
PID = "%%on workers\nimport os; os.getpid()"


@pytest.fixture(scope="module")
def nb() -> Iterator[Notebook]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MONARCH_NB_PRELOAD", raising=False)
        notebook = Notebook()
    try:
        notebook.run("%mesh workers gpus=3\nimport monarch\nmonarch.config.configure(call_error_window='300ms')").ok()
        notebook.run(TRAIN.strip(), timeout=60).ok()
        yield notebook
    finally:
        notebook.close()


KINDS = ("all_reduce", "ddp", "fsdp2")


@pytest.mark.parametrize("kind", daily(KINDS, 1))
def test_the_cell_after_one_ranks_error_works_in_the_same_processes(nb: Notebook, kind: str) -> None:
    before = nb.run(PID).ok().text
    assert "trained" in nb.run(f"%%on workers\ntrain({kind!r}, {{}})", timeout=60).ok().text
    failed = nb.run(f"%%on workers\ntrain({kind!r}, {{1: fail}})", timeout=60)
    assert "The cell failed on 1 of 3 ranks of workers: gpus=1; in consequence the collectives of" in failed.traceback
    assert "ValueError: nan in batch 1" in failed.traceback
    assert "pair.cc" not in failed.traceback
    assert "trained" in nb.run(f"%%on workers\ntrain({kind!r}, {{}})", timeout=60).ok().text
    assert nb.run(PID).ok().text == before
    assert "True" in nb.run("%%on workers\ndist.is_initialized()").ok().text


@pytest.mark.parametrize("kind", daily(KINDS, 1))
def test_the_cell_after_two_stops_works_in_the_same_processes(nb: Notebook, kind: str) -> None:
    before = nb.run(PID).ok().text
    assert "trained" in nb.run(f"%%on workers\ntrain({kind!r}, {{}})", timeout=60).ok().text
    request = nb.start(f"%%on workers\ntrain({kind!r}, {{1: sleep}})")
    nb.until(request, Cell(), "asleep")
    nb.interrupt()
    nb.finish(request)
    nb.interrupt()
    assert "has not reacted" not in nb.shows(request, "Interrupted the cell on workers")
    assert "trained" in nb.run(f"%%on workers\ntrain({kind!r}, {{}})", timeout=60).ok().text
    assert nb.run(PID).ok().text == before


def test_interrupt_ends_a_wait_in_an_incomplete_process_group(nb: Notebook) -> None:
    source = "%%on workers gpus=0,2\nimport torch.distributed as d\nd.is_initialized() and d.destroy_process_group()\n"
    nb.run(source.replace(" gpus=0,2", "") + "kept.clear()").ok()
    request = nb.start(f"{source}print('joins', flush=True)\nd.init_process_group('gloo')")
    nb.until(request, Cell(), "joins")
    nb.interrupt()
    nb.finish(request)
    assert "interrupted" in nb.run("%interrupt workers", timeout=60).ok().stdout
    assert "trained" in nb.run("%%on workers\ntrain('ddp', {})", timeout=60).ok().text
