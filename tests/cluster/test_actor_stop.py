"""Stops of processes, and of actors that do not end by themselves: they get time, an interrupt, and are abandoned."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_nb.actor import Actor, Channel, Port, ProcMesh, SupervisionError, endpoint, this_host
from monarch_nb.config import configured

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("faults")]


class Stoppable(Actor):
    @endpoint
    def ping(self) -> str:
        return "pong"


class Witness(Actor):
    def __init__(self) -> None:
        self.seen: list[str] = []

    @endpoint
    def see(self, message: str) -> None:
        self.seen.append(message)

    @endpoint
    def all(self) -> list[str]:
        return self.seen


class Unending(Actor):
    """Never returns from `__init__` or from `__cleanup__`."""

    def __init__(self, stage: str, how: str, witness: Any, port: Port[str]) -> None:
        self.stage, self.how = stage, how
        witness.see.broadcast("sent while it began")
        port.send("began")
        if stage == "init":
            self.go_on()

    def go_on(self) -> None:
        if self.how == "waits":
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()  # nothing wakes it
        while True:
            if self.how == "sleeps":
                time.sleep(1000)

    @endpoint
    def ping(self) -> str:
        return "pong"

    def __cleanup__(self, exc: Exception | None) -> None:
        if self.stage == "cleanup":
            self.go_on()


class AsyncUnending(Unending):
    @endpoint
    async def ping(self) -> str:  # type: ignore[override]
        return "pong"

    async def __cleanup__(self, exc: Exception | None) -> None:  # type: ignore[override]
        pass


@pytest.fixture(scope="module")
def hasty() -> Iterator[ProcMesh]:
    """Processes whose actors get little time to end."""
    with configured(cleanup_timeout="200ms", stop_actor_timeout="200ms"):
        procs = this_host().spawn_procs(per_host={"gpus": 1}, name="hasty")
        procs.initialized.get(60)
        yield procs
        procs.stop().get(40)


@pytest.mark.parametrize("kind", [Unending, AsyncUnending])
@pytest.mark.parametrize("how", ["spins", "sleeps", "waits"])
def test_a_stop_ends_a_constructor_that_never_returns(hasty: ProcMesh, kind: Any, how: str) -> None:
    port, receiver = Channel[str].open()
    witness: Any = hasty.spawn("witness", Witness)
    mesh: Any = hasty.spawn("unending", kind, "init", how, witness, port)
    call = mesh.ping.call()
    assert receiver.recv().get(20) == "began"
    while witness.all.call_one().get(20) != ["sent while it began"]:
        time.sleep(0.01)
    began = time.monotonic()
    mesh.stop().get(20)
    assert time.monotonic() - began < 8
    with pytest.raises(SupervisionError, match="stopped"):
        call.get(20)
    with pytest.raises(SupervisionError, match="stopped"):
        mesh.initialized.get(20)
    assert witness.all.call_one().get(20) == ["sent while it began"]
    witness.stop().get(20)


class Tidies(Actor):
    """Its clean-up takes too long, in one of several ways."""

    def __init__(self, how: str, file: str) -> None:
        self.how, self.file = how, file

    @endpoint
    def ping(self) -> str:
        return "pong"

    def note(self, word: str) -> None:
        with open(self.file, "a") as output:
            output.write(f"{word}\n")

    def spin(self) -> None:
        while self.how == "spins":  # not below: Python 3.13's jumps back lie outside of the `try` that they are in
            pass

    def __cleanup__(self, exc: Exception | None) -> None:
        self.note("begins")
        try:
            if self.how == "sleeps":
                time.sleep(100)
            self.spin()
            if self.how == "blocks":
                threading.Event().wait(100)
            until = time.monotonic() + 0.1
            while self.how == "is done" and time.monotonic() < until:
                pass
            self.note("is done")
        except KeyboardInterrupt:
            self.note("interrupted")


@pytest.mark.parametrize(
    ("how", "note"), [("sleeps", "interrupted"), ("spins", "interrupted"), ("blocks", ""), ("is done", "is done")]
)
def test_clean_up_gets_its_time_then_an_interrupt_then_is_abandoned(
    hasty: ProcMesh, tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str, note: str
) -> None:
    file = tmp_path / "notes"
    mesh: Any = hasty.spawn("tidy", Tidies, how, str(file))
    assert mesh.ping.call().get(20).values() == ["pong"]
    began = time.monotonic()
    mesh.stop().get(20)
    assert time.monotonic() - began < 8
    assert file.read_text().split("\n") == ["begins", *([note] if note else []), ""]
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    if note:
        assert warnings == []
    else:
        assert len(warnings) == 1
        assert warnings[0].startswith("tidy was stopped, but its __cleanup__ on ")
        assert "hasty.stop()" in warnings[0]
    with pytest.raises(SupervisionError, match="stopped"):
        mesh.ping.call().get(20)
    assert hasty.spawn("next", Stoppable).ping.call().get(20)  # type: ignore[attr-defined]


def test_processes_do_not_wait_long_for_a_constructor_that_never_returns() -> None:
    with configured(cleanup_timeout="200ms"):
        procs = this_host().spawn_procs(per_host={"gpus": 1}, name="begun")
        port, receiver = Channel[str].open()
        procs.spawn("unending", Unending, "init", "waits", procs.spawn("witness", Witness), port)
        assert receiver.recv().get(40) == "began"
        began = time.monotonic()
        procs.stop().get(40)
        assert time.monotonic() - began < 6  # of the ten seconds for a running endpoint


def test_a_clean_up_that_never_returns_does_not_delay_a_stop(hasty: ProcMesh) -> None:
    port, receiver = Channel[str].open()
    mesh: Any = hasty.spawn("unending", Unending, "cleanup", "waits", hasty.spawn("witness", Witness), port)
    assert receiver.recv().get(20) == "began"
    assert mesh.ping.call().get(20).values() == ["pong"]
    mesh.stop().get(20)
