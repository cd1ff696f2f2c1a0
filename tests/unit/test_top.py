"""`monarch-nb top`: the store of a running controller in a terminal, read-only, for one rank and for ten thousand."""

import asyncio
import errno
import os
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from monarch_nb.cli import main
from monarch_nb.store import Store
from monarch_nb.store import events as e
from monarch_nb.top import connection as files
from monarch_nb.top.connection import Watching
from monarch_nb.top.rows import HEADS, ViewChoice, cells, rows, summary
from monarch_nb.top.server import StoreServer
from tests.polling import until

pytestmark = pytest.mark.timeout(60)


def spawned(hosts: int) -> e.MeshDescription:
    names = tuple(f"node{number:04d}" for number in range(hosts))
    return e.MeshDescription(
        uid="p", name="fleet", kind="procs", ranks=range(8 * hosts), labels=("hosts", "gpus"), sizes=(hosts, 8),
        strides=(8, 1), hosts=names, per_host=8, ready=True, at=1.0,
    )  # fmt: skip


def filled(hosts: int) -> Store:
    """A store that real events have filled: one failed rank, one that is busy for long, one that uses much."""
    store = Store()
    store.put(spawned(hosts))
    actors = e.MeshDescription(
        uid="a", name="trainers", kind="actors", ranks=range(8 * hosts), labels=("hosts", "gpus"), sizes=(hosts, 8),
        strides=(8, 1), actor_class="Trainer", on="p", ready=True, at=1.0,
    )  # fmt: skip
    for event in (
        actors,
        e.RankStateChanged("p", 5, "failed", 0, time.time() - 90, "it ended by signal 9 \x1b[31m(SIGKILL)"),
        e.ActivityChanged("a", 7, 0, "busy", time.time() - 30, "step", 0, 100, 12.5),
        e.ActivityChanged("a", 8, 0, "busy", time.time() - 3, "load"),
        e.Usage("p", 9, 0.75, 3 << 30),
        e.Usage("p", 10, 0.25, 1 << 30),
    ):
        store.put(event)
    return store


