"""ProcMesh.logging_option: whether, when and how the output of processes is shown."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import monarch_nb.actor
from monarch_nb.actor import Actor, endpoint, heal_mesh
from tests.cluster.actor_tools import spawned
from tests.polling import until

pytestmark = pytest.mark.timeout(120)

PROGRAM = """
import asyncio, logging, sys, time
from monarch.actor import Actor, current_rank, endpoint, this_host
from monarch.config import configure

class Talker(Actor):
    @endpoint
    def say(self, *words):
        for word in words:
            print(word)
    @endpoint
    def log(self):
        self.logger.debug("debugged")
        self.logger.warning("warned")
    def __cleanup__(self, error):
        print("bye")

procs = this_host().spawn_procs(per_host={"gpus": 2}, name="talk")
talkers = procs.spawn("talkers", Talker)

def option(**kwargs):
    asyncio.run(procs.logging_option(**kwargs))
"""


def run(tmp_path: Path, body: str) -> list[str]:
    """The lines that a program prints, in order."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM + body)
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_lines_are_shown_as_asked_and_before_their_mesh_ends(tmp_path: Path) -> None:
    body = """
talkers.say.call('before').get()
option(stream_to_client=False)
talkers.say.call('hidden').get()
option(stream_to_client=True, aggregate_window_sec=30)
talkers.say.call('same').get()
option(stream_to_client=True)
talkers.say.call('after').get()
procs.stop().get()
print('end')
"""
    lines = run(tmp_path, body)
    assert [*sorted(lines[:2]), lines[2]] == ["[talk gpus=0] before", "[talk gpus=1] before", "[talk gpus=0-1] same"]
    # one rank's line may follow another's bye
    words = [f"[talk gpus={rank}] {word}" for word in ("after", "bye") for rank in range(2)]
    assert sorted(lines[3:-1]) == sorted(words)
    assert lines[-1] == "end"


@pytest.mark.slow
def test_the_level_reaches_the_processes(tmp_path: Path) -> None:
    body = """
option(level=logging.DEBUG)
talkers.log.call().get()
option(level=logging.WARNING)
talkers.log.call().get()
procs.stop().get()
"""
    lines = [line for line in run(tmp_path, body) if line != "bye"]
    assert len([line for line in lines if "DEBUG Talker" in line and "debugged" in line]) == 2
    assert len([line for line in lines if "WARNING Talker" in line and "warned" in line]) == 4


class Leveled(Actor):
    @endpoint
    def level(self) -> int:
        return logging.getLogger().level


@pytest.fixture(scope="module")
def procs():
    yield from spawned(2, "levels")


def test_healed_processes_have_the_level_too(procs, monkeypatch) -> None:
    monkeypatch.setattr(monarch_nb.actor, "unhandled_fault_hook", lambda failure: None)
    asyncio.run(procs.logging_option(level=13))
    actors = procs.spawn("leveled", Leveled)
    assert actors.level.call().get(20).values() == [13, 13]
    os.kill(procs.slice(gpus=1).run(os.getpid).get(20).item(), signal.SIGKILL)
    with pytest.raises(RuntimeError):
        [actors.level.call().get(20) for _ in range(100)]
    heal_mesh(procs)
    # the new process gets it right after the heal
    until(lambda: actors.level.call().get(20).values() == [13, 13], "the level of the new process")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"aggregate_window_sec": 3}, RuntimeError, "needs stream_to_client=True"),
        ({"stream_to_client": False, "aggregate_window_sec": 3}, RuntimeError, "needs stream_to_client=True"),
        ({"stream_to_client": True, "aggregate_window_sec": -1}, ValueError, "must be 0 or more"),
        ({"stream_to_client": True, "aggregate_window_sec": "3"}, TypeError, "no number of seconds"),
        ({"level": -1}, ValueError, "0 to 255"),
        ({"level": 256}, ValueError, "0 to 255"),
        ({"level": "INFO"}, ValueError, "0 to 255"),
    ],
)
def test_senseless_logging_options_are_refused(procs, options, error, message) -> None:
    with pytest.raises(error, match=message):
        asyncio.run(procs.logging_option(**options))
