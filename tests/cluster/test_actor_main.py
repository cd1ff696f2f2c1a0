"""Scripts: actors and functions of `__main__`, and what happens at the end of a program."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = [pytest.mark.long, pytest.mark.timeout(120)]

HEAD = """
import atexit, os, signal, sys, threading, time
from monarch.actor import *
atexit.register(lambda: print("atexit ran", flush=True))
"""


def run(tmp_path: Path, source: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script.py"
    script.write_text(HEAD + textwrap.dedent(source))
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=50, cwd=tmp_path, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


def test_classes_and_functions_of_a_script_travel(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
        from dataclasses import dataclass

        FACTOR = 3

        @dataclass
        class Item:
            x: int

        class Special(Item):
            pass

        def triple(item):
            return Item(item.x * FACTOR)

        class Worker(Actor):
            def __init__(self, function): self.function = function
            @endpoint
            def work(self, item):
                assert isinstance(item, Item), type(item)
                assert type(item) is Special
                self.item = item
                return self.function(item)
            @endpoint
            def again(self, item): return type(item) is type(self.item), self.item == item
            @endpoint
            def fail(self): raise Custom("mine")

        class Custom(Exception): pass

        if __name__ == "__main__":
            procs = this_host().spawn_procs(per_host={"gpus": 2})
            workers = procs.spawn("workers", Worker, triple)
            for value in workers.work.call(Special(5)).get(30).values():
                assert type(value) is Item and value == Item(15), value
            assert workers.again.call(Special(5)).get(30).values() == [(True, True)] * 2
            try:
                workers.fail.call().get(30)
            except ActorError as error:
                assert type(error.exception) is Custom, type(error.exception)
                assert 'raise Custom("mine")' in str(error), str(error)
            print("done", flush=True)
        """,
    )
    assert done.stdout.splitlines() == ["done", "atexit ran"]
    assert done.stderr == ""


def test_a_failure_nobody_handles_ends_the_program_with_status_1(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
        class Worker(Actor):
            @endpoint
            def boom(self): raise ValueError("nobody waits for this")

        workers = this_host().spawn_procs(per_host={"gpus": 2}).spawn("workers", Worker)
        try:  # first: the end may come at once
            workers.slice(gpus=1).boom.broadcast()
            threading.Event().wait(30)
            print("still here", flush=True)
        finally:
            print("finally ran", flush=True)
        """,
        code=1,
    )
    assert done.stdout.splitlines() == ["finally ran", "atexit ran"]
    assert "Unhandled monarch failure" in done.stderr
    assert "nobody waits for this" in done.stderr
    assert "workers" in done.stderr


@pytest.mark.slow
def test_a_failure_wakes_a_program_that_waits_for_a_result(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
        import asyncio
        class Worker(Actor):
            @endpoint
            def boom(self): raise ValueError("nobody waits for this")
            @endpoint
            def sleep(self): time.sleep(30)

        workers = this_host().spawn_procs(per_host={"gpus": 2}).spawn("workers", Worker)
        workers.slice(gpus=1).boom.broadcast()
        async def main():
            await workers.slice(gpus=0).sleep.call_one()
        asyncio.run(main())
        """,
        code=1,
    )
    assert done.stdout.splitlines() == ["atexit ran"]
    assert "nobody waits for this" in done.stderr


@pytest.mark.slow
def test_a_hook_that_returns_drops_the_failure_and_is_called_once(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
        import monarch.actor
        class Worker(Actor):
            @endpoint
            def boom(self): raise ValueError("boom")
            @endpoint
            def ping(self): return "pong"

        told = threading.Event()
        def hook(failure):
            print("hook", failure.crashed_ranks, flush=True)
            told.set()
        monarch.actor.unhandled_fault_hook = hook
        workers = this_host().spawn_procs(per_host={"gpus": 2}).spawn("workers", Worker)
        workers.slice(gpus=1).boom.broadcast()
        told.wait(20)
        print(workers.slice(gpus=0).ping.call_one().get(20), flush=True)
        """,
    )
    assert done.stdout.splitlines() == ["hook [1]", "pong", "atexit ran"]
    assert done.stderr == ""


@pytest.mark.slow
def test_a_hook_that_raises_ends_the_program(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
        import monarch.actor
        class Worker(Actor):
            @endpoint
            def boom(self): raise ValueError("boom")

        def hook(failure):
            print("hook", flush=True)
            raise KeyError("in the hook")
        monarch.actor.unhandled_fault_hook = hook
        workers = this_host().spawn_procs(per_host={"gpus": 2}).spawn("workers", Worker)
        workers.slice(gpus=1).boom.broadcast()
        threading.Event().wait(30)
        """,
        code=1,
    )
    assert done.stdout.splitlines() == ["hook", "atexit ran"]
    assert "unhandled_fault_hook raised KeyError" in done.stderr
    assert "boom" in done.stderr


