"""SIGSTOP and SIGCONT: a process that does not answer is shown as such, and waited for, never failed."""

import os
import signal
import time
from typing import Any

import pytest

from monarch_nb.actor import Channel, MeshFailure, SupervisionError
from monarch_nb.lifecycle.watching import ProcessWatcher
from monarch_nb.mesh.mesh_events import Event, MeshEvents, ProcResponsive, ProcUnresponsive
from monarch_nb.runtime import current_runtime
from tests.cluster.fault_tools import SOON, Worker, agent, begun, spawned, still_works
from tests.polling import until
from tests.processes import freeze

pytestmark = pytest.mark.timeout(120)


@pytest.mark.slow
def test_a_frozen_process_is_unresponsive_and_then_goes_on(workers: Any, shown: list[MeshFailure]) -> None:
    watcher = current_runtime().part(ProcessWatcher)
    events: list[type[Event]] = []
    address = workers._state.procs.address(1)

    def listen(event: Event) -> None:  # others may be slow, too, on a busy machine
        if isinstance(event, ProcUnresponsive | ProcResponsive) and event.address == address:
            events.append(type(event))

    current_runtime().part(MeshEvents).listeners.append(listen)
    port, receiver = Channel.open()
    pids = workers.pid.call().get(SOON).values()
    nap = workers.slice(gpus=1).nap.call_one(0.05, port)
    begun(receiver, 1)
    before = time.time()
    freeze(pids[1])
    try:
        call = workers.pid.call()
        stream = workers.pid.stream()
        workers.note.broadcast(7)
        until(lambda: address in watcher.unresponsive, "it is seen to be unresponsive")
        assert before - 1.5 <= watcher.unresponsive[address] <= time.time()
        assert workers.slice(gpus=0).pid.call_one().get(SOON) == pids[0]
        with pytest.raises(TimeoutError, match=r"1 of 2 ranks have answered workers\.pid"):
            call.get(0.05)
    finally:
        os.kill(pids[1], signal.SIGCONT)
    assert call.get(SOON).values() == pids
    assert sorted(future.get(SOON) for future in stream) == sorted(pids)
    assert nap.get(SOON) == "slept"
    assert workers.noted.call().get(SOON).values() == [[7], [7]]
    until(lambda: ProcResponsive in events, "it is seen to answer")
    assert events == [ProcUnresponsive, ProcResponsive]
    assert address not in watcher.unresponsive
    assert not shown


def test_a_frozen_process_can_be_stopped(host: Any, impatient: None) -> None:
    with spawned(host, name="ice") as procs:
        actors = procs.spawn("ice", Worker)
        pid = actors.slice(gpus=1).pid.call_one().get(SOON)
        freeze(pid)
        call = actors.pid.call()
        procs.stop().get(SOON)
        error = call.exception(SOON)  # it may have answered when it was woken to be ended
        assert error is None or (isinstance(error, SupervisionError) and "ice" in str(error))


def test_a_frozen_agent_holds_up_spawns_and_nothing_else(workers: Any, host: Any) -> None:
    pid = agent().pid
    freeze(pid)
    try:
        assert workers.rank.call().get(SOON).values() == [0, 1]
        procs = host.spawn_procs(per_host={"gpus": 1}, name="patient")
        with pytest.raises(TimeoutError):
            procs.initialized.get(0.1)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert procs.initialized.get(SOON)
    procs.stop().get(SOON)
    still_works(host)
