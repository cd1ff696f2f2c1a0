import os
import queue
import threading
from pathlib import Path

import pytest

from monarch_nb.routing.actions import LinkConfig
from monarch_nb.transport import Node, Parcel, ThreadClock, TransportError, TrustError
from monarch_nb.wire.header import Header, Kind
from tests.unit.transport_tools import End, ends, reader_threads, run_folder, settled

pytestmark = pytest.mark.timeout(60)


def test_messages_arrive_whole_and_in_order_both_ways() -> None:
    with run_folder() as folder:
        a, b = End("h/a", folder), End("h/b", folder)
        with ends(a, b):
            for number in range(500):
                a.send("h/b", b"pickle", b"x" * number, index=number, method="m", call="c")
                b.send("h/a", str(number).encode(), index=number)
            for number in range(500):
                header, frames = b.get()
                assert (header.index, header.method, header.call, header.src) == (number, "m", "c", "h/a")
                assert [bytes(frame) for frame in frames] == [b"pickle", b"x" * number]
                header, frames = a.get()
                assert (header.index, frames) == (number, [str(number).encode()])
            settled(a, b)
        assert a.failed.empty()
        assert b.failed.empty()


def test_many_threads_share_a_link_without_mixing_messages() -> None:
    with run_folder() as folder:
        a, b = End("h/a", folder), End("h/b", folder)
        with ends(a, b):

            def run(thread: int) -> None:
                for number in range(200):
                    a.send("h/b", b"%d" % thread, b"%d" % number, b"%d:%d" % (thread, number), sender=str(thread))

            threads = [threading.Thread(target=run, args=(thread,)) for thread in range(4)]
            for thread in threads:
                thread.start()
            latest: dict[int, int] = {}
            for _ in range(800):
                _, frames = b.get()
                sender, number = int(frames[0]), int(bytes(frames[1]))
                assert bytes(frames[2]) == b"%d:%d" % (sender, number)
                assert latest.get(sender, -1) == number - 1
                latest[sender] = number
            for thread in threads:
                thread.join()


def test_a_message_to_oneself_is_handled_like_any_other() -> None:
    with run_folder() as folder:
        a = End("h/a", folder)
        with ends(a):
            a.send("h/a", b"p", b"buffer")
            _, frames = a.get()
            assert frames[0] == b"p"
            frames[1][0:1] = b"B"
            assert bytes(frames[1]) == b"Buffer"


def test_senders_may_change_a_buffer_after_the_snapshot_and_receivers_theirs() -> None:
    with run_folder() as folder:
        a, b, c = End("h/a", folder), End("h/b", folder), End("h/c", folder)
        with ends(a, b, c):
            for size in (10, 100_000, 1_000_000):
                data = bytearray(b"\1" * size)
                parcel = a.node.snapshot([b"p", data])
                data[:] = b"\2" * size
                for dst in ("h/b", "h/c"):
                    a.node.send(Header(Kind.CALL, dst, "h/a"), parcel)
                parcel.close()
                for end in (b, c):
                    _, (_, view) = end.get()
                    assert not view.readonly
                    assert bytes(view) == b"\1" * size
                    view[:] = b"\3" * size  # legal, and nobody else sees it


def test_a_full_window_blocks_the_sender_until_the_receiver_consumes() -> None:
    config = LinkConfig(window=1 << 20)
    with run_folder() as folder:
        a, b = End("h/a", folder, config=config), End("h/b", folder, consume=False, config=config)
        with ends(a, b):
            sent: queue.SimpleQueue[int] = queue.SimpleQueue()

            def run() -> None:
                for number in range(40):
                    a.send("h/b", b"x" * 100_000)
                    sent.put(number)

            thread = threading.Thread(target=run)
            thread.start()
            arrived = [b.inbox.get(timeout=20) for _ in range(10)]
            with pytest.raises(queue.Empty):
                b.inbox.get(timeout=0.5)
            assert sent.qsize() == 10
            a.send("h/b", b"r" * 300_000, kind=Kind.REPLY)  # replies never wait: whoever gives credits may wait for one
            assert b.inbox.get(timeout=20)[0].kind == Kind.REPLY
            for _ in range(30):
                b.node.consumed(arrived.pop()[1])
                arrived.append(b.inbox.get(timeout=20))
            thread.join(20)
            assert not thread.is_alive()


