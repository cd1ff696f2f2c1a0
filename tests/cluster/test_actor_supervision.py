"""Owners learn of processes that die, with the signal; the processes of a dead owner end, too."""

import os
import signal
import time
from typing import Any

import pytest

from monarch_nb.actor import Actor, Channel, MeshFailure, Port, ProcMesh, SupervisionError, endpoint, this_host
from tests.cluster.actor_tools import Faults

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("faults")]


class Child(Actor):
    @endpoint
    def ping(self) -> str:
        return "pong"

    @endpoint
    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    @endpoint
    def pid(self) -> int:
        return os.getpid()


class Owner(Actor):
    """Owns children, and handles their failures or not."""

    def __init__(self, how: str, port: Port[Any]) -> None:
        self.how = how
        self.port = port

    @endpoint
    def make(self, procs: Any) -> Any:
        self.children = procs.spawn("children", Child)
        return self.children

    @endpoint
    def make_processes(self) -> Any:
        self.procs = this_host().spawn_procs(per_host={"gpus": 2}, name="nested")
        self.children = self.procs.spawn("children", Child)
        self.children.initialized.get(20)  # an earlier death counts for its process alone
        return self.children

    @endpoint
    def ping(self) -> str:
        return "pong"

    def __supervise__(self, failure: MeshFailure) -> bool:
        self.port.send((self.how, failure.mesh_name, failure.crashed_ranks, failure.report()))
        return self.how == "handles"


def call_for_ever(mesh: Any) -> None:
    while True:
        mesh.ping.call().get(20)


def test_an_owner_that_is_killed_takes_its_children_along(own_procs: ProcMesh, quad: ProcMesh, faults: Faults) -> None:
    port, _ = Channel[Any].open()
    owner: Any = own_procs.slice(gpus=0).spawn("owner", Owner, "handles", port)
    children = owner.make.call_one(quad.slice(gpus=0)).get(20)
    nested = owner.make_processes.call_one().get(30)
    pids = nested.pid.call().get(20).values()
    assert children.ping.call().get(20).values() == ["pong"]
    os.kill(own_procs.slice(gpus=0).run(os.getpid).get(20).item(), signal.SIGKILL)
    faults.next()
    for mesh in (children, nested):
        with pytest.raises(SupervisionError):
            call_for_ever(mesh)
    deadline = time.monotonic() + 20
    while any(os.path.exists(f"/proc/{pid}") for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
