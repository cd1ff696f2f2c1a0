"""Output of processes as values: every line, its process and its file."""

import ctypes
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_nb.actor import Actor, ProcMesh, SupervisionError, current_rank, endpoint
from monarch_nb.logs import Written, follow_logs, listen_to_logs, logs_of
from tests.cluster.actor_tools import SECONDS, Faults, spawned

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("faults")]
EIGHT = 8
MEGABYTE = 10_000  # lines of 100 bytes


class Talker(Actor):
    @endpoint
    def say(self, *words: str) -> None:
        for word in words:
            print(word)

    @endpoint
    def everything(self) -> None:
        print("from Python")
        sys.stderr.write("from Python's stderr\n")
        ctypes.CDLL(None).puts(b"from C")
        subprocess.run(["sh", "-c", "echo from a child; echo from its stderr >&2"], check=True)
        print("from Python again")

    @endpoint
    def logs(self) -> None:  # an endpoint of that name takes precedence over mesh.logs
        self.logger.info("an info")
        logging.getLogger("lib").warning("a warning")
        warnings.warn("a Python warning", stacklevel=1)
        print("printed")

    @endpoint
    def forks(self) -> None:
        print("before", flush=True)
        pid = os.fork()
        if pid == 0:
            print("from a fork")
            return  # the child ends
        os.waitpid(pid, 0)
        print("after")

    @endpoint
    def background(self, text: str) -> None:
        threading.Timer(0.05, print, [text]).start()

    @endpoint
    def flood(self, megabytes: int) -> None:
        rank = current_rank().rank
        start = time.monotonic()
        for number in range(megabytes * MEGABYTE):
            print(f"rank {rank} line {number:06}".ljust(99, "."))
            if number % 1000 == 999:  # one megabyte in a second
                time.sleep(max(0.0, start + (number + 1) / MEGABYTE - time.monotonic()))

    @endpoint
    def ends(self, lines: int) -> None:
        for number in range(lines):
            print("line", number)
        os.kill(os.getpid(), signal.SIGKILL)

    @endpoint
    def crashes(self) -> None:
        print("about to crash")
        ctypes.string_at(0)


class WriteOnly:
    """A stream as programs make them, to write to two places."""

    def write(self, text: str) -> int:
        return len(text)


class Answers(Actor):
    @endpoint
    def answer(self, number: int) -> int:
        return number

    @endpoint
    def replace(self, stream: Any) -> None:
        sys.stdout = stream


@pytest.fixture(scope="module")
def eight() -> Iterator[ProcMesh]:
    yield from spawned(EIGHT, "eight")


@pytest.fixture(scope="module")
def talkers(eight: ProcMesh) -> Talker:
    return eight.spawn("talkers", Talker)


def test_a_stream_of_the_program_need_not_flush(own_procs: ProcMesh) -> None:
    answers = own_procs.spawn("answers", Answers)
    for stream in (None, WriteOnly()):
        answers.replace.call(stream).get(20)
        assert set(answers.answer.call(3).get(20).values()) == {3}
    own_procs.stop().get(20)
    assert not own_procs.logs("Traceback")


def wait_for(mesh: ProcMesh, count: int, grep: str) -> list[str]:
    """The texts of matching lines, once there are `count`; they arrive a moment after the reply."""
    deadline = time.monotonic() + SECONDS
    while len(records := mesh.logs(grep)) < count:
        assert time.monotonic() < deadline, f"{len(records)} of {count}: {mesh.logs()!r}"
        time.sleep(0.02)
    return [record.text for record in records]


def in_files(mesh: ProcMesh) -> dict[int, str]:
    """The contents of each rank's log files, oldest first."""
    texts = {}
    for rank, path in mesh.logs().files.items():
        old = sorted(Path(path).parent.glob(f"{Path(path).name}.*"), reverse=True)
        texts[rank] = "".join(file.read_text() for file in (*old, Path(path)))
    return texts