def test_the_urgent_lane_overtakes_a_blocked_one() -> None:
    config = LinkConfig(window=1 << 10)
    with run_folder() as folder:
        a, b = End("h/a", folder, config=config), End("h/b", folder, consume=False, config=config)
        with ends(a, b):
            a.send("h/b", b"x" * 2000)
            thread = threading.Thread(target=lambda: a.send("h/b", b"waits"))
            thread.start()
            a.send("h/b", b"stop", lane=1)
            got = [b.inbox.get(timeout=20)[1] for _ in range(2)]
            assert {parcel.frames[0] for parcel in got} == {b"x" * 2000, b"stop"}
            for parcel in got:
                b.node.consumed(parcel)
            assert b.get()[1] == [b"waits"]
            thread.join(20)


def test_a_process_that_begins_receives_what_waits_for_it_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("monarch_nb.transport.connection._FIRST_PAUSE", 1000.0)
    monkeypatch.setattr("monarch_nb.transport.connection._LAST_PAUSE", 1000.0)
    with run_folder() as folder:
        a = End("h/a", folder)
        with ends(a):
            a.send("h/b", b"data")
            a.send("h/b", b"urgent", lane=1)  # both were refused, and are not tried again by themselves
            b = End("h/b", folder)
            with ends(b):
                b.node.begin("h/a")
                assert {b.get()[1][0], b.get()[1][0]} == {b"data", b"urgent"}
                settled(a, b)


def test_beginning_with_a_process_that_is_gone_changes_nothing() -> None:
    with run_folder() as folder:
        a = End("h/a", folder)
        with ends(a):
            a.node.begin("h/gone")
            a.node.begin("elsewhere/agent")
            a.send("h/a", b"p")
            assert a.get()[1] == [b"p"]
        assert a.failed.empty()


def test_forgetting_a_dead_process_reports_what_it_never_acknowledged() -> None:
    with run_folder() as folder:
        a = End("h/a", folder)
        with ends(a):
            a.send("h/b", b"p", b"body", port=7)
            a.node.forget("h/b", "killed by signal 9")
            header, parcel, reason = a.failed.get(timeout=20)
            assert (header.port, reason) == (7, "killed by signal 9")
            assert [bytes(frame) for frame in parcel.frames] == [b"p", b"body"]
            with pytest.raises(TransportError, match="h/b cannot be reached: killed by signal 9"):
                a.send("h/b", b"again")


def test_forgetting_a_dead_process_frees_a_sender_that_waits_for_it() -> None:
    config = LinkConfig(window=1 << 10)
    with run_folder() as folder:
        a, b = End("h/a", folder, config=config), End("h/b", folder, consume=False, config=config)
        with ends(a, b):
            a.send("h/b", b"x" * 2000)
            b.get()
            errors: queue.SimpleQueue[BaseException] = queue.SimpleQueue()

            def run() -> None:
                try:
                    a.send("h/b", b"y" * 2000)
                except TransportError as error:
                    errors.put(error)

            thread = threading.Thread(target=run)
            thread.start()
            a.node.forget("h/b", "it died")
            assert "it died" in str(errors.get(timeout=20))
            thread.join()


def test_a_process_back_at_its_address_is_a_new_incarnation() -> None:
    with run_folder() as folder:
        a, b = End("h/a", folder), End("h/b", folder)
        with ends(a):
            a.send("h/b", b"1")
            assert b.get()[1] == [b"1"]
            b.send("h/a", b"2")
            assert a.get()[1] == [b"2"]
            b.node.close()
            successor = End("h/b", folder)
            with ends(successor):
                successor.send("h/a", b"3")
                assert a.get()[1] == [b"3"]
                a.send("h/b", b"4")
                assert successor.get()[1] == [b"4"]


def test_without_a_way_the_error_names_the_destination() -> None:
    with run_folder() as folder:
        a = End("h/a", folder)
        with ends(a), pytest.raises(TransportError, match="elsewhere/b"):
            a.send("elsewhere/b", b"x")


