import multiprocessing
import os
import resource
import threading
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from monarch_nb.transport import DescriptorLimitError, Node, TransportError, reader
from tests.polling import until
from tests.unit.transport_tools import End, ends, reader_threads, run_folder, settled, starved

pytestmark = pytest.mark.timeout(60)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts descriptors in /proc")
def test_without_descriptors_a_connection_is_refused_and_none_half_open() -> None:
    with run_folder() as folder:
        a, b = End("h/a", folder), End("h/b", folder)
        with ends(a, b):
            a.send("h/b", b"x")
            b.get()
            settled(a)  # the peer has dialled back, and we have let it in: no descriptor comes or goes by itself
            counts = []
            for _ in range(3):
                with starved(0), pytest.raises(DescriptorLimitError, match=r"h/c|LimitNOFILE"):
                    a.send("h/c", b"x")
                for leaving in range(6):
                    with starved(leaving), pytest.raises(DescriptorLimitError):
                        Node("h/d", run_folders={"h": folder}, handler=print, on_link_failed=print).start()
                counts.append(open_descriptors())
            assert counts[2] <= counts[1]
            a.send("h/b", b"still")
            assert b.get()[1] == [b"still"]
            c = End("h/c", folder)
            with ends(c):
                a.send("h/c", b"now")
                assert c.get()[1] == [b"now"]


@pytest.mark.parametrize("leaving", range(6))
def test_a_node_without_descriptors_says_so_and_leaves_nothing(leaving: int) -> None:
    with run_folder() as folder:
        node = Node("h/a", run_folders={"h": folder}, handler=print, on_link_failed=print)
        with starved(leaving), pytest.raises(DescriptorLimitError, match="ulimit -n"):
            node.start()
        assert reader_threads() == []
        assert os.listdir(folder) == []


def in_child(end: End, folder: Path, pipe: Connection) -> None:
    try:
        end.send("h/b", b"from the child")
        pipe.send("sent")
    except TransportError as error:
        pipe.send(str(error))
    end.node.close()
    own = End("h/child", folder)
    own.send("h/b", b"from the child's own node")
    own.node.close(5)
    pipe.send("done")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_a_forked_child_cannot_use_inherited_connections_but_its_own() -> None:
    context = multiprocessing.get_context("fork")
    with run_folder() as folder:
        a, b = End("h/a", folder), End("h/b", folder)
        with ends(a, b):
            a.send("h/b", b"before")
            b.get()
            receiver, sender = context.Pipe()
            child = context.Process(target=in_child, args=(a, folder, sender))
            child.start()
            assert receiver.poll(30)
            assert "forked" in receiver.recv()
            assert b.get()[1] == [b"from the child's own node"]
            assert receiver.poll(30)
            assert receiver.recv() == "done"
            child.join()
            assert child.exitcode == 0
            a.send("h/b", b"after")
            assert b.get()[1] == [b"after"]


@pytest.mark.slow
def test_a_thousand_peers_at_a_time_are_possible() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 8000:
        pytest.skip("needs 8000 descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 8000), hard))
    try:
        with run_folder() as folder:
            a = End("h/a", folder)
            with ends(a):
                for n in range(1100):  # libzmq's own limit is 1023 sockets
                    a.send(f"h/p{n}", b"x")
                p = End("h/p1099", folder)
                with ends(p):
                    assert p.get()[1] == [b"x"]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_an_idle_node_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reader._RECENT == 5.0
    monkeypatch.setattr(reader, "_RECENT", 0.2)
    before = threading.active_count()  # other tests may have left some
    with run_folder() as folder:
        a, b = End("h/a", folder), End("h/b", folder)
        with ends(a, b):
            a.send("h/b", b"x")
            b.get()
            until(lambda: a.node._reader.deep and b.node._reader.deep, 30)
            a.send("h/b", b"wake")
            assert b.get()[1] == [b"wake"]
            assert threading.active_count() - before < 10
