"""Threads, forks, imports and ports of a controller and its processes."""

import asyncio
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from monarch_nb.actor import Actor, ActorError, Channel, Port, endpoint, reload_mesh, run_on
from monarch_nb.lifecycle import interrupt
from tests.cluster.fault_tools import ROOT, SOON
from tests.cluster.host_client import hosted

pytestmark = pytest.mark.timeout(120)

CONTROLLER = """
import os, sys
forks = []
os.register_at_fork(before=lambda: forks.append(1))
from monarch_nb.actor import Actor, endpoint, heal_mesh, shutdown_context, this_host

class Member(Actor):
    @endpoint
    def pid(self):
        return os.getpid()

if __name__ == "__main__":
    procs = this_host().spawn_procs(per_host={"gpus": 2}, name="procs")
    members = procs.spawn("members", Member)
    assert os.getpid() not in members.pid.call().get(30).values()
    if sys.argv[1:]:
        if not os.fork():
            shutdown_context().get(20)
            sys.exit()
        os.wait()
        members.pid.call().get(30)
    procs.stop().get(20)
    print("forks", len(forks), "torch", "torch" in sys.modules)
"""


class Busy(Actor):
    """Never ends by itself, and does not sit in C code either."""

    @endpoint
    def spin(self, begun: Port[int]) -> None:
        begun.send(threading.get_ident())
        while True:
            time.sleep(0.001)

    @endpoint
    def on_main_thread(self) -> bool:
        return threading.current_thread() is threading.main_thread()


class AsyncBusy(Actor):
    @endpoint
    async def spin(self, begun: Port[int]) -> None:
        begun.send(0)
        await asyncio.Event().wait()

    @endpoint
    async def on_main_thread(self) -> bool:
        return threading.current_thread() is threading.main_thread()


class Before(Actor):
    def __init__(self) -> None:
        self.threads: list[int] = []

    @endpoint
    def note(self) -> list[int]:
        self.threads.append(threading.get_ident())
        return self.threads


class After(Before):
    def __reload__(self, old: type) -> None:
        self.threads.append(threading.get_ident())


def run_controller(tmp_path: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    program = tmp_path / "program.py"
    program.write_text(CONTROLLER)
    line, env = [sys.executable, program, *arguments], {**os.environ, "PYTHONPATH": ROOT}
    return subprocess.run(line, env=env, capture_output=True, text=True)


def test_the_controller_never_forks_and_imports_no_torch(tmp_path: Path) -> None:
    done = run_controller(tmp_path)
    assert done.stdout.splitlines()[-1:] == ["forks 0 torch False"], done.stderr


def test_a_fork_that_exits_does_not_end_the_controllers_hosts(tmp_path: Path) -> None:
    done = run_controller(tmp_path, "fork")
    assert done.stdout.splitlines()[-1:] == ["forks 1 torch False"], done.stderr


def test_cells_and_set_up_run_on_the_main_thread_unlike_actors(host: Any) -> None:
    source = "import threading\nwas = threading.current_thread() is threading.main_thread()"
    procs = host.spawn_procs(per_host={"gpus": 1}, name="threads", setup=source)
    try:
        assert run_on(procs, "was").get(SOON).values() == [True]
        assert run_on(procs, f"{source}\nwas").get(SOON).values() == [True]
        for kind in (Busy, AsyncBusy):
            assert procs.spawn("actors", kind).on_main_thread.call_one().get(SOON) is False
    finally:
        procs.stop().get(SOON)


@pytest.mark.parametrize("kind", [Busy, AsyncBusy])
def test_an_endpoint_is_interrupted_and_its_actor_lives(duo: Any, kind: Any) -> None:
    actors = duo.spawn("busy", kind)
    port, receiver = Channel[int].open()
    call = actors.slice(gpus=0).spin.call_one(port)
    receiver.recv().get(SOON)
    interrupt(actors.slice(gpus=0))
    with pytest.raises(ActorError, match=r"KeyboardInterrupt|CancelledError"):
        call.get(SOON)
    assert actors.on_main_thread.call().get(SOON).values() == [False, False]


def test_a_changed_class_is_taken_over_on_the_actors_own_thread(duo: Any) -> None:
    actors = duo.spawn("changing", Before)
    actors.note.broadcast()
    done = reload_mesh(actors, After)
    threads = actors.note.call().get(SOON).values()
    done.get(SOON)
    assert [len(idents) for idents in threads] == [3, 3]
    assert [len(set(idents)) for idents in threads] == [1, 1]


@pytest.mark.slow
def test_a_template_with_threads_is_not_forked_and_it_is_said(tmp_path: Path) -> None:
    source = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    (tmp_path / "module_with_a_thread.py").write_text(source)
    env = {**os.environ, "MONARCH_NB_PRELOAD": "module_with_a_thread", "PYTHONPATH": str(tmp_path)}
    with hosted(env=env) as (_, client):
        [started] = client.started(*client.spawn(1))
        assert started.how == "cold"
        assert "2 threads after its imports" in started.why
        assert client.status().template_threads == 2


PORTS = """
import contextlib, os
from pathlib import Path
from monarch_nb.actor import Actor, endpoint, this_host

class Member(Actor):
    @endpoint
    def pids(self):
        return os.getpid(), os.getppid()

def listens(pid):
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            inodes.add(os.readlink(fd))
    lines = [line.split() for kind in ("tcp", "tcp6") for line in open(f"/proc/{pid}/net/{kind}").readlines()[1:]]
    return [words[1] for words in lines if words[3] == "0A" and f"socket:[{words[9]}]" in inodes]

if __name__ == "__main__":
    procs = this_host().spawn_procs(per_host={"gpus": 2}, name="procs")
    pids = {os.getpid(), *sum(procs.spawn("members", Member).pids.call().get(30).values(), ())}
    assert len(pids) == 4  # the controller, two processes, and their agent
    print("open ports", [port for pid in pids for port in listens(pid)])
"""


def test_neither_the_controller_nor_its_host_opens_a_port(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(PORTS)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert done.stdout == "open ports []\n", done.stdout + done.stderr


def test_nothing_extends_the_jupyter_server() -> None:
    packed = Path(ROOT, "pyproject.toml").read_text() + Path(ROOT, "scripts", "hatch_build.py").read_text()
    assert "jupyter_server" not in packed
    assert "share/jupyter/labextensions" in packed