@pytest.mark.slow
def test_a_script_that_lost_a_process_ends_despite_handled_call_errors(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
        class Worker(Actor):
            @endpoint
            def die(self): os.kill(os.getpid(), signal.SIGKILL)

        workers = this_host().spawn_procs(per_host={"gpus": 2}).spawn("workers", Worker)
        try:
            workers.slice(gpus=1).die.call_one().get(20)
        except SupervisionError as error:
            print("caught", flush=True)
            threading.Event().wait(30)
        """,
        code=1,
    )
    assert done.stdout.rstrip().endswith("atexit ran")  # the end may come between a line and its end
    assert "Killed(sig=9)" in done.stderr


def test_the_end_of_a_program_cleans_up_what_it_spawned(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
        class Worker(Actor):
            @endpoint
            def pid(self): return os.getpid()
            def __cleanup__(self, exc):
                with open(f"cleaned-{os.getpid()}", "w") as file: file.write(repr(exc))

        workers = this_host().spawn_procs(per_host={"gpus": 2}).spawn("workers", Worker)
        here = this_proc().spawn("here", Worker)
        print(*workers.pid.call().get(20).values(), here.pid.call_one().get(20), flush=True)
        """,
    )
    pids = done.stdout.splitlines()[0].split()
    assert done.stdout.splitlines()[1:] == ["atexit ran"]
    for pid in pids:
        assert (tmp_path / f"cleaned-{pid}").read_text() == "None"
        assert not Path(f"/proc/{pid}").exists()


def test_shutdown_context_ends_it_all_and_a_new_beginning_is_possible(tmp_path: Path) -> None:
    run(
        tmp_path,
        """
        class Worker(Actor):
            @endpoint
            def pid(self): return os.getpid()

        pids = []
        for _ in range(2):
            worker = this_host().spawn_procs().spawn("worker", Worker)
            pids.append(worker.pid.call_one().get(20))
            shutdown_context().get(20)
            assert not os.path.exists(f"/proc/{pids[-1]}")
            try:
                worker.pid.call_one().get(5)
            except RuntimeError as error:
                print(error)
        assert len(set(pids)) == 2
        """,
    )


def test_a_forked_child_leaves_the_processes_of_its_parent_alone(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
        class Worker(Actor):
            @endpoint
            def pid(self): return os.getpid()
            @endpoint
            def fork(self): return fork(None)

        def spawned(): return this_host().spawn_procs().spawn("worker", Worker)

        def fork(worker):
            child = os.fork()
            if child:
                return os.waitpid(child, 0)[1]
            try:
                (worker or spawned()).pid.call_one().get(20)
            except Exception as error:
                assert "shutdown_context() in it first" in str(error)
                shutdown_context().get(20)
                assert spawned().pid.call_one().get(20) != os.getpid()
                shutdown_context().get(20) if worker is None else None
                os._exit(0) if worker is None else sys.exit()

        worker = spawned()
        pid = worker.pid.call_one().get(20)
        assert fork(worker) == worker.fork.call_one().get(20) == 0
        assert worker.pid.call_one().get(20) == pid != spawned().pid.call_one().get(20)
        """,
    )
    assert "Exception ignored" not in done.stderr


def test_memory_that_an_actor_frees_is_there_for_its_next_step(tmp_path: Path) -> None:
    run(
        tmp_path,
        """
        import resource

        class Trainer(Actor):
            @endpoint
            def faults(self, steps):
                before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
                for _ in range(steps):
                    activations = [bytearray(b"x") * (1 << 20) for _ in range(16)]
                    del activations
                return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before

        trainer = this_host().spawn_procs(per_host={"gpus": 1}).spawn("trainer", Trainer)
        trainer.faults.call_one(1).get()
        faults = trainer.faults.call_one(10).get()
        assert faults < 4096, f"{faults} page faults: as many as one step has pages, or more"
        """,
    )


def test_threads_that_outlive_the_main_one_may_start_meshes(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
        class Echo(Actor):
            @endpoint
            def give(self, x): return x
            @endpoint
            def fail(self): raise ValueError

        def work():
            threading.main_thread().join()
            actors = this_host().spawn_procs().spawn("echo", Echo)
            threading.unread = actors.fail.call_one()
            print(actors.give.call_one(1).get(40), flush=True)

        threading.Thread(target=work).start()
        """,
    )
    assert done.stdout.splitlines()[:1] == ["1"]
    assert done.stderr == ""
