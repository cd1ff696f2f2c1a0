"""Whether an operation has failed on all ranks, which checkpoints are complete, and which connections are cut."""

import ctypes
import select
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from monarch_nb.collectives.connections import CAN_CUT, Connections
from monarch_nb.tensor.checkpoints import workers as folders
from monarch_nb.tensor.groups.coordinator import COLLECTIVE_WAIT_S, MAX_BEHIND_S, FailedOperation, Verdict
from monarch_nb.tensor.groups.world import Membership
from monarch_nb.tensor.verbs import Failure, GoOn, RankFailed, ranks_text

pytestmark = pytest.mark.timeout(20)


def failure(rank: int) -> Failure:
    return Failure(7, "aten.mm.default", rank, "ValueError", "no\nreally", "")


def test_ranks_that_all_fail_alike_go_on() -> None:
    operation = FailedOperation((0, 1, 2), 7, 0.0)
    assert operation.failed(0, failure(0)) is None
    assert operation.failed(2, failure(2)) is None
    assert operation.remaining == [1]
    assert operation.failed(1, failure(1)) is Verdict.GO_ON


def test_a_rank_that_is_past_the_operation_has_not_failed() -> None:
    operation = FailedOperation((0, 1), 7, 0.0)
    operation.failed(0, failure(0))
    assert operation.on_progress({1: 7}, 0.01) is None
    assert operation.on_progress({1: 8}, 0.02) is Verdict.CUT


def test_a_rank_that_stays_in_the_operation_waits_in_a_collective() -> None:
    operation = FailedOperation((0, 1), 7, 0.0)
    operation.failed(0, failure(0))
    assert operation.on_progress({1: 7}, 1.0) is None
    assert operation.on_progress({1: 7}, 1.0 + COLLECTIVE_WAIT_S) is Verdict.CUT


def test_a_rank_that_is_behind_is_awaited_for_a_while() -> None:
    operation = FailedOperation((0, 1, 2), 7, 0.0)
    operation.failed(0, failure(0))
    assert operation.on_progress({1: 7, 2: 3}, 1.0) is None
    assert operation.on_progress({1: 7, 2: 5}, 2.0) is None
    assert operation.on_progress({1: 7, 2: 7}, 2.01) is None  # since now only
    assert operation.on_progress({1: 7}, MAX_BEHIND_S + 0.1) is Verdict.CUT


def test_a_failure_has_a_one_line_summary() -> None:
    assert failure(1).line == "ValueError: no"
    assert ranks_text([3, 1, 3]) == "ranks 1, 3"


@pytest.mark.skipif(not CAN_CUT, reason="descriptors are identified through /proc")
def test_connections_made_meanwhile_are_cut_and_listeners_and_others_are_not() -> None:
    def pair() -> tuple[socket.socket, socket.socket]:
        with socket.create_server(("127.0.0.1", 0)) as door:
            client = socket.create_connection(door.getsockname())
            return client, door.accept()[0]

    outside = pair()
    connections = Connections()
    with connections.noted():
        ours, listener = pair(), socket.create_server(("127.0.0.1", 0))
    assert connections.cut() >= 1
    assert ours[0].recv(1) == ours[1].recv(1) == b""
    outside[0].sendall(b"x")
    assert outside[1].recv(1) == b"x"
    late = socket.create_connection(listener.getsockname())
    with pytest.raises(ConnectionAbortedError), connections.noted():
        pass
    for end in (*ours, *outside, listener, late):
        end.close()


class GlooThread:
    """A thread by the name of gloo's, which computes or sleeps in an epoll, on request."""

    def __init__(self) -> None:
        self.computes = self.ends = False
        self._computing = threading.Event()
        self._epoll = select.epoll()
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), daemon=True)
        self._thread.start()
        assert started.wait(10)

    def _run(self, started: threading.Event) -> None:
        ctypes.CDLL(None).prctl(15, b"gloo_tcp_loop")  # PR_SET_NAME
        started.set()
        while not self.ends:
            if self.computes:
                self._computing.set()
            else:
                self._epoll.poll(0.02)

    def compute(self) -> None:
        """Returns once the thread has left its epoll."""
        self.computes = True
        assert self._computing.wait(10)

    def connect(self) -> tuple[socket.socket, socket.socket]:
        """Opens a connection, one end of which is registered in the epoll."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            client = socket.create_connection(listener.getsockname())
            server = listener.accept()[0]
        self._epoll.register(client.fileno(), select.EPOLLIN)
        client.settimeout(10)
        return client, server

    def end(self) -> None:
        self.ends = True
        self._thread.join(10)
        self._epoll.close()


@pytest.mark.skipif(not CAN_CUT, reason="descriptors are identified through /proc")
@pytest.mark.parametrize("when", ["before the cut, while the thread computes", "after the cut"])
def test_connections_that_gloo_opens_late_are_cut(when: str) -> None:
    connections = Connections()
    with connections.noted():
        gloo = GlooThread()
    pair: tuple[socket.socket, ...] = ()
    try:
        if when == "after the cut":
            connections.cut()
            pair = gloo.connect()
        else:
            gloo.compute()
            pair = gloo.connect()
            connections.cut()
        assert pair[0].recv(1) == b""
    finally:
        gloo.end()
        for end in pair:
            end.close()


def test_a_repeated_word_to_go_on_hides_no_later_one() -> None:
    class Engine:
        def feature(self, _: object) -> Any:
            return SimpleNamespace()

        def post(self, to: str, verb: object, body: RankFailed) -> None:
            for number in (6, body.failure.number, 6):
                member.go_on(GoOn("", -1, 0, number))

    member = Membership(
        cast(Any, Engine()), lambda _: 0, lambda: 0, cast(Any, lambda _: None), cast(Any, lambda _: None)
    )
    assert member.all_failed(failure(0), (0, 1))


def test_a_checkpoint_exists_once_complete_and_old_ones_go(tmp_path: Path) -> None:
    folder = str(tmp_path)
    assert folders.complete(folder) == []
    for step in (10, 20, 30):
        part = folders.attempt(folder, step, "ab12")
        part.mkdir()
        assert step not in folders.complete(folder)
        folders.finish(part, step, b"rest", keep=2)
    cut_off = folders.attempt(folder, 35, "cd34")
    cut_off.mkdir()
    assert folders.complete(folder) == [20, 30]
    part = folders.attempt(folder, 40, "ef56")
    part.mkdir()
    folders.finish(part, 40, b"rest", keep=2)
    assert not cut_off.exists()
    assert (folders.path_of(folder, 40) / folders.REST).read_bytes() == b"rest"
