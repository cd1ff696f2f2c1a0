import os
import queue
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from monarch_nb.routing.actions import LinkConfig
from monarch_nb.transport import Keys, Limits, Node, TransportError, TrustError, tcp
from monarch_nb.transport.tcp import sockets
from monarch_nb.wire.header import Kind
from tests.polling import until
from tests.ports import free_port
from tests.proxy import Proxy
from tests.unit.transport_tools import End, ends, reader_threads, starved

pytestmark = pytest.mark.timeout(60)
LOOPBACK = "tcp://127.0.0.1:*"
COUNT = 3000


def agent(host: str, keys: Keys | None, **options: object) -> End:
    return End(f"{host}/agent", keys=keys, tcp_bind=LOOPBACK, **options)


def test_agents_that_dial_each_other_exchange_messages_in_order() -> None:
    keys = Keys.create()
    a, b = agent("h1", keys), agent("h2", keys)
    a.node.learn("h2", b.node.tcp_endpoint)
    b.node.learn("h1", a.node.tcp_endpoint)
    with ends(a, b):
        for number in range(300):
            a.send("h2/agent", b"p", index=number)
            b.send("h1/agent", b"p", index=number)
        assert [a.get()[0].index for _ in range(300)] == list(range(300))
        assert [b.get()[0].index for _ in range(300)] == list(range(300))


@contextmanager
def undialable() -> Iterator[tuple[End, End]]:
    """An agent that listens, and a controller that dials it."""
    keys = Keys.create()
    listener, controller = agent("h1", keys), End("h0/c", keys=keys)
    controller.node.learn("h1", listener.node.tcp_endpoint)
    with ends(listener, controller):
        yield listener, controller


def test_an_undialable_process_is_answered_over_its_own_connection() -> None:
    with undialable() as (listener, controller):
        controller.send("h1/agent", b"question", port=3)
        header, _ = listener.get()
        for number in range(500):
            listener.send(header.src, b"answer", kind=Kind.REPLY, index=number)
        assert [controller.get()[0].index for _ in range(500)] == list(range(500))


def test_the_urgent_lane_of_an_undialable_process_works_both_ways() -> None:
    with undialable() as (listener, controller):
        controller.send("h1/agent", b"ping", lane=1)
        listener.get()
        listener.send("h0/c", b"pong", lane=1)
        assert controller.get()[1] == [b"pong"]


def test_a_restarted_peer_answers_on_the_connection_that_it_has() -> None:
    keys, bind = Keys.create(), f"tcp://127.0.0.1:{free_port()}"
    a, b = agent("h1", keys), End("h2/agent", keys=keys, tcp_bind=bind)
    a.node.learn("h2", bind)
    b.node.learn("h1", a.node.tcp_endpoint)
    with ends(a):
        with ends(b):  # they dial each other at once, and answer on connections of their own
            a.send("h2/agent", b"p")
            b.send("h1/agent", b"p")
            a.get()
            b.get()
        restarted = End("h2/agent", keys=keys, tcp_bind=bind)  # knows nobody
        with ends(restarted):
            while restarted.inbox.empty():  # messages for the former one fail
                a.send("h2/agent", b"first")
                time.sleep(0.05)

            def answer() -> None:
                for _ in range(COUNT):
                    header, frames = restarted.get()
                    while frames == [b"first"]:
                        header, frames = restarted.get()
                    restarted.send(header.src, b"answer", kind=Kind.REPLY, index=header.index)

            answering = threading.Thread(target=answer)
            answering.start()
            for number in range(COUNT):  # a write may consume the signal that an answer is readable
                a.send("h2/agent", b"p", index=number)
                if number:
                    assert a.get()[0].index == number - 1
            answering.join()


