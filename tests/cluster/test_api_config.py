"""Settings reach the processes that are spawned later, and control their engine."""

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from monarch_nb import config
from monarch_nb.actor import Actor, Channel, MeshFailure, Port, SupervisionError, endpoint, this_host, this_proc
from monarch_nb.exceptions import MessageTooLargeError
from tests.cluster.actor_tools import Faults
from tests.cluster.fault_tools import spawned

pytestmark = pytest.mark.timeout(120)


class Reporter(Actor):
    @endpoint
    def config(self) -> dict[str, Any]:
        return config.get_global_config()

    @endpoint
    def runtime_config(self) -> dict[str, Any]:
        return config.get_runtime_config()

    @endpoint
    def environment(self) -> list[str]:
        return [name for name in os.environ if name == "MONARCH_NB_CONFIG"]

    @endpoint
    def nested(self) -> str:
        with spawned(this_host(), 1, "nested") as procs:
            reporter: Any = procs.spawn("reporter", Reporter)
            return str(reporter.config.call_one().get(20)["cleanup_timeout"])

    @endpoint
    def lines(self, count: int) -> int:
        for number in range(count):
            print("line", number, flush=True)
        return os.getpid()

    @endpoint
    def hold(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(0.01)

    @endpoint
    def take(self, data: bytes) -> int:
        return len(data)

    @endpoint
    def give(self, size: int) -> bytes:
        return b"x" * size

    @endpoint
    def tell(self, port: Port[bytes], size: int) -> None:
        port.send(b"x" * size)


@pytest.fixture(autouse=True)
def unchanged() -> Iterator[None]:
    before = config.get_runtime_config()
    yield
    config.clear_runtime_config()
    config.configure(**before)


def test_settings_reach_processes_spawned_later_and_those_that_they_spawn() -> None:
    with (
        config.configured(cleanup_timeout="7s", tail_log_lines=3, default_transport="tcp"),
        spawned(this_host(), 1, "reporter") as procs,
    ):
        reporter: Any = procs.spawn("reporter", Reporter)
        remote = reporter.config.call_one().get(20)
        local = config.get_global_config()
        assert remote == local
        assert reporter.runtime_config.call_one().get(20) == {}
        assert reporter.environment.call_one().get(20) == []
        assert reporter.nested.call_one().get(40) == "7s"


def test_a_failure_tells_as_many_last_lines_as_are_asked_for(faults: Faults) -> None:
    def failure(lines: int) -> MeshFailure:
        with config.configured(tail_log_lines=lines), spawned(this_host(), 1, "noisy") as procs:
            reporter: Any = procs.spawn("reporter", Reporter)
            os.kill(reporter.lines.call_one(30).get(20), signal.SIGKILL)
            return faults.next()

    assert failure(2).last_lines == ("line 28", "line 29")
    assert failure(0).last_lines == ()


def test_an_actor_that_ignores_its_stop_is_interrupted_after_the_timeout() -> None:
    config.configure(stop_actor_timeout="100ms")
    with spawned(this_host(), 1, "busy") as procs:
        reporter: Any = procs.spawn("reporter", Reporter)
        call = reporter.hold.call_one(30)
        began = time.monotonic()
        reporter.stop().get(20)
        assert time.monotonic() - began < 15
        assert call.exception(20) is not None


def test_messages_that_are_too_large_are_refused_by_the_sender() -> None:
    with config.configured(codec_max_frame_length=100_000), spawned(this_host(), 1, "small") as procs:
        reporter: Any = procs.spawn("reporter", Reporter)
        with pytest.raises(MessageTooLargeError, match=r"200,\d+ bytes is larger than codec_max_frame_length"):
            reporter.take.call_one(b"x" * 200_000)
        assert reporter.take.call_one(b"x" * 1000).get(20) == 1000
        with pytest.raises(Exception, match=r"MessageTooLargeError: a message of 200,\d+ bytes") as answer:
            reporter.give.call_one(200_000).get(20)
        assert not isinstance(answer.value, SupervisionError)


def test_values_that_stay_in_a_process_have_no_size_limit() -> None:
    with config.configured(codec_max_frame_length=100_000):
        local: Any = this_proc().spawn("local", Reporter)
        assert local.take.call_one(b"x" * 200_000).get(20) == 200_000
        assert len(local.give.call_one(200_000).get(20)) == 200_000
        port, receiver = Channel[bytes].open()
        port.send(b"x" * 200_000)
        assert len(receiver.recv().get(20)) == 200_000
        local.stop().get(20)


def test_a_port_bounds_what_it_sends_to_another_process() -> None:
    with config.configured(codec_max_frame_length=100_000), spawned(this_host(), 1, "ports") as procs:
        reporter: Any = procs.spawn("reporter", Reporter)
        port, receiver = Channel[bytes].open()
        with pytest.raises(Exception, match=r"MessageTooLargeError: a message of 200,\d+ bytes"):
            reporter.tell.call_one(port, 200_000).get(20)
        reporter.tell.call_one(port, 1000).get(20)
        assert len(receiver.recv().get(20)) == 1000


class Slow(Actor):
    def __init__(self) -> None:
        time.sleep(2)

    @endpoint
    def ping(self) -> bool:
        return True


def test_a_constructor_may_take_its_time_unless_a_limit_is_set() -> None:
    with spawned(this_host(), 1, "slow") as procs:
        with config.configured(actor_spawn_max_idle="200ms"):
            mesh: Any = procs.spawn("late", Slow)
            with pytest.raises(RuntimeError, match=r"late\.__init__ has not ended within 0\.2 s"):
                mesh.initialized.get(20)
        assert mesh.ping.call_one().get(20)  # the constructor has ended all the same
