"""A JupyterHub ends a server that looks idle while a mesh trains: with %detach --keep the mesh lives on."""

import asyncio
import contextlib
import json
import secrets
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from psutil import NoSuchProcess, Process

from scripts.kernels import hub_proxy, interpreter
from scripts.processes import left_behind, marked
from tests.notebook.hub import USER, Hub, hub
from tests.notebook.page_client import Page
from tests.polling import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

TRAINER = """
import threading, time
from monarch.actor import Actor, endpoint

class Trainer(Actor):
    def __init__(self):
        self.done = 0
    @endpoint
    def begin(self):
        threading.Thread(target=self.train, daemon=True).start()
    def train(self):
        while True:
            time.sleep(0.1)
            self.done += 1
    @endpoint
    def steps(self):
        return self.done

%mesh fleet gpus=2
trainers = fleet.spawn("trainers", Trainer)
trainers.begin.call().get()
"""
STEPS = "print(sorted(trainers.steps.call().get().values()))"


@pytest.fixture(scope="module")
def programs() -> tuple[Path, Path]:
    try:
        return interpreter("jupyterhub"), hub_proxy()
    except (subprocess.CalledProcessError, OSError) as error:
        text = getattr(error, "stderr", "") or str(error)
        pytest.skip(f"SKIPPED JupyterHub: it, its culler or its proxy cannot be had: {text[-500:]}")


@pytest.fixture
def mark() -> Iterator[str]:
    value = secrets.token_hex(8)
    yield value
    assert left_behind(value) == []


async def page_of(server: Hub) -> Page:
    page = Page(f"{server.url.replace('http', 'ws')}/user/{USER}", server.token, server.kernel())
    await page.connect()
    await page.run("%load_ext monarch")
    return page


async def left_training(server: Hub, first: str) -> list[int]:
    """Starts a training and closes the page; the steps at that time."""
    server.start()
    page = await page_of(server)
    await page.run(first)
    assert "JupyterLab of a JupyterHub" in await page.run("from monarch_kernel.doctor import facts_of, recognised\n"
                                                        "print(recognised(facts_of(get_ipython())))")  # fmt: skip
    await page.run(TRAINER)
    steps: list[int] = json.loads(await page.run(STEPS))
    page.close()
    return steps


def kernels(mark: str) -> list[Process]:
    processes = []
    for process in marked(mark):
        with contextlib.suppress(NoSuchProcess):
            if "ipykernel" in " ".join(process.cmdline()):
                processes.append(process)
    return processes


async def trains_on(server: Hub, mark: str) -> None:
    before = await left_training(server, "%detach --keep 5m")
    server.culled()
    until(lambda: not kernels(mark), "the kernel's end")
    server.start()
    page = await page_of(server)
    listed = await page.run("%attach")
    assert "fleet {gpus=2} with trainers on " in listed, listed
    back = await page.run("%attach fleet")
    assert "fleet is back: 2 procs with trainers" in back, back
    assert min(json.loads(await page.run(STEPS))) > max(before) + 10, "it has trained meanwhile"
    await page.run("%stop fleet")
    page.close()
    server.stop()


async def leaves_nothing(server: Hub, mark: str) -> None:
    await left_training(server, "pass")
    server.culled()
    assert left_behind(mark) == []
    server.start()
    page = await page_of(server)
    assert "no mesh was left" in await page.run("%attach")
    page.close()
    server.stop()


def test_a_kept_mesh_trains_on_while_its_server_is_culled(
    programs: tuple[Path, Path], mark: str, tmp_path: Path
) -> None:
    with hub(tmp_path, *programs, mark) as server:
        asyncio.run(trains_on(server, mark))


def test_without_that_a_culled_server_leaves_nothing(programs: tuple[Path, Path], mark: str, tmp_path: Path) -> None:
    with hub(tmp_path, *programs, mark) as server:
        asyncio.run(leaves_nothing(server, mark))
