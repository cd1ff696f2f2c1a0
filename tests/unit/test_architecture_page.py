"""The page on the architecture names the rows that the layer test enforces, and modules that exist."""

import re
from pathlib import Path

import pytest

from tests.unit.test_layers import ROWS

pytestmark = pytest.mark.sources
ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
FOLDERS = (ROOT / "monarch_nb", ROOT / "kernel_ext", ROOT / "labextension" / "src")
MODULE = re.compile(r"(?<![\w./-])[a-z_]+(?:/[a-z_]+)+(?![\w/-])")
# The rows of the page leave out modules that import nothing of ours.
PACKAGES = [[name for name in row if (ROOT / "monarch_nb" / name).is_dir()] for row in ROWS[1:]]


def section(title: str) -> str:
    return TEXT.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def modules_in(title: str) -> list[tuple[int, str]]:
    """The modules in the pictures of a section that have a number, with it: the row that they lie in."""
    pictures = "\n".join(re.findall(r"```\n(.*?)```", section(title), re.DOTALL))
    return [(int(row), name) for row, name in re.findall(r"(?<!\w)(\d+)  ([a-z_]+(?:/[a-z_]+)*)", pictures)]


def test_the_table_has_the_rows_that_are_enforced() -> None:
    table = re.findall(r"^\| (\d+) \| ([^|]+) \|", section("Packages"), re.MULTILINE)
    assert [(int(row), re.findall(r"`(\w+)`", names)) for row, names in table] == list(enumerate(PACKAGES, 1))


def paths_of(name: str) -> list[Path]:
    """The folders and modules that a name on the page stands for."""
    paths = (folder / f"{name}{ending}" for folder in FOLDERS for ending in ("", ".py", ".ts", "/__init__.py"))
    return [path for path in paths if path.exists()]


@pytest.mark.parametrize("name", sorted(set(MODULE.findall(TEXT))))
def test_each_module_that_is_named_exists(name: str) -> None:
    assert paths_of(name)


# What a reader looks for, in the words of the page; the module that has it, and the definition in that module.
LOOK_UPS = [
    ("pickling of arguments and results", "wire/body", "encode"),
    ("noticing the end of a process", "host/procs/reaper", "Reaper"),
    ("re-creating the actors", "lifecycle/mesh_healer", "recreate"),
    ("keys, and who creates", "transport/keys", "create"),
    ("a sharded matmul", "tensor/propagation/planner", "plan"),
    ("grouping stopped ranks", "debug/render/groups", "grouped"),
    ("the panel's messages", "cluster/client", "Cluster"),
    ("the script of a Slurm job", "job/slurm", "_script"),
    ("another process's memory", "rdma/movers/cross_memory", "CrossMemory"),
    ("parsing `%mesh`", "monarch_kernel/arguments", "read_mesh"),
    ("issuing an operation", "tensor/handle", "issue"),
    ("our own sharding rules", "tensor/propagation/rules", "by_own_rules"),
    ("random numbers of shards", "tensor/seeds", "seeder"),
    ("capturing it", "tensor/compiled/step", "compile_step"),
    ("the list of job kinds", "job/adapter", "register_job"),
    ("the saved state of a job", "job/record", "JobRecord"),
    ("waiting for the hosts of a job", "job/arrival", "Arrival"),
    ("spare hosts", "job/elastic", "Spares"),
    ("the static display of a mesh", "monarch_kernel/display/meshes", "mesh_html"),
    ("the static display of a mesh; of a failure", "monarch_kernel/display/failures", "failure_bundle"),
    ("output of ranks", "monarch_kernel/output/cell_output", "CellOutput"),
]


@pytest.mark.parametrize(("words", "module", "definition"), LOOK_UPS)
def test_a_look_up_leads_to_its_definition_in_two_steps(words: str, module: str, definition: str) -> None:
    lines = [line for line in section("Where is what").splitlines() if words in line.partition(" | `")[0]]
    assert [f"`{module}`" in line for line in lines] == [True]
    (file,) = (path for path in paths_of(module) if path.is_file())
    assert re.search(rf"^\s*(export )?(def|class|function) {definition}\b", file.read_text("utf-8"), re.MULTILINE)


@pytest.mark.parametrize("title", ["A call and its reply", "A failure", "A breakpoint"])
def test_the_pictures_give_each_module_the_row_that_it_lies_in(title: str) -> None:
    rows = {name: row for row, names in enumerate(PACKAGES, 1) for name in names}
    assert [(name, row) for row, name in modules_in(title) if rows[name.partition("/")[0]] != row] == []


def test_a_call_and_its_reply_pass_at_most_eighteen_modules() -> None:
    modules = {name for _, name in modules_in("A call and its reply")} | {"routing/link", "wire/body"}  # asked by them
    assert len(modules) <= 18
    assert f"pass {len(modules)} modules" in section("A call and its reply")