def test_closing_leaves_no_socket_file_and_no_thread() -> None:
    with run_folder() as folder:
        before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
        a, b = End("h/a", folder), End("h/b", folder)
        a.send("h/b", b"x")
        b.get()
        assert sorted(os.listdir(folder)) == ["a", "b"]
        a.node.close()
        b.node.close()
        assert os.listdir(folder) == []
        assert reader_threads() == []
        if before:
            assert len(os.listdir("/proc/self/fd")) <= before + 1
        with pytest.raises(TransportError, match="closed"):
            a.send("h/b", b"x")


def test_messages_sent_before_closing_still_arrive() -> None:
    with run_folder() as folder:
        a, b = End("h/a", folder), End("h/b", folder)
        with ends(b):
            for _ in range(1000):
                a.send("h/b", b"x" * 10_000)
            a.node.close(10)
            for _ in range(1000):
                b.get()
            assert a.failed.empty()


def test_an_error_in_the_handler_does_not_stop_the_reader(caplog: pytest.LogCaptureFixture) -> None:
    with run_folder() as folder:
        indices: queue.SimpleQueue[int] = queue.SimpleQueue()

        def handle(header: Header, parcel: object) -> None:
            indices.put(header.index)
            raise ZeroDivisionError

        node = Node("h/b", run_folders={"h": folder}, handler=handle, on_link_failed=lambda *_: None)
        node.start()
        a = End("h/a", folder)
        with ends(a):
            a.send("h/b", index=1)
            a.send("h/b", index=2)
            assert [indices.get(timeout=20), indices.get(timeout=20)] == [1, 2]
        node.close()
        assert "ZeroDivisionError" in caplog.text


def test_a_finalizer_that_sends_during_a_send_is_deferred() -> None:
    from monarch_nb.transport.interrupts import uninterrupted

    with run_folder() as folder:
        a, b = End("h/a", folder), End("h/b", folder)
        with ends(a, b):
            uninterrupted(lambda: a.send("h/b", b"from a finalizer"))
            assert b.get()[1] == [b"from a finalizer"]


def test_a_handler_may_answer_at_once_on_the_reader_thread() -> None:
    from monarch_nb.transport import interrupts

    with run_folder() as folder:
        deferred: queue.SimpleQueue[bool] = queue.SimpleQueue()

        def handle(header: Header, parcel: Parcel) -> None:
            deferred.put(interrupts.inside())
            node.send(Header(Kind.REPLY, header.src, "h/b"), parcel)
            node.consumed(parcel)

        node = Node("h/b", run_folders={"h": folder}, handler=handle, on_link_failed=lambda *_: None)
        node.start()
        a = End("h/a", folder)
        with ends(a):
            a.send("h/b", b"echo")
            assert a.get()[1] == [b"echo"]
            assert deferred.get() is False
        node.close()


def test_a_run_folder_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    open_to_all = tmp_path / "r"
    open_to_all.mkdir(mode=0o755)
    node = Node("h/a", run_folders={"h": open_to_all}, handler=lambda *_: None, on_link_failed=lambda *_: None)
    with pytest.raises(TrustError, match="can be entered by others"):
        node.start()
    assert reader_threads() == []


def test_a_run_folder_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "r").symlink_to(tmp_path / "real")
    node = Node("h/a", run_folders={"h": tmp_path / "r"}, handler=lambda *_: None, on_link_failed=lambda *_: None)
    with pytest.raises(TrustError, match="not a folder"):
        node.start()


def test_a_run_folder_is_made_private() -> None:
    with run_folder() as folder:
        a = End("h/a", folder / "new")
        with ends(a):
            assert (folder / "new").stat().st_mode & 0o777 == 0o700


def test_a_path_too_long_for_a_socket_is_said() -> None:
    with run_folder() as folder:
        long = folder / ("x" * 90)
        node = Node("h/a", run_folders={"h": long}, handler=lambda *_: None, on_link_failed=lambda *_: None)
        with pytest.raises(TransportError, match="too long"):
            node.start()


def test_a_delay_that_no_platform_can_sleep_leaves_the_clock_running() -> None:
    clock = ThreadClock()
    clock.later(1e11, threading.Event().set)
    for _ in range(3):
        ran = threading.Event()
        clock.later(0.05, ran.set)
        assert ran.wait(20)
    clock.close()