@pytest.fixture
def short_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Connection files are in a folder of the test's own: pytest's are too long for a socket."""
    with tempfile.TemporaryDirectory(prefix="mnb-") as folder:
        monkeypatch.setattr(files, "base_folder", lambda: Path(folder))
        yield


@pytest.fixture
def served(short_folder: None) -> Iterator[tuple[Store, StoreServer]]:
    store = filled(2)
    server = StoreServer(store, "the notebook train.ipynb")
    yield store, server
    server.close()
    store.close()


def watch(server: StoreServer) -> Watching:
    watching = Watching(files.read(server.path))
    assert watching.wait(10)
    return watching


# -- rows ----------------------------------------------------------------------------------------------


def test_ranks_are_rows_and_actors_are_seen_on_their_processes() -> None:
    table = rows(filled(2).document(), ViewChoice())
    assert len(table) == 16
    assert [row.place for row in table[:2]] == ["hosts=0 gpus=0", "hosts=0 gpus=1"]
    columns = dict(zip(HEADS, cells(table[7], time.time()), strict=True))
    assert (columns["host"], columns["state"], columns["what"], columns["for"], columns["calls/s"]) == (
        "node0000", "busy", "trainers.step", "30 s", "12.5",
    )  # fmt: skip
    columns = dict(zip(HEADS, cells(table[9], time.time()), strict=True))
    assert (columns["CPU"], columns["memory (Pss)"]) == ("75 %", "3.00 GB")


def test_text_of_a_rank_cannot_command_the_terminal() -> None:
    failed = rows(filled(2).document(), ViewChoice(query="failed"))
    assert [row.key for row in failed] == [("p", "node0000", 5)]
    assert cells(failed[0], 0)[4] == "it ended by signal 9  [31m(SIGKILL)"


@pytest.mark.parametrize(("sort", "first"), [("state", 5), ("cpu", 9), ("memory", 9), ("rate", 7)])
def test_rows_are_sorted_the_worst_and_the_most_first(sort: str, first: int) -> None:
    assert rows(filled(2).document(), ViewChoice(sort=sort))[0].key[2] == first


def test_words_find_ranks_as_in_the_displays() -> None:
    document = filled(4).document()

    def matches(query: str) -> list[int]:
        return [row.key[2] for row in rows(document, ViewChoice(query=query))]

    assert matches("busy") == [7, 8]
    assert matches("STEP hosts=0") == [7]
    assert matches("node0003 gpus=0:2") == [24, 25]
    assert matches("memory>2GB") == [9]
    assert matches("4-6 gpus=5:") == [5, 6]
    assert matches("nothing") == []


def test_ten_thousand_ranks_are_rows_by_host_within_bounded_time() -> None:
    document = filled(1250).document()
    began = time.process_time()
    table = rows(document, ViewChoice(sort="state"))
    assert time.process_time() - began < 1.0
    assert len(table) == 1250
    assert (table[0].host, table[0].stands_for, table[0].state) == ("node0000", 8, "failed")
    assert table[0].what.startswith("1 failed, 1 busy, 6 idle: it ended by signal 9")
    assert len(rows(document, ViewChoice(host="node0001"))) == 8
    assert summary(document) == "10,000 ranks on 1,250 hosts · 1 failed · 2 busy · 9,997 idle"


# -- the way from the controller ---------------------------------------------------------------------------------------


def test_a_holder_of_the_connection_file_sees_the_store_and_changes(served: tuple[Store, StoreServer]) -> None:
    store, server = served
    assert stat.S_IMODE(server.path.stat().st_mode) == 0o600
    assert [path for path, _ in files.connections()] == [server.path]
    watching = watch(server)
    assert len(rows(watching.document, ViewChoice(query="failed"))) == 1
    store.put(e.RankStateChanged("p", 6, "failed", 0, time.time(), "out of memory"))
    until(lambda: len(rows(watching.document, ViewChoice(query="failed"))) == 2)
    server.close()
    until(lambda: watching.over)
    assert "the notebook train.ipynb" in watching.over
    assert files.connections() == []


def test_without_the_secret_nothing_is_told(served: tuple[Store, StoreServer]) -> None:
    _, server = served
    for words in (b"wrong\n", b"x" * 10_000):
        with socket.socket(socket.AF_UNIX) as peer:
            peer.settimeout(10)
            peer.connect(files.read(server.path).socket)
            peer.sendall(words)
            try:
                assert peer.recv(1) == b""
            except ConnectionResetError:
                continue


def test_terminals_connect_after_a_lack_of_descriptors(served: tuple[Store, StoreServer]) -> None:
    _, server = served
    listening, errors = server._listening, [OSError(errno.EMFILE, "Too many open files")] * 2

    def accept() -> tuple[socket.socket, Any]:
        if errors:
            raise errors.pop()
        return listening.accept()

    server._listening = cast("socket.socket", SimpleNamespace(accept=accept))
    try:
        for _ in range(2):  # the first is accepted by the call under way
            watch(server).close()
    finally:
        server._listening = listening
    assert errors == []


def test_a_file_that_others_can_read_is_not_used(served: tuple[Store, StoreServer]) -> None:
    _, server = served
    os.chmod(server.path, 0o644)
    with pytest.raises(PermissionError, match="others"):
        files.read(server.path)


def test_messages_from_a_watcher_change_nothing(served: tuple[Store, StoreServer]) -> None:
    store, server = served
    watching = watch(server)
    before = store.document()["meshes"]
    watching._peer.sendall(b'{"type":"request","verb":"stop","mesh":"p"}\n' * 100)
    store.put(e.RankStateChanged("p", 6, "failed", 0, time.time(), "out of memory"))
    until(lambda: len(rows(watching.document, ViewChoice(query="failed"))) == 2)
    assert store.document()["meshes"].keys() == before.keys()
    watching.close()


def test_a_stalled_terminal_delays_nobody_and_catches_up_later(
    served: tuple[Store, StoreServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    from monarch_nb.top import server as serving

    monkeypatch.setattr(serving, "MOST_WAITING", 20_000)
    store, server = served
    connection = files.read(server.path)
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(10)
        peer.connect(connection.socket)
        peer.sendall(f"{connection.secret}\n".encode())
        until(lambda: store._watchers)
        for turn in range(40):
            for rank in range(16):
                store.put(e.ActivityChanged("a", rank, 0, "busy", 1.0, f"{'x' * 1000}{turn}"))
            until(lambda: not store._events)
        store.put(e.RankStateChanged("p", 6, "failed", 0, time.time(), "the newest"))
        text = b""
        while b"the newest" not in text:
            more = peer.recv(65536)
            assert more
            text += more


def test_the_table_is_written_once_as_text(
    served: tuple[Store, StoreServer], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", "--once", "--find", "busy", "--sort", "since"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("16 ranks on 2 hosts")
    assert [line.split()[0] for line in lines[2:]] == ["node0000", "node0001"]
    assert main(["top", "--list"]) == 0
    assert "the notebook train.ipynb" in capsys.readouterr().out
    served[1].close()
    assert main(["top", "--once"]) == 1
    assert "monarch.top.serve()" in capsys.readouterr().err


def test_the_table_has_what_processes_measure_once_somebody_looks(
    served: tuple[Store, StoreServer], capsys: pytest.CaptureFixture[str]
) -> None:
    store, _ = served

    def measure() -> None:
        until(lambda: store._watchers)
        for rank in range(16):
            store.put(e.Usage("p", rank, 0.5, 1 << 30))

    measuring = threading.Thread(target=measure)
    measuring.start()
    assert main(["top", "--once", "--find", "cpu>40%"]) == 0
    measuring.join()
    assert len(capsys.readouterr().out.splitlines()) == 2 + 16


# -- the terminal ------------------------------------------------------------------------------------------------------


def drive(store: Store, steps: Any) -> None:
    """Runs the application on a store, without a terminal; `steps(app, pilot)` plays the user."""
    pytest.importorskip("textual")
    from monarch_nb.top.app import Top

    server = StoreServer(store)
    try:
        app = Top(watch(server))

        async def play() -> None:
            async with app.run_test(size=(140, 30)) as pilot:
                await pilot.pause()
                await steps(app, pilot)

        asyncio.run(play())
    finally:
        server.close()
        store.close()


def test_keys_sort_find_open_a_host_and_come_back(short_folder: None) -> None:

    async def steps(app: Any, pilot: Any) -> None:
        assert len(app.table.rows) == 1250
        await pilot.press("s")
        assert app.look.sort == "state"
        assert app.table.chosen.host == "node0000"
        await pilot.press("enter")
        assert len(app.table.rows) == 8
        await pilot.press("escape", "slash", *"busy", "enter")
        assert [row.what for row in app.table.rows] == ["trainers.step", "trainers.load"]
        await pilot.press("end")
        assert app.table.cursor == 1
        await pilot.press("escape", "h")
        assert len(app.table.rows) == 10_000
        await pilot.press("end", "pageup")
        assert app.table.cursor > 9_900
        shown = "\n".join(strip.text for strip in app.table.render_lines(app.table.size.region))
        assert shown.count("\n") < 30

    drive(filled(1250), steps)


def test_a_storm_of_changes_is_looked_at_twice_a_second(short_folder: None) -> None:
    store = filled(2)

    async def steps(app: Any, pilot: Any) -> None:
        began, looked = time.monotonic(), app.looks
        while time.monotonic() - began < 1.5:
            for rank in range(16):
                store.put(e.ActivityChanged("a", rank, 0, "busy", 1.0, f"step{time.monotonic_ns()}"))
            await pilot.pause(0.01)
        assert app.watching.version > 5
        assert app.looks - looked <= (time.monotonic() - began) / 0.5 + 1

    drive(store, steps)
