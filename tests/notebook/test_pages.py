"""The code of the README, the quickstart and the manual runs unchanged, each page in a fresh notebook."""

import contextlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.notebook.notebook import Notebook
from tests.notebook.pages import CHECK, FRAMEWORKS, KINDS, PAGES, ROOT, blocks, run_page
from tests.ports import free_port

pytestmark = [pytest.mark.timeout(120), pytest.mark.long]
# Lightning, which is imported on each rank, and writes to the standard error.
LIGHTNING = ("docs/frameworks/lightning.md", "docs/coming-from-lightning.md")
NO_TORCH = "import os; os.environ['MONARCH_NB_PRELOAD'] = ''"
MARKS = {**{page: [pytest.mark.timeout(300)] for page in LIGHTNING}, "docs/manual/testing.md": [pytest.mark.last]}
# Pages that start hosts of their own, each of which would import torch.
OWN_HOSTS = [f"docs/manual/{name}.md" for name in ("elastic", "examples", "examples_jobs", "hosts", "testing")]
ALL = tuple(dict.fromkeys((*PAGES, *FRAMEWORKS)))
DAILY = {"README.md", "docs/coming-from-torchmonarch.md", "docs/manual/calls.md", "docs/manual/data.md"}
DAILY |= {"docs/quickstart.md", "docs/manual/output.md"}  # what a new user reads first
WITH_CODE = [
    # One of them takes the cluster down, and the next page would wait for another one to import torch.
    pytest.param(page, marks=[*(() if page in DAILY else (pytest.mark.slow,)), *MARKS.get(page, ())])
    for page in PAGES
    if any(block.is_cell for block in blocks(page))
]


@pytest.mark.parametrize("page", WITH_CODE)
def test_a_page_runs_from_top_to_bottom_with_the_stated_results(page: str, fresh: Notebook) -> None:
    if page in OWN_HOSTS:
        fresh.aside(NO_TORCH)
    run_page(page, fresh, timeout=180 if page in LIGHTNING else 60, warns=page in LIGHTNING)


def test_every_block_says_what_it_is() -> None:
    assert [(str(block), block.kind) for page in ALL for block in blocks(page) if not KINDS.fullmatch(block.kind)] == []


def test_every_chapter_is_in_the_contents_and_links_work() -> None:
    manual = ROOT / "docs" / "manual"
    contents = (manual / "README.md").read_text(encoding="utf-8")
    assert [path.name for path in manual.glob("[a-z]*.md") if f"({path.name})" not in contents] == []
    for page in ALL:
        for link in re.findall(r"\]\(([^)#:]+)\)", (ROOT / page).read_text(encoding="utf-8")):
            assert (ROOT / page).parent.joinpath(link).exists(), f"{page}: {link}"


def _machines(page: str) -> dict[str, int]:
    """The machines that a page names, each as a port of this one; the kernel's own is `my-machine` and 0.0.0.0."""
    text = "".join(block.text for block in blocks(page))
    names = sorted(set(re.findall(r"tcp://([\w.-]+):22222", text)) - {"0.0.0.0", "my-machine"})
    ports = {name: free_port() for name in [*names, "my-machine"]}
    return {**ports, "0.0.0.0": ports["my-machine"]}


def _localised(text: str, ports: dict[str, int]) -> str:
    return re.sub(r"tcp://([\w.-]+):22222", lambda match: f"tcp://127.0.0.1:{ports[match[1]]}", text)


@pytest.mark.slow
@pytest.mark.last
def test_the_hosts_chapter_works_on_agents_started_as_it_says(fresh: Notebook, tmp_path: Path) -> None:
    page = "docs/manual/hosts.md"
    ports = _machines(page)
    listening, dialling = (block.text for block in blocks(page) if block.kind == "sh")
    commands = [listening.replace("0.0.0.0", name) for name in ports if name not in ("0.0.0.0", "my-machine")]
    with contextlib.ExitStack() as agents:
        for command in (*commands, dialling, dialling):
            script, *words = shlex.split(_localised(command, ports))
            assert script == "monarch-nb"
            agent = subprocess.Popen([sys.executable, "-m", "monarch_nb", *words], cwd=tmp_path, stdout=subprocess.PIPE)
            agents.callback(agent.wait, 20)
            agents.callback(agent.terminate)
            assert agent.stdout is not None
            agents.callback(agent.stdout.close)
            assert command is dialling or agent.stdout.readline(), command
        fresh.aside(CHECK)
        fresh.aside(NO_TORCH)
        for block in blocks(page):
            if block.kind == "python machines":
                shown = fresh.run(_localised(block.cell, ports), timeout=60)
                assert shown.error is None, f"{block}\n{shown.traceback}"
        assert fresh.run("hosts.spawn_procs().initialized.get(timeout=30)").ok().stderr == ""
        fresh.run("from monarch.actor import shutdown_context; shutdown_context().get()").ok()
