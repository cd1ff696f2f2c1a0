"""Faults around stopped ranks: each gives a clear message, and nothing stays stopped or running."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import monarch_nb.actor
from monarch_nb import debug
from monarch_nb.actor import Actor, ActorError, ProcMesh, SupervisionError, endpoint
from monarch_nb.config import configured
from monarch_nb.debug import StoppedAtBreakpoint
from monarch_nb.debug.verbs import EVALUATE, Evaluate
from monarch_nb.mesh.requests import request
from monarch_nb.runtime import current_runtime
from tests.cluster.actor_tools import spawned
from tests.cluster.debug_tools import SECONDS, Trainer, resume_all, stopped

pytestmark = pytest.mark.timeout(120)


def program(folder: Path, source: str) -> list[str]:
    """The command line of a controller of its own."""
    path = folder / "program.py"
    path.write_text(textwrap.dedent(source), encoding="utf-8")
    return [sys.executable, str(path)]


def environment() -> dict[str, str]:
    path = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in path if entry)}


class Meddler(Actor):
    """Sends commands to ranks that another controller has stopped, as a second notebook would."""

    @endpoint
    def ask(self, session: str, address: str, force: bool = False) -> str:
        command = Evaluate(session=session, text="x", force=force)
        answer = request(current_runtime(), address, EVALUATE, command).get(SECONDS)
        return answer.error or (answer.value.text if answer.value is not None else "")


class Threads(Actor):
    @endpoint
    def engine_thread(self) -> str:
        thread = threading.Thread(target=lambda: breakpoint(), name="monarch-of-the-engine")
        thread.start()
        thread.join(SECONDS)
        return "over" if not thread.is_alive() else "stopped"


@pytest.fixture(scope="module")
def procs() -> Iterator[ProcMesh]:
    with configured(debug_command_timeout="500ms"):
        yield from spawned(2, "faulty")


@pytest.fixture(scope="module")
def trainers(procs: ProcMesh) -> Any:
    return procs.spawn("trainers", Trainer)


@pytest.fixture(autouse=True)
def nothing_stays_stopped(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # The death of a rank is reported to the waiting call, or, if none waits yet, to this hook.
    monkeypatch.setattr(monarch_nb.actor, "unhandled_fault_hook", lambda failure: None)
    yield
    resume_all()


# -- values and commands ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_locals_whose_repr_raises_loops_or_is_gigantic_do_no_harm(trainers: Any) -> None:
    future = trainers.slice(gpus=0).awkward.call_one()
    stopped(1)
    group = debug.group(trainers)
    assert "its repr raised ValueError: this repr raises" in group.eval("loud").text
    assert "ended after 0.5 s (debug_command_timeout)" in group.eval("endless").errors[0]
    assert "ended after" in group.run("while True: pass").text
    assert group.eval("len(huge)").values == {0: 300_000}
    assert len(group.eval("huge").text) < 5_000
    assert len(group.run("print('x' * 10_000_000)").text) < 100_000
    group.resume()
    assert future.get(SECONDS) == 300_002


@pytest.mark.parametrize(("edit", "expected"), [("    x = 2\n", True), ("    x = 1  # as before\n", False)])
def test_source_that_has_changed_since_it_was_loaded_is_told(
    trainers: Any, tmp_path: Path, edit: str, expected: bool
) -> None:
    path = tmp_path / "edited.py"
    path.write_text("def run():\n    x = 1\n    breakpoint()\n    return x\n")
    future = trainers.slice(gpus=0).run_file.call_one(str(path), f"def run():\n{edit}    breakpoint()\n    return x\n")
    (session,) = stopped(1)
    assert ("edited.py has changed since it was loaded" in session.note) == expected
    assert debug.eval("x").values == {0: 1}, "what runs is what was loaded"
    debug.resume()
    assert future.get(SECONDS) == 1


def test_a_breakpoint_in_what_a_command_evaluates_is_passed_by(trainers: Any) -> None:
    trainers.slice(gpus=0).step.call_one(1)
    stopped(1)
    assert debug.eval("[breakpoint(), loss][1]").values == {0: 1}


def test_the_engines_own_threads_never_stop(procs: ProcMesh) -> None:
    threads = procs.slice(gpus=0).spawn("threads", Threads)
    assert threads.engine_thread.call_one().get(SECONDS) == "over"
    threads.stop().get(SECONDS)


@pytest.mark.slow
def test_commands_reach_a_stopped_rank_whose_queue_is_full(tmp_path: Path) -> None:
    done = subprocess.run(
        program(
            tmp_path,
            """
            import threading
            from monarch.actor import this_host
            from monarch import debug
            from tests.cluster.debug_tools import Trainer

            trainers = this_host().spawn_procs(per_host={"gpus": 1}, name="w").spawn("trainers", Trainer)
            future = trainers.step.call_one(1)
            debug.wait(1)

            def send():
                for _ in range(8):
                    trainers.take.broadcast(bytes(800_000))  # blocks: nothing of it is taken

            sender = threading.Thread(target=send, daemon=True)
            sender.start()
            sender.join(0.5)
            assert sender.is_alive()
            assert debug.eval("loss").values == {0: 1}
            debug.resume()
            assert future.get(20) == 2
            sender.join(20)
            assert not sender.is_alive()
            """,
        ),
        env={**environment(), "MONARCH_NB_LINK_CREDIT_WINDOW": "2000000"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


# -- ranks and controllers that end -----------------------------------------------------------------------------------


def test_killing_a_stopped_rank_fails_its_call_and_clears_the_list(own_procs: ProcMesh) -> None:
    trainers: Any = own_procs.spawn("trainers", Trainer)
    future = trainers.step.call(1)
    records = stopped(2)
    os.kill(records[1].pid, signal.SIGKILL)
    # Not by `get`, which reports two stopped ranks until the death is known.
    assert debug.controller().stopped.wait(SECONDS, future.done)
    with pytest.raises(SupervisionError, match="SIGKILL"):
        future.get()
    assert debug.controller().stopped.wait(SECONDS, lambda: len(debug.sessions()) == 1)
    assert debug.eval("loss").values == {0: 1}
    debug.resume()
    assert trainers.slice(gpus=0).steps_done.call_one().get(SECONDS) in (0, 1)


def test_a_rank_that_dies_while_it_is_asked_is_told(own_procs: ProcMesh) -> None:
    trainers: Any = own_procs.spawn("trainers", Trainer)
    future = trainers.step.call(1)
    stopped(2)
    text = debug.group(trainers, gpus=0).run("import os, signal; os.kill(os.getpid(), signal.SIGKILL)").text
    assert "gone" in text
    with pytest.raises(SupervisionError):
        future.get(SECONDS)
    debug.resume()


def test_stopping_a_mesh_ends_what_is_stopped_there(own_procs: ProcMesh) -> None:
    trainers: Any = own_procs.spawn("trainers", Trainer)
    future = trainers.step.call(1)
    stopped(2)
    trainers.stop().get(SECONDS)
    with pytest.raises((SupervisionError, ActorError)):
        future.get(SECONDS)
    assert debug.controller().stopped.wait(SECONDS, lambda: not debug.sessions())


def test_an_interrupt_ends_a_stopped_endpoint(trainers: Any) -> None:
    from monarch_nb.lifecycle import interrupt

    future = trainers.slice(gpus=0).step.call_one(1)
    stopped(1)
    interrupt(trainers.slice(gpus=0))
    assert debug.controller().stopped.wait(SECONDS, future.done)
    with pytest.raises(ActorError):
        future.get()
    assert debug.controller().stopped.wait(SECONDS, lambda: not debug.sessions())


@pytest.mark.parametrize(("orphan", "ends"), [("resume", False), ("end", True)])
def test_without_its_controller_a_stopped_rank_resumes_or_ends(
    orphan: str, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with configured(debug_lease="300ms", debug_orphan=orphan):
        procs = spawned(1, "orphans")
        trainers: Any = next(procs).spawn("trainers", Trainer)
        controller = debug.controller()
        # As if the controller had ended: no beats come, not even those that an earlier test began.
        monkeypatch.setattr(controller, "_lease", lambda addresses: None)
        try:
            future = trainers.step.call_one(1)
            assert controller.stopped.wait(SECONDS, future.done)
            if ends:
                with pytest.raises(ActorError, match="the controller was silent for too long"):
                    future.get()
            else:
                assert future.get() == 2
        finally:
            next(procs, None)


@pytest.mark.slow
def test_a_rank_stays_stopped_for_as_long_as_the_controller_lives() -> None:
    debug.controller()._leasing = False  # a beat that an earlier test began comes at the pace of a longer lease
    with configured(debug_lease="3s"):
        procs = spawned(1, "leased")
        trainers: Any = next(procs).spawn("trainers", Trainer)
        future = trainers.step.call_one(1)
        stopped(1)
        assert not debug.controller().stopped.wait(5.0, future.done)
        assert debug.eval("loss").values == {0: 1}
        debug.resume()
        assert future.get(SECONDS) == 2
        next(procs, None)


def test_ending_a_controller_with_stopped_ranks_leaves_no_process(tmp_path: Path) -> None:
    process = subprocess.Popen(
        program(
            tmp_path,
            """
            import sys
            from monarch.actor import this_host
            from monarch import debug
            from tests.cluster.debug_tools import Trainer

            trainers = this_host().spawn_procs(per_host={"gpus": 2}, name="w").spawn("trainers", Trainer)
            trainers.step.call(1)
            print(*[session.pid for session in debug.wait(2)], flush=True)
            sys.stdin.read()
            """,
        ),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment(),
        text=True,
    )
    try:
        assert process.stdout is not None
        workers = [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]
        assert len(workers) == 2
    finally:
        process.kill()
        process.communicate()
    _, alive = psutil.wait_procs(workers, timeout=SECONDS)
    assert alive == []


def test_a_script_whose_ranks_are_stopped_is_not_left_hanging(trainers: Any) -> None:
    future = trainers.step.call(1)
    stopped(2)  # else the wait may report only the first
    with pytest.raises(StoppedAtBreakpoint, match="trainers gpus=0-1") as caught:
        future.get()
    assert [session.rank for session in caught.value.sessions] == [0, 1]
    assert "→" in caught.value.table
    debug.resume()
    assert list(future.get(SECONDS).values()) == [2, 4]


def test_under_await_a_script_is_told_the_same(trainers: Any) -> None:
    async def waits() -> Any:
        future = trainers.step.call(1)
        with configured(debug_patience="20s"), pytest.raises(StoppedAtBreakpoint):  # till both are stopped
            await future
        debug.resume()
        return await future

    assert list(asyncio.run(waits()).values()) == [2, 4]


# -- two controllers --------------------------------------------------------------------------------------------------


def test_a_second_controller_learns_who_debugs_a_rank(procs: ProcMesh, trainers: Any) -> None:
    meddler = procs.slice(gpus=1).spawn("meddler", Meddler)
    trainers.slice(gpus=0).step.call_one(7)
    (session,) = stopped(1)
    debug.eval("loss")
    answer = meddler.ask.call_one(session.session, session.address).get(SECONDS)
    assert f"another controller ({current_runtime().address}) is debugging this rank" in answer
    debug.detach()
    assert meddler.ask.call_one(session.session, session.address).get(SECONDS) == "7"
    assert "another controller" in debug.eval("x").errors[0]
    assert debug.group().run("x").text.startswith("*** another controller")
    debug.take()
    assert debug.eval("x").values == {0: 7}
    meddler.stop().get(SECONDS)
