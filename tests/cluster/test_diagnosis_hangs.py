"""Hangs of real ranks, diagnosed while they last."""

import _thread
import os
import pickle
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import monarch_nb
from monarch_nb.actor import Actor, ActorError, endpoint, this_host
from monarch_nb.diagnosis import CallAbortedError, Diagnosis, Finding, abort, collector
from tests.cluster.actor_tools import SECONDS, joined, line_of, spawned
from tests.polling import until

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(
        tuple(map(int, torch.__version__.split(".")[:2])) < (2, 10),
        reason="this PyTorch records no collectives of gloo",
    ),
]


class Trainer(Actor):
    """Reduces twice; rank 1 does something else before the second time, until a file exists."""

    @endpoint
    def join(self) -> int:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        return os.getpid()

    @endpoint
    def train(self, way: str, pipe: str) -> None:
        dist.all_reduce(torch.ones(4))
        if dist.get_rank() == 1:
            if way == "blocks":
                with open(pipe, "rb") as opened:
                    opened.read()  # until the test writes
            while way == "computes" and not os.path.exists(pipe):
                sum(range(1000))
            if way == "raises":
                raise ValueError("no such batch")
        dist.all_reduce(torch.ones(4))


class Reader(Actor):
    """Reads a pipe, by itself or through another actor."""

    def __init__(self, other: Any = None, limit: float | None = None) -> None:
        self.other, self.limit = other, limit

    @endpoint
    def read(self, pipe: str) -> None:
        if self.other is not None:
            self.other.read.call(pipe).get(self.limit)
        else:
            Path(pipe).read_bytes()


@pytest.fixture(scope="module")
def trainers() -> Iterator[Any]:
    yield from joined(Trainer)


def finding_of(trainers: Any, kind: str, words: str = "") -> Finding:
    """The first finding, once it has this kind and these words."""
    latest = [Diagnosis((), "")]

    def is_found() -> bool:
        latest[0] = monarch_nb.diagnose(trainers)
        findings = latest[0].findings
        return bool(findings) and findings[0].kind == kind and words in findings[0].text

    until(is_found, f"{kind} {words}", SECONDS)
    return latest[0].findings[0]


