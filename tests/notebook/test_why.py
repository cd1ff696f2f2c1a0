"""A cell that hangs says which rank is to blame, by itself and to `%why`."""

import importlib.util
import os
from pathlib import Path

import pytest

from tests.notebook.dap_client import Debugger
from tests.notebook.notebook import Cell, Notebook

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="torch is not installed"),
]

JOIN = """
%mesh workers gpus=3
from monarch.actor import Actor, endpoint
class Trainer(Actor):
    @endpoint
    def join(self):
        import torch.distributed as dist
        dist.init_process_group("gloo")
    @endpoint
    def train(self, pipe):
        import torch, torch.distributed as dist
        if dist.get_rank() == 1:
            open(pipe).read()
        dist.all_reduce(torch.ones(4))
trainers = workers.spawn("trainers", Trainer)
trainers.join.call().get()
"""


def test_a_hang_is_explained_beneath_the_cell_and_by_why(loaded: Notebook, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    loaded.run("import monarch_nb.diagnosis.collector as collector; collector.WITHOUT_PROGRESS_S = 1.0").ok()
    loaded.run(JOIN).ok()
    cell = loaded.run("%why").ok()
    assert "nothing found: " in cell.text
    assert "<b>nothing found</b>" in cell.html
    request, cell = loaded.start(f"trainers.train.call({str(tmp_path / 'pipe')!r}).get()"), Cell()
    loaded.until(request, cell, "gpus=1 has not begun all_reduce no. 1", 60)
    loaded.interrupt()
    cell = loaded.finish(request)
    output = cell.stdout + cell.stderr + cell.traceback + str(cell.displays) + str(cell.updates)
    assert "gpus=1 has not begun all_reduce no. 1" in output
    assert "%why trainers --abort ends it with that" in output
    shown = loaded.run("%why trainers").ok()
    text = shown.text
    assert ">gpus=1 has not begun all_reduce no. 1" in shown.html
    assert "workers: gpus=1 has not begun all_reduce no. 1" in text
    assert "where gpus=0,2 have waited" in text
    assert "takes the name of one mesh" in loaded.run("%why trainers workers").stderr
    assert "%why knows no option --now" in loaded.run("%why --abort --now").stderr
    assert "ended: trainers.train(); gpus=1 of workers did not react" in loaded.run("%why trainers --abort").ok().text
    loaded.run(f"open({str(tmp_path / 'pipe')!r}, 'w').close()").ok()
    loaded.run("trainers.join.call().get(); trainers.train.call('/dev/null').get()").ok()
    assert "nothing found: 3 processes of workers for 1 s" in loaded.run("%why workers --slow 1").ok().text
    cell = loaded.run("%%why workers --slow\ntrainers.train.call('/dev/null').get()\n'done'").ok()
    assert "done" in cell.displays[0]["text/plain"]
    assert "3 processes of workers for " in cell.text
    assert "3 processes of workers for " in cell.html
    assert "<b>no NaN was found</b>" in loaded.run("%%watch trainers\ntrainers.train.call('/dev/null').get()").ok().html
    assert "write %%why NAME --slow" in loaded.run("%%why workers\n1").stderr
    assert "nothing found: 0 tensors on 3 ranks of trainers" in loaded.run("%why trainers --replicas").ok().text
    assert "write %why NAME --replicas" in loaded.run("%why --replicas").stderr
    assert "nothing found: 3 processes of workers, each with " in loaded.run("%why trainers --memory").ok().text
    cell = loaded.run("%%why trainers --memory\ntrainers.train.call('/dev/null').get()").ok()
    assert "nothing found: 3 ranks of trainers" in cell.text
    assert "the highest peak of tensors was that of gpus=" in cell.text
    assert "the highest peak of tensors was that of gpus=" in cell.html
    assert "%%why NAME --memory, or %%why NAME --replicas" in loaded.run("%%why --memory\n1").stderr
    loaded.run("%stop workers").ok()


@pytest.mark.slow
@pytest.mark.parametrize("client", ["jupyterlab", "vscode"])
def test_a_hang_and_a_stop_are_explained_with_a_debugger_attached(
    loaded: Notebook, tmp_path: Path, client: str
) -> None:
    os.mkfifo(tmp_path / "pipe")
    loaded.run("import monarch_nb.diagnosis.collector as collector; collector.WITHOUT_PROGRESS_S = 1.0").ok()
    debugger = Debugger(loaded, client).on()
    loaded.run(JOIN).ok()
    request, cell = loaded.start(f"trainers.train.call({str(tmp_path / 'pipe')!r}).get()"), Cell()
    loaded.until(request, cell, "gpus=1 has not begun all_reduce no. 1", 60)
    loaded.interrupt()
    loaded.finish(request)
    assert "ended: trainers.train()" in loaded.run("%why trainers --abort").ok().text
    loaded.run(f"open({str(tmp_path / 'pipe')!r}, 'w').close()").ok()
    loaded.run("trainers.join.call().get()").ok()
    (mark,) = debugger.mark(JOIN, "dist.all_reduce(torch.ones(4))", condition="@gpus=2 True")
    assert mark["verified"]
    cell_of = debugger.start("trainers.train.call('/dev/null').get()")
    debugger.event("stopped")
    debugger.shown(cell_of, "gpus=2 is stopped in the debugger; %mdb continues")
    debugger.do("continue", threadId=1)
    debugger.finish(cell_of).ok()
    debugger.off()
    loaded.run("%stop workers").ok()


def test_the_peak_of_a_mesh_of_tensors_has_names(loaded: Notebook) -> None:
    loaded.run("import torch, monarch\nfrom monarch.distributed import Mesh\n%mesh shards gpus=2").ok()
    loaded.run("mesh = Mesh.of(shards); model = monarch.module_to_mesh(torch.nn.Linear(64, 512), mesh)").ok()
    cell = loaded.run("%%why mesh --memory\nmodel(torch.ones(8, 64, device=mesh.device)).sum().item()").ok()
    assert "parameters 130 kB: Linear.weight 128 kB, Linear.bias 2.00 kB" in cell.text
    assert "parameters 130 kB: Linear.weight 128 kB, Linear.bias 2.00 kB" in cell.html
    loaded.run("%stop shards").ok()
