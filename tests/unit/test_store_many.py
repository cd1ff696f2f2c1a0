"""Ten thousand ranks: what the store tells of them, how often, and how much of it a page and a notebook's file get."""

import json
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from monarch_kernel.display import meshes as display
from monarch_kernel.views.widgets import SAVED_STATES, _part
from monarch_nb.shape import NDSlice, Region
from monarch_nb.store import ClusterState, MeshView, Store, kind_rows, kinds_text
from monarch_nb.store import events as e
from monarch_nb.store.activity import ActorSample
from monarch_nb.store.hub import RECORDS_PER_S, SEND_S

pytestmark = pytest.mark.timeout(60)

HOSTS = 1250
COUNT = 8 * HOSTS
PAGE = 200_000  # most bytes of static HTML of a mesh for a page
TEXT = 4_000


def spawned(hosts: int = HOSTS) -> e.MeshDescription:
    names = tuple(f"node{number:04d}" for number in range(hosts))
    return e.MeshDescription(
        uid="p", name="fleet", kind="procs", ranks=range(8 * hosts), labels=("hosts", "gpus"), sizes=(hosts, 8),
        strides=(8, 1), hosts=names, per_host=8, ready=True, at=1.0,
    )  # fmt: skip


def view_of(*events: e.Event, hosts: int = HOSTS) -> MeshView:
    cluster = ClusterState()
    for event in (spawned(hosts), *events):
        cluster.fold(event)
    view = cluster.mesh_view("p", Region(("hosts", "gpus"), NDSlice(0, (hosts, 8), (8, 1))), 100.0)
    assert view is not None
    return view


def busy(rank: int, endpoint: str = "step") -> e.ActivityChanged:
    return e.ActivityChanged("p", rank, 0, "busy", 2.0, endpoint)


def failed(rank: int, reason: str = "it ended by signal 9 (SIGKILL)") -> e.RankStateChanged:
    return e.RankStateChanged("p", rank, "failed", 0, 3.0, reason)


def test_equal_ranks_are_one_row_worst_first_with_their_positions() -> None:
    view = view_of(*(busy(rank) for rank in range(9_000)), *(failed(rank, "killed") for rank in (4242, 4243, 8001)))
    assert kind_rows(view) == [
        ("3", "failed", "killed", "hosts=530 gpus=2-3; hosts=1000 gpus=1 on node0530, node1000"),
        ("8,997", "busy", "step", ""),
        ("1,000", "idle", "", "hosts=1125-1249 gpus=0-7 on 125 hosts"),
    ]
    assert kinds_text(view).splitlines()[1].split() == ["8,997", "busy", "step"]


def test_long_lists_are_summed_up_without_omitting_a_rank() -> None:
    view = view_of(*(failed(rank, f"reason {rank} {'x' * 500}") for rank in range(3_000)))
    rows = kind_rows(view)
    assert len(rows) == 13
    assert rows[-1][2] == "2989 more kinds"
    assert sum(int(row[0].replace(",", "")) for row in rows) == COUNT
    assert len(kinds_text(view)) < TEXT


@pytest.mark.parametrize("hosts", [125, HOSTS, pytest.param(10 * HOSTS, marks=pytest.mark.slow)])
def test_static_html_of_many_ranks_is_by_hosts_and_bounded(hosts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    view = view_of(*(failed(rank, f"reason {rank} {'&' * 500}") for rank in range(100)), hosts=hosts)
    monkeypatch.setattr(display, "describe", lambda mesh: view)
    html = display.mesh_html(object())
    assert len(html.encode()) < PAGE
    assert html.count("<td") <= display.CELLS + 14 * 4
    assert "89 more kinds" in html
    assert "node0000: 8 failed" in html or "node0000 to" in html
    printed: list[str] = []
    display.mesh_text(object(), SimpleNamespace(text=printed.append), False)
    assert len("".join(printed)) < TEXT


def test_untouched_ranks_share_a_record_and_are_counted_right() -> None:
    cluster = ClusterState()
    silent = e.ResponsivenessChanged("p", 5, 50.0, 51.0)
    for event in (spawned(), busy(3), failed(4), silent, e.MeshEnded("p", "by you", 60.0)):
        cluster.fold(event)
        mesh = cluster._meshes.get("p")
        assert mesh is not None
        assert sum(cluster.document["meshes"]["p"]["counts"].values()) == COUNT
    assert mesh.ranks.silent == COUNT - 3
    assert {rank.shown for rank in mesh.ranks} == {"stopped"}


@pytest.mark.slow
def test_a_storm_of_events_becomes_few_bounded_messages_each_second() -> None:
    store, messages, stop = Store(), [], threading.Event()

    def listener(message: dict[str, Any]) -> None:
        messages.append((time.monotonic(), sum(map(len, message.get("patch", {}).get("ranks", {}).values()))))

    store.put(spawned())
    leave = store.watch(listener)
    began = time.monotonic()
    turn = 0
    while time.monotonic() - began < 0.6:
        turn += 1
        for rank in range(COUNT):
            store.put(busy(rank, f"step{turn}"))
    leave()
    store.close()
    stop.set()
    took = max(1.0, messages[-1][0] - began)
    deltas = messages[1:]
    assert deltas, "nothing was told"
    assert len(deltas) <= took / SEND_S + 1
    assert sum(records for _, records in deltas[:-1]) <= RECORDS_PER_S * took + COUNT


def test_counts_of_many_are_told_less_often() -> None:
    cell = SimpleNamespace(
        mesh="a", rank=0, incarnation=0, calls=0, errors=0, running=None, state="running", queued=lambda: ()
    )
    sample = ActorSample(0, 0.0)
    assert sample.take(cell, 0.1, 10.0) is not None
    cell.calls = 5
    assert sample.take(cell, 5.0, 10.0) is None
    report = sample.take(cell, 10.0, 10.0)
    assert report is not None
    assert report.calls == 5


def test_a_notebooks_file_gets_of_many_ranks_their_states_only() -> None:
    cluster = ClusterState()
    cluster.fold(spawned(5 * HOSTS))
    for rank in range(5 * COUNT):
        cluster.fold(e.Usage("p", rank, 0.5, 1 << 30))
        cluster.fold(busy(rank))
    for rank in range(0, 5 * COUNT, 100):
        cluster.fold(failed(rank))
    saved = _part(cluster.document, "p")["ranks"]["p"]
    assert saved["100"] == {"state": "failed"}
    assert len(saved) <= SAVED_STATES
    assert len(json.dumps(saved)) < 1_000_000


def test_a_finalizer_may_end_a_follower_while_the_lock_is_held() -> None:
    store, changes = Store(), list[object]()
    ends = [store.follow(changes.append, e.ActivityChanged) for _ in range(2)]
    with store._lock:
        ends[0]()
    store.put(busy(0))
    assert len(changes) == 1
