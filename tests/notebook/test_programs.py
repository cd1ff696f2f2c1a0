"""%%spmd and %torchrun in a real kernel: nothing but the magic is needed, and the next cell continues."""

import importlib.util
import re
from pathlib import Path

import pytest

from tests.notebook.notebook import Notebook

pytestmark = pytest.mark.timeout(120)
WORLD = "import os\nnames = [os.environ[name] for name in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK')]\nnames"
FAILS = """
import os, sys
print("hello", *sys.argv[1:])
def helper():
    if os.environ["RANK"] == "1" and "fail" in sys.argv:
        raise ValueError("from the script")
helper()
value = 10 + int(os.environ["RANK"])
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("programs") / "script.py"
    path.write_text(FAILS)
    return path


def test_a_cell_without_a_mesh_makes_one_that_stays(nb: Notebook) -> None:
    cell = nb.run(f"%%spmd procs=2\n{WORLD}").ok()
    assert cell.stdout == "spmd: 2 processes, for this and later cells\n"
    assert cell.text.splitlines()[1:] == ["  gpus=0: ['0', '2', '0']", "  gpus=1: ['1', '2', '1']"]
    again = nb.run("%%spmd procs=2\nlen(names)").ok()
    assert (again.stdout, again.text.splitlines()[1:]) == ("", ["  all 2 ranks: 3"])
    assert nb.run("%%on spmd gpus=1\nnames[0]").ok().text.endswith("'1'")
    changed = nb.run(f"%%spmd procs=1\n{WORLD}").ok()
    assert "spmd is replaced: it was gpus=2, now gpus=1" in changed.stdout
    nb.run("%stop spmd").ok()


def test_a_part_of_a_mesh_is_a_world_of_its_own(nb: Notebook) -> None:
    cell = nb.run(f"%%spmd w gpus=1-2\n{WORLD}").ok()
    assert cell.text.splitlines()[1:] == ["  gpus=1: ['0', '2', '0']", "  gpus=2: ['1', '2', '1']"]
    assert "%%spmd: a is a mesh of actors" in nb.run("%%spmd a\n1").stderr
    assert "either the name of a mesh, or procs=N" in nb.run("%%spmd w procs=2\n1").stderr
    assert "procs=many is no number" in nb.run("%%spmd procs=many\n1").stderr


def test_a_script_runs_with_its_arguments_and_leaves_its_names(nb: Notebook, script: Path) -> None:
    cell = nb.run(f"word = 'there'\n%torchrun --max-restarts 2 {script} {{word}} on w gpus=0-1").ok()
    assert "--max-restarts: left out" in cell.stdout
    assert "hello there" in cell.stdout
    assert nb.run("%%on w gpus=0-1\nvalue").ok().text.splitlines()[1:] == ["  gpus=0: 10", "  gpus=1: 11"]


def test_an_error_names_the_rank_and_the_line_of_the_script(nb: Notebook, script: Path) -> None:
    cell = nb.run(f"%torchrun {script} fail on w gpus=0-1")
    assert cell.error["ename"] == "ActorError"
    assert "ValueError: from the script" in cell.traceback
    assert re.search(r'On gpus=1 .*\n  File ".*script\.py", line 7, in <module>', cell.traceback), cell.traceback
    assert nb.run(f"%torchrun {script} on w gpus=0-1").error is None


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "no script is named"),
        ("none.py on w", "there is no script none.py"),
        ("--nnodes 1:4 none.py", "a mesh has as many hosts as it was made with"),
        ("--nproc-per-node 2 {script} on w", "w says how many processes"),
        ("{script} on a", "a is a mesh of actors"),
    ],
)
def test_a_wrong_line_says_what_to_write(nb: Notebook, script: Path, line: str, words: str) -> None:
    assert words in nb.run(f"%torchrun {line.format(script=script)}").stderr
    script.with_name("wrong.py").write_text("x = (")
    assert nb.run(f"%torchrun {script.with_name('wrong.py')} on w").error["ename"] == "SyntaxError"


LLAMA = """
%%spmd w gpus=0-1
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

dist.init_process_group("gloo")
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=16, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
)
model = DistributedDataParallel(LlamaForCausalLM(config))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
losses = []
for step in range(5):
    rows = (torch.arange(8) + torch.arange(4)[:, None] + dist.get_rank()) % 16
    loss = model(input_ids=rows, labels=rows).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
losses[-1] < losses[0]
"""


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("transformers"), reason="transformers is not installed")
def test_a_model_of_transformers_trains_in_a_cell(nb: Notebook) -> None:
    cell = nb.run(LLAMA.strip(), timeout=100).ok()
    assert cell.text.splitlines()[1:] == ["  gpus=0-1: True"]
