"""No process is left when a kernel ends, cleanly or not."""

import ast
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.notebook.notebook import Notebook

pytestmark = pytest.mark.timeout(120)

PROCESSES = """
from monarch_nb.connect import own_hosts
from monarch_nb.host.folders import run_folder_for
from monarch_nb.runtime import current_runtime
handles = list(current_runtime().part(own_hosts.LocalAgents).running.values())
(w.run(__import__('os').getpid).get().values() + [h.pid for h in handles],
 [str(h.run_folder) for h in handles])
"""


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it may end at any moment, also between the two calls
        return False


def all_ended(pids: list[int], folders: list[str]) -> bool:
    return not any(map(lives, pids)) and not [folder for folder in folders if Path(folder).exists()]


def kill(notebook: Notebook) -> None:
    os.kill(notebook.pid, signal.SIGKILL)


def shut_down(notebook: Notebook) -> None:
    notebook.manager.shutdown_kernel(now=False)


@pytest.mark.parametrize("end", [shut_down, pytest.param(kill, marks=pytest.mark.slow)])
def test_nothing_is_left_behind(end: Callable[[Notebook], None]) -> None:
    notebook = Notebook()
    try:
        notebook.run("%mesh w gpus=2").ok()
        pids, folders = ast.literal_eval(notebook.run(PROCESSES).ok().text)
        assert not all_ended(pids, folders)
        end(notebook)
        deadline = time.monotonic() + 15
        while not all_ended(pids, folders) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert all_ended(pids, folders), (pids, folders)
    finally:
        notebook.close()


AGENT = "[agent.pid for agent in current_runtime().part(LocalAgents).running.values()]"
IMPORTS = "from monarch_nb.connect.own_hosts import LocalAgents\nfrom monarch_nb.runtime import current_runtime\n"
SOON = "import time\nwhile not current_runtime().part(LocalAgents).running: time.sleep(0.01)\n"


@pytest.mark.slow
def test_loading_the_extension_starts_an_agent_that_changed_settings_replace() -> None:
    notebook = Notebook()
    try:
        notebook.run(IMPORTS + SOON).ok()
        ahead = notebook.run(AGENT).ok().text
        notebook.run("import os, monarch\nos.environ['PYTORCH_X'] = '1'\nmonarch.configure(tail_log_lines=7)").ok()
        notebook.run("%mesh w gpus=1").ok()
        used = notebook.run(AGENT).ok().text
        assert ahead != used
        notebook.run("monarch.configure(tail_log_lines=8)\n%mesh v gpus=1").ok()
        assert notebook.run(AGENT).ok().text == used
        assert notebook.run("w.run(lambda: __import__('os').environ['PYTORCH_X']).get().values()").ok().text == "['1']"
    finally:
        notebook.close()


@pytest.mark.slow
def test_with_starting_ahead_off_the_extension_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONARCH_NB_HOST_PRESTART", "0")
    notebook = Notebook()
    try:
        assert psutil.Process(notebook.pid).children(recursive=True) == []
    finally:
        notebook.close()