@pytest.mark.parametrize("sizes", [[5_000_000], [100, 3_000_000, 0, 300_000, 7], [1 << 20, 1 << 20], [0] * 3])
@pytest.mark.parametrize("portable", ["0", "1"])
def test_large_bodies_arrive_whole_and_writable(
    sizes: list[int], portable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MONARCH_NB_PORTABLE", portable)
    keys = Keys.create()
    a, b = agent("h1", keys), agent("h2", keys)
    a.node.learn("h2", b.node.tcp_endpoint)
    frames = [b"pickle"] + [bytes([number + 1]) * size for number, size in enumerate(sizes)]
    with ends(a, b):
        for index in range(3):
            a.send("h2/agent", *frames, index=index)
            a.send("h2/agent", b"small", index=index)
        for index in range(3):
            header, got = b.get()
            assert header.index == index
            assert [bytes(frame) for frame in got] == frames
            for view in got[1:]:
                assert not view.readonly
            assert b.get()[1] == [b"small"]


@pytest.mark.parametrize("address", ["host.invalid", "192.0.2.1"])
def test_listening_at_a_foreign_address_says_that_it_is_foreign(address: str) -> None:
    endpoint = f"tcp://{address}:22222"
    node = Node("h/agent", run_folders={}, handler=print, on_link_failed=print, tcp_bind=endpoint, keys=Keys.create())
    with pytest.raises(TransportError, match=f"cannot listen on {endpoint}: this machine has no such"):
        node.start()


def test_a_cut_connection_is_resumed_without_loss_or_repetition() -> None:
    keys = Keys.create()
    listener = agent("h1", keys)
    proxy = Proxy(listener.node.tcp_endpoint or "")
    controller = End("h0/c", keys=keys)
    controller.node.learn("h1", proxy.endpoint)
    with ends(listener, controller):
        controller.send("h1/agent", index=0)
        listener.get()
        listener.send("h0/c", index=0)
        controller.get()
        done = threading.Event()

        def cutter() -> None:
            for _ in range(5):
                while not controller.node._links._peers["h1/agent", 0].up:
                    done.wait(0.005)
                done.wait(0.05)
                proxy.reset()
                controller.get_connection(up=False)

        thread = threading.Thread(target=cutter)
        thread.start()
        number = 0
        while thread.is_alive():
            number += 1
            controller.send("h1/agent", b"x" * 5000, index=number)
            listener.send("h0/c", b"y" * 5000, index=number)
            done.wait(0.0005)
        thread.join()
        assert [listener.get()[0].index for _ in range(number)] == list(range(1, number + 1))
        assert [controller.get()[0].index for _ in range(number)] == list(range(1, number + 1))
        assert listener.failed.empty()
        assert controller.failed.empty()
    proxy.close()


def test_large_bodies_survive_cut_connections() -> None:
    keys = Keys.create()
    a, b = agent("h1", keys), agent("h2", keys)
    proxy = Proxy(b.node.tcp_endpoint or "")
    a.node.learn("h2", proxy.endpoint)
    with ends(a, b):
        a.send("h2/agent")
        header, _ = b.get()
        b.send(header.src)
        a.get()
        for number in range(6):
            a.send("h2/agent", b"p", bytes([number]) * 8_000_000, index=number)
            if number % 2:
                a.get_connection(up=True)
                proxy.reset()
        for number in range(6):
            header, frames = b.get()
            assert header.index == number
            assert bytes(frames[1]) == bytes([number]) * 8_000_000
    proxy.close()


def test_without_a_connection_for_too_long_messages_fail_with_a_reason() -> None:
    a = End("h1/agent", keys=Keys.create(), config=LinkConfig(down_timeout=0.3))
    a.node.learn("h2", f"tcp://127.0.0.1:{free_port()}")
    with ends(a):
        a.send("h2/agent", b"p", port=5)
        header, _, reason = a.failed.get(timeout=20)
        assert header.port == 5
        assert "no connection" in reason


def test_connections_come_and_go_are_told() -> None:
    keys = Keys.create()
    a, b = agent("h1", keys), agent("h2", keys)
    a.node.learn("h2", b.node.tcp_endpoint)
    with ends(a):
        a.send("h2/agent")
        assert a.get_connection(up=True) == "h2/agent"
        assert b.get_connection(up=True) == "h1/agent"
        b.node.close()
        assert a.get_connection(up=False) == "h2/agent"


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:*", "tcp://0.0.0.0:*", "tcp://localhost:1234"])
def test_tcp_without_a_key_is_refused_with_the_remedy(endpoint: str) -> None:
    node = Node("h/agent", run_folders={}, handler=print, on_link_failed=print, tcp_bind=endpoint)
    with pytest.raises(TrustError, match=r"Keys\.load_or_create"):
        node.start()
    with pytest.raises(TrustError, match=r"Keys\.load_or_create"):
        node.learn("h2", "tcp://10.0.0.1:22222")
    assert reader_threads() == []


def test_loopback_may_do_without_a_key_only_when_asked_for() -> None:
    a = End("h1/agent", tcp_bind=LOOPBACK, insecure_loopback=True)
    b = End("h0/c", insecure_loopback=True)
    b.node.learn("h1", a.node.tcp_endpoint)
    with ends(a, b):
        b.send("h1/agent", b"p")
        assert a.get()[1] == [b"p"]
        for elsewhere in ("tcp://10.0.0.1:5", "tcp://0.0.0.0:5", "tcp://example.org:5", "tcp://[::2]:5"):
            with pytest.raises(TrustError):
                b.node.learn("h3", elsewhere)
        b.node.learn("h4", "tcp://[::1]:5")
        b.node.learn("h4", "tcp://127.3.2.1:5")


def test_a_listener_keeps_its_key_while_no_descriptor_is_left(caplog: pytest.LogCaptureFixture) -> None:
    old, new, newest = Keys.create(), Keys.create(), Keys.create()
    listener, controller, stranger = agent("h1", old), End("h0/c", keys=old), End("h2/c", keys=old)
    for end in (controller, stranger):
        end.node.learn("h1", listener.node.tcp_endpoint)
    with ends(listener, controller, stranger):
        controller.send("h1/agent", b"before")
        listener.get()
        with starved(0):
            for previous, current in ((old, new), (new, newest)):
                for end in (listener, controller):
                    end.node.change_keys("expect", previous, current)
                    end.node.change_keys("use", previous, current)
            until(lambda: "still lets in those with the former key" in caplog.text)
            controller.send("h1/agent", b"meanwhile")
            assert listener.get()[1] == [b"meanwhile"]
        assert controller.get_connection(False) == "h1/agent"
        controller.send("h1/agent", b"after")
        assert listener.get()[1] == [b"after"]
        stranger.send("h1/agent", b"with the former key")
        assert stranger.connections.get(timeout=20) == ("h1/agent", False, "refused")


def test_a_port_in_use_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        node = Node(
            "h/agent", run_folders={}, handler=print, on_link_failed=print, tcp_bind=endpoint, keys=Keys.create()
        )
        with pytest.raises(TransportError, match="Address already in use"):
            node.start()
        assert reader_threads() == []


def test_a_key_file_is_private_and_identical_for_racing_creators(tmp_path: Path) -> None:
    path = tmp_path / "new" / "job.key"
    results: queue.SimpleQueue[Keys] = queue.SimpleQueue()
    threads = [threading.Thread(target=lambda: results.put(Keys.load_or_create(path))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({results.get() for _ in threads}) == 1
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(path.parent) == ["job.key"]
    assert "secret" not in repr(Keys.load(path))
    assert Keys.from_text(Keys.load(path).to_text()) == Keys.load(path)


def test_a_key_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "job.key"
    Keys.load_or_create(path)
    path.chmod(0o644)
    with pytest.raises(TrustError, match="chmod 600"):
        Keys.load_or_create(path)


@pytest.mark.timeout(10)
def test_what_is_no_key_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "key", 0o600)
    (tmp_path / "link").symlink_to("key")
    for name, reason in (
        ("key", "not a file"),
        (".", "Is a directory"),
        ("link", "a link"),
        ("key/x", "ot a directory"),
    ):
        with pytest.raises(TrustError, match=reason):
            Keys.load_or_create(tmp_path / name)
    with pytest.raises(TrustError, match="no key file can be made"):
        Keys.load_or_create("/proc/job.key")


def test_a_damaged_key_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "job.key"
    path.touch(mode=0o600)
    for content in (b"", b"hello", b"monarch-nb key 1\nabc\ndef\n"):
        path.write_bytes(content)
        with pytest.raises(TrustError, match="not a monarch-nb key file"):
            Keys.load_or_create(path)


def test_heartbeats_notice_a_peer_that_vanished_without_a_word() -> None:
    keys = Keys.create()
    limits = Limits(heartbeat_ms=50, heartbeat_timeout_ms=200)
    a, b = agent("h1", keys, limits=limits), agent("h2", keys, limits=limits)

    proxy = Proxy(b.node.tcp_endpoint or "")
    a.node.learn("h2", proxy.endpoint)
    with ends(a, b):
        a.send("h2/agent")
        b.get()
        assert a.get_connection(up=True) == "h2/agent"
        proxy.swallow()
        assert a.get_connection(up=False) == "h2/agent"
    proxy.close()


def test_a_dead_connection_with_a_full_buffer_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """libzmq sends a heartbeat after all pending data, and misses its answer only once it was sent."""
    connect = sockets.connect

    def with_little_room(dealer: sockets.Socket, endpoint: str) -> None:
        dealer.setsockopt(zmq.SNDBUF, 1 << 15)
        connect(dealer, endpoint)

    monkeypatch.setattr(tcp, "connect", with_little_room)
    keys = Keys.create()
    limits = Limits(heartbeat_ms=500, heartbeat_timeout_ms=300)  # none leaves before the body is on its way
    a, b = agent("h1", keys, limits=limits), agent("h2", keys)
    proxy = Proxy(b.node.tcp_endpoint or "")
    proxy.narrow()
    a.node.learn("h2", proxy.endpoint)
    with ends(a, b):
        a.send("h2/agent")
        b.get()
        proxy.hold()
        for number in range(2):
            a.send("h2/agent", bytes(2 << 20), index=number)
        until(lambda: not a.node._links._peers["h2/agent", 0].up, 10)
        proxy.release()
        assert [b.get()[0].index for _ in range(2)] == [0, 1]
    proxy.close()


def test_libzmq_can_encrypt() -> None:
    assert zmq.has("curve")