def test_output_of_python_c_and_children_keeps_its_order_and_stream(eight, talkers) -> None:
    mesh = eight.slice(gpus=1)
    talkers.slice(gpus=1).everything.call_one().get(SECONDS)
    wait_for(mesh, 6, "from")
    out = [record.text for record in mesh.logs("from", stream="stdout")]
    err = [record.text for record in mesh.logs("from", stream="stderr")]
    assert out == ["from Python", "from C", "from a child", "from Python again"]
    assert err == ["from Python's stderr", "from its stderr"]
    calls = {record.call for record in mesh.logs("from")}
    assert len(calls) == 1
    assert "" not in calls
    assert not eight.slice(gpus=slice(2, 8)).logs("from")


def test_records_of_logging_and_warnings_have_their_level(eight, talkers) -> None:
    talkers.slice(gpus=0).logs.call_one().get(SECONDS)
    mesh = eight.slice(gpus=0)
    wait_for(mesh, 1, "printed")
    records = mesh.logs(level="WARNING")
    assert ["a warning" in records[0].text, "a Python warning" in records[1].text] == [True, True]
    assert {record.level for record in records} == {logging.WARNING}
    assert mesh.logs("printed")[0].level == 0


def test_each_call_has_its_own_lines_unlike_background_threads(eight, talkers) -> None:
    mesh, talker = eight.slice(gpus=2), talkers.slice(gpus=2)
    talker.say.call_one("first").get(SECONDS)
    talker.say.call_one("second").get(SECONDS)
    talker.background.call_one("from behind").get(SECONDS)
    wait_for(mesh, 3, "first|second|from behind")
    first, second, background = (mesh.logs(text)[0].call for text in ("first", "second", "from behind"))
    assert len({first, second, background}) == 3
    assert background == ""


def test_a_process_that_user_code_forks_may_print(eight, talkers) -> None:
    talkers.slice(gpus=3).forks.call_one().get(SECONDS)
    assert sorted(wait_for(eight.slice(gpus=3), 3, "before|fork|after")) == ["after", "before", "from a fork"]


def test_lines_can_be_followed_and_listened_to(eight, talkers) -> None:
    lines: list[Written] = []
    stop = listen_to_logs(lambda address, written: lines.extend(written))
    followed = follow_logs(eight.slice(gpus=6), "news")
    talkers.slice(gpus=6).say.call_one("news 1").get(SECONDS)
    assert next(followed).text == "news 1"
    talkers.slice(gpus=6).say.call_one("news 2").get(SECONDS)
    assert next(followed).text == "news 2"
    assert [record.text for record in logs_of(talkers.slice(gpus=6), "news")] == ["news 1", "news 2"]
    followed.close()
    stop()
    assert [line.text for line in lines if "news" in line.text] == ["news 1\n", "news 2\n"]


@pytest.mark.slow
def test_calls_complete_and_no_line_is_lost_while_all_ranks_flood(eight, talkers) -> None:
    answers = eight.spawn("answers", Answers)
    answers.answer.call(0).get(SECONDS)
    flood = talkers.flood.call(1)
    calls = 0
    while not flood.done() or calls < 20:
        assert answers.answer.call(calls).get(SECONDS).values() == [calls] * EIGHT
        calls += 1
    flood.get(SECONDS)
    deadline = time.monotonic() + SECONDS
    last = f"line {MEGABYTE - 1:06}"
    while not all(last in text for text in in_files(eight).values()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for rank, text in in_files(eight).items():
        lines = [line for line in text.splitlines() if line.startswith("rank ")]
        assert lines == [f"rank {rank} line {number:06}".ljust(99, ".") for number in range(MEGABYTE)]


def test_sigkill_loses_no_line_and_the_failure_shows_the_last_ones(own_procs, faults: Faults) -> None:
    talkers = own_procs.spawn("mortal", Talker)
    with pytest.raises(SupervisionError) as caught:
        talkers.slice(gpus=0).ends.call_one(3000).get(SECONDS)
    assert "| line 2999" in str(caught.value)
    assert wait_for(own_procs.slice(gpus=0), 3000, "line") == [f"line {number}" for number in range(3000)]
    with pytest.raises(SupervisionError) as caught:
        talkers.slice(gpus=1).crashes.call_one().get(SECONDS)
    text = str(caught.value)
    assert "about to crash" in text
    assert "Fatal Python error: Segmentation fault" in text
    assert "SIGSEGV" in text
    assert {faults.next().crashed_ranks[0] for _ in range(2)} == {0, 1}
