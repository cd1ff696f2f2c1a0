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
from tests.cluster.fault_tools import until

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
    """The lines a program writes on its standard output, in order."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM + body)
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_streamed_lines_begin_with_their_rank(tmp_path: Path) -> None:
    lines = run(tmp_path, "option(stream_to_client=True)\ntalkers.say.call('hello').get()")
    hellos = sorted(line for line in lines if "hello" in line)  # one rank's may come after another's goodbye
    assert hellos == ["[talk gpus=0] hello", "[talk gpus=1] hello"]


def test_equal_lines_of_a_window_are_shown_once(tmp_path: Path) -> None:
    body = """
option(stream_to_client=True, aggregate_window_sec=30)
talkers.say.call('same').get()
talkers.say.call('twice', 'twice').get()
talkers.slice(gpus=1).say.call('one').get()
procs.stop().get()
print('done')
"""
    lines = run(tmp_path, body)
    assert lines[:2] == ["[talk gpus=0-1] same", "[talk gpus=0-1] twice (4 times)"]
    assert sorted(lines[2:4]) == ["[talk gpus=0-1] bye", "[talk gpus=1] one"]  # rank 0's goodbye may come first
    assert lines[4:] == ["done"]


def test_a_window_that_is_over_is_shown_while_the_program_goes_on(tmp_path: Path) -> None:
    body = """
talkers.say.call().get()  # both are there: their lines fall into one window
option(stream_to_client=True, aggregate_window_sec=3)
talkers.say.call('first').get()
deadline = time.monotonic() + 30
class Watch:
    def __init__(self, to):
        self.to, self.seen = to, ''
    def write(self, text):
        self.seen += text
        return self.to.write(text)
    def flush(self):
        self.to.flush()
sys.stdout = watch = Watch(sys.stdout)
while 'first' not in watch.seen and time.monotonic() < deadline:
    time.sleep(0.01)
print('second')
"""
    assert run(tmp_path, body)[:2] == ["[talk gpus=0-1] first", "second"]


def test_output_can_be_switched_off_and_on_again(tmp_path: Path) -> None:
    body = """
talkers.say.call('before').get()
option(stream_to_client=False)
talkers.say.call('hidden').get()
option(stream_to_client=True)
talkers.say.call('after').get()
"""
    lines = run(tmp_path, body)
    assert sorted(lines)[:4] == ["[talk gpus=0] after", "[talk gpus=0] bye", "[talk gpus=1] after", "[talk gpus=1] bye"]
    assert lines[:2] == ["before", "before"]
    assert not [line for line in lines if "hidden" in line]


def test_stop_resolves_when_last_words_are_shown(tmp_path: Path) -> None:
    assert run(tmp_path, "talkers.say.call().get()\nprocs.stop().get()\nprint('end')") == ["bye", "bye", "end"]


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
    # it is told to the new process right after the heal
    until(lambda: actors.level.call().get(20).values() == [13, 13], "the level of the new process")


@pytest.mark.parametrize(
    ("given", "error", "told"),
    [
        ({"aggregate_window_sec": 3}, RuntimeError, "needs stream_to_client=True"),
        ({"stream_to_client": False, "aggregate_window_sec": 3}, RuntimeError, "needs stream_to_client=True"),
        ({"stream_to_client": True, "aggregate_window_sec": 0}, ValueError, "must be positive"),
        ({"level": -1}, ValueError, "0 to 255"),
        ({"level": 256}, ValueError, "0 to 255"),
        ({"level": "INFO"}, ValueError, "0 to 255"),
    ],
)
def test_what_makes_no_sense_is_refused(procs, given, error, told) -> None:
    with pytest.raises(error, match=told):
        asyncio.run(procs.logging_option(**given))
