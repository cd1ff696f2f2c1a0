"""Ends that are not a signal from outside: exit status 0, sys.exit, a set-up or an __init__ that fails or hangs."""

import threading
from typing import Any

import pytest

from monarch_nb.actor import Channel, MeshFailure, ProcMesh, SupervisionError, heal_mesh
from tests.cluster.fault_tools import SOON, Worker, begun, spawned, still_works

pytestmark = pytest.mark.timeout(120)


class Stuck(Worker):
    def __init__(self, started: Any) -> None:
        super().__init__()
        started.send(1)
        threading.Event().wait(600)


class Failing(Worker):
    def __init__(self) -> None:
        raise LookupError("nothing to begin with")


@pytest.mark.parametrize("code", [0, 3])
def test_a_process_that_exits_is_lost_whatever_its_status(workers: Any, code: int, shown: list[MeshFailure]) -> None:
    with pytest.raises(SupervisionError) as caught:
        workers.slice(gpus=1).exit.call_one(code).get(SOON)
    text = str(caught.value)
    location = ("mesh      workers, gpus=1", "host      ", "heal_mesh(workers)")
    for part in ("exited with non-zero code 3" if code else "Exited(code=0)", f"status {code}", *location):
        assert part in text, text
    cause = caught.value.failure.cause.origin
    assert (cause.exitcode, cause.signal, cause.oom) == (code, None, False)
    assert not shown  # the caller got it
    heal_mesh(workers, timeout=SOON)
    assert workers.rank.call().get(SOON).values() == [0, 1]


def test_a_set_up_that_raises_is_told_with_its_lines(host: Any) -> None:
    with spawned(host, name="setter", setup="x = 1\nraise OSError('no disk here')", setup_filename="<cell 7>") as procs:
        with pytest.raises(Exception, match="no disk here") as caught:
            procs.initialized.get(SOON)
        assert "setter" in str(caught.value)
        assert "<cell 7>" in str(caught.value)
    still_works(host)


def test_a_typo_in_the_set_up_is_reported_before_anything_starts(host: Any) -> None:
    with pytest.raises(SyntaxError, match="cell 8"):
        host.spawn_procs(per_host={"gpus": 1}, setup="x = = 1", setup_filename="<cell 8>")


def test_a_process_that_leaves_in_its_set_up(host: Any) -> None:
    with spawned(host, name="quitter", setup="import os\nprint('good bye', flush=True)\nos._exit(0)") as procs:
        with pytest.raises(SupervisionError, match="Exited") as caught:
            procs.initialized.get(SOON)
        assert "mesh      quitter" in str(caught.value)
        assert "good bye" in str(caught.value)
        actors = procs.spawn("late", Worker)
        with pytest.raises(SupervisionError, match="Exited"):
            actors.pid.call().get(SOON)


def test_an_init_that_raises_fails_the_first_call(duo: ProcMesh) -> None:
    actors = duo.spawn("failing", Failing)
    with pytest.raises(SupervisionError, match="nothing to begin with") as caught:
        actors.pid.call().get(SOON)
    text = str(caught.value)
    for part in ("__init__", "mesh      failing", "host      ", "heal_mesh(failing)"):
        assert part in text, text
    with pytest.raises(RuntimeError, match="nothing to begin with"):
        heal_mesh(actors, timeout=SOON)


def test_an_init_that_hangs_can_be_waited_for_and_stopped(host: Any, impatient: None) -> None:
    with spawned(host, name="hanging") as procs:
        port, receiver = Channel.open()
        actors = procs.spawn("stuck", Stuck, port)
        begun(receiver, 2)
        call = actors.pid.call()
        with pytest.raises(TimeoutError, match=r"0 of 2 ranks have answered stuck\.pid"):
            call.get(0.2)
        procs.stop().get(SOON)
        with pytest.raises(SupervisionError, match="stuck"):
            call.get(SOON)
    still_works(host)