@contextmanager
def blocked(trainers: Any, tmp_path: Path) -> Iterator[Any]:
    """Has rank 1 block in a pipe, and ends that and the call."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    call = trainers.train.call("blocks", str(pipe))
    try:
        yield call
    finally:
        pipe.write_bytes(b"")
        call.get(SECONDS)


def test_a_rank_that_blocks_is_named_with_its_line(trainers: Any, tmp_path: Path) -> None:
    with blocked(trainers, tmp_path) as call:
        finding = finding_of(trainers, "missing_from_collective", "where gpus=0,2 have waited")
        with pytest.raises(TimeoutError) as caught:
            call.get(0.1)
    assert "gpus=1 has not begun all_reduce no. " in caught.value.__notes__[0]
    assert (finding.mesh, finding.ranks, finding.sure) == ("workers", (1,), True)
    assert finding.source == line_of(__file__, "with open(pipe")
    assert finding.text.startswith("gpus=1 has not begun all_reduce no. ")
    assert not monarch_nb.diagnose(trainers)


def test_a_script_that_waits_says_why_and_so_does_its_interrupt(
    trainers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(collector, "WITHOUT_PROGRESS_S", 0.5)
    outputs = list[str]()

    def is_written() -> bool:
        outputs.append(capfd.readouterr().err)
        return "makes no progress" in "".join(outputs)

    def press() -> None:
        try:
            until(is_written, "the reason is written")
        finally:
            _thread.interrupt_main()

    thread = threading.Thread(target=press)
    with blocked(trainers, tmp_path) as call:
        thread.start()
        with pytest.raises(KeyboardInterrupt) as caught:
            call.get(SECONDS)
    thread.join()
    text = "".join(outputs)
    assert text.count("monarch: trainers.train() makes no progress: gpus=1 has not begun all_reduce no. ") == 1
    assert "monarch_nb.diagnosis.abort() ends it" in text
    assert "The future stays valid" in caught.value.__notes__[0]
    assert caught.value.__notes__[1].startswith("gpus=1 has not begun all_reduce no. ")


@pytest.mark.slow
def test_an_abort_ends_the_call_with_the_finding(trainers: Any, tmp_path: Path) -> None:
    pids = trainers.join.call().get(SECONDS).values()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    call = trainers.train.call("blocks", str(pipe))
    finding = finding_of(trainers, "missing_from_collective", "where gpus=0,2 have waited")
    os.mkfifo(tmp_path / "other")
    namesakes = this_host().spawn_procs(name="workers")
    reading = namesakes.run((tmp_path / "other").read_bytes)
    diagnosis = abort()
    (tmp_path / "other").write_bytes(b"")
    assert reading.get(SECONDS).item() == b""
    namesakes.stop().get(SECONDS)
    assert diagnosis.ended.startswith("ended: trainers.train(); gpus=1 of workers did not react")  # it is in C code
    pipe.write_bytes(b"")
    with pytest.raises(CallAbortedError, match="gpus=1 has not begun all_reduce") as caught:
        call.get(SECONDS)
    assert caught.value.diagnosis.findings[0].ranks == finding.ranks
    assert pickle.loads(pickle.dumps(caught.value)).diagnosis.findings == caught.value.diagnosis.findings
    assert trainers.join.call().get(SECONDS).values() == pids
    trainers.train.call("nothing", "").get(SECONDS)
    assert abort(trainers).ended.startswith("nothing was ended")


def test_a_rank_that_computes_is_a_suspicion_only(trainers: Any, tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    call = trainers.train.call("computes", str(flag))
    try:
        finding = finding_of(trainers, "waiting_on")
    finally:
        flag.touch()
        call.get(SECONDS)
    assert (finding.ranks, finding.sure) == ((1,), False)


@pytest.mark.slow
def test_a_rank_stopped_by_a_signal_is_named(trainers: Any, tmp_path: Path) -> None:
    pid = trainers.slice(gpus=1).join.call_one().get(SECONDS)
    with blocked(trainers, tmp_path):
        finding_of(trainers, "missing_from_collective")
        os.kill(pid, signal.SIGSTOP)
        try:
            finding = finding_of(trainers, "stopped", "gpus=0,2 wait in all_reduce")
        finally:
            os.kill(pid, signal.SIGCONT)
    assert (finding.ranks, finding.sure) == ((1,), True)
    assert "gpus=1 is stopped by a signal" in finding.text


@pytest.mark.slow
def test_a_rank_whose_call_has_ended_is_missing_from_the_collective(trainers: Any) -> None:
    with monarch_nb.configured(call_error_window="10s"):
        call = trainers.train.call("raises", "")
        finding = finding_of(trainers, "missing_from_collective", "it runs nothing: its call has ended")
    assert finding.ranks == (1,)
    with pytest.raises(ActorError, match="no such batch") as caught:
        call.get(SECONDS)
    assert "Before that, gpus=1 has not begun all_reduce no. " in caught.value.__notes__[-1]


@pytest.mark.parametrize(("which", "limit"), [("all", None), ("first", None), ("first", SECONDS)])
def test_an_actor_of_another_mesh_is_the_end_of_waits(tmp_path: Path, which: str, limit: float | None) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with contextmanager(spawned)(1, "last") as last, contextmanager(spawned)(1, "first") as first:
        waiter: Any = first.spawn("waiter", Reader, last.spawn("reader", Reader), limit)
        call = waiter.read.call(str(pipe))
        finding = finding_of(None if which == "all" else first, "waiting_on")
        pipe.write_bytes(b"")
        call.get(SECONDS)
    assert (finding.mesh, finding.ranks) == ("last", (0,))
    assert "has not answered reader.read(), for which others wait; it sits in" in finding.text


def test_values_that_are_no_mesh_are_refused() -> None:
    with pytest.raises(TypeError, match="can be diagnosed"):
        monarch_nb.diagnose("trainers")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="timeout=0"):
        monarch_nb.diagnose(timeout=0)
