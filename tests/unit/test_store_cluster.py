"""The reducer behind all views: what it shows of events, and that snapshots with deltas always give the same."""

import copy
import json
from collections import Counter

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch_nb.shape import NDSlice, Region
from monarch_nb.store import ClusterState, MeshView, apply
from monarch_nb.store import events as e
from monarch_nb.store.failures import record
from monarch_nb.supervision import Cause, MeshFailure

PROCS = e.MeshDescription(
    uid="p1",
    name="workers",
    kind="procs",
    ranks=range(4),
    labels=("gpus",),
    sizes=(4,),
    strides=(1,),
    hosts=("h1", "h2"),
    per_host=2,
    at=1.0,
)
ACTORS = e.MeshDescription(
    uid="a1",
    name="trainers",
    kind="actors",
    ranks=(1, 3),
    labels=("gpus",),
    sizes=(2,),
    offset=1,
    strides=(2,),
    actor_class="Trainer",
    on="p1",
    at=2.0,
)


def cluster(*events: e.Event) -> ClusterState:
    store = ClusterState()
    for event in (PROCS, ACTORS, e.MeshReady("p1", 3.0), e.MeshReady("a1", 4.0), *events):
        store.fold(event)
    return store


def state(store: ClusterState, uid: str, index: int) -> str:
    document = store.document
    default = document["meshes"][uid]["state"]
    return str(document["ranks"][uid].get(str(index), {}).get("state", default))


def test_ranks_start_and_are_idle_once_their_mesh_is_ready() -> None:
    store = ClusterState()
    store.fold(PROCS)
    store.fold(e.ProcessStarted("p1", 2, 77, 1.5))
    assert store.document["meshes"]["p1"]["counts"] == {"starting": 4}
    store.fold(e.MeshReady("p1", 2.0))
    assert store.document["meshes"]["p1"]["counts"] == {"idle": 4}
    assert store.document["ranks"]["p1"] == {"2": {"pid": 77}}


def test_a_proc_is_busy_with_what_an_actor_on_it_does() -> None:
    store = cluster(e.ActivityChanged("a1", 3, 0, "busy", 5.0, "step", queue=2, calls=7))
    assert store.document["ranks"]["a1"]["1"] == {
        "state": "busy",
        "since": 5.0,
        "endpoint": "step",
        "queue": 2,
        "calls": 7,
    }
    assert store.document["ranks"]["p1"]["3"] == {"state": "busy", "since": 5.0, "endpoint": "trainers.step"}
    store.fold(e.ActivityChanged("a1", 3, 0, "idle", 6.0, calls=8))
    assert (state(store, "a1", 1), state(store, "p1", 3)) == ("idle", "idle")
    assert store.document["meshes"]["a1"]["counts"] == {"idle": 2}


def test_a_proc_of_tensors_shows_its_work_without_library_names() -> None:
    workers = msgspec.structs.replace(ACTORS, uid="w1", name="trainers_workers", ready=True, inner=True)
    store = cluster(workers, e.ActivityChanged("w1", 3, 0, "busy", 5.0, "batch"))
    assert store.document["ranks"]["p1"]["3"] == {"state": "busy", "since": 5.0, "endpoint": "operations on tensors"}


def test_called_ranks_are_busy_until_their_answer_despite_process_reports() -> None:
    store = cluster(e.CallPending("a1", 3, 0, 5.0, "step"))
    assert store.document["ranks"]["a1"]["1"] == {"state": "busy", "since": 5.0, "endpoint": "step"}
    assert store.document["ranks"]["p1"]["3"] == {"state": "busy", "since": 5.0, "endpoint": "trainers.step"}
    store.fold(e.ActivityChanged("a1", 3, 0, "idle", 5.1, calls=7))  # after the call before
    assert (state(store, "a1", 1), state(store, "p1", 3)) == ("busy", "busy")
    store.fold(e.ActivityChanged("a1", 3, 0, "busy", 5.2, "step", calls=8))
    store.fold(e.CallPending("a1", 3, 0, 6.0))
    assert (state(store, "a1", 1), state(store, "p1", 3)) == ("idle", "idle"), "the report of the end is not there yet"
    store.fold(e.ActivityChanged("a1", 3, 0, "busy", 6.1, "save", calls=9))
    store.fold(e.CallPending("a1", 3, 0, 6.2, "step"))
    store.fold(e.CallPending("a1", 3, 0, 6.3))
    assert (state(store, "a1", 1), state(store, "p1", 3)) == ("busy", "busy"), "with the call of somebody else"
    store.fold(e.CallPending("p1", 1, 0, 7.0, "cell"))
    assert state(store, "p1", 1) == "busy", "cells run in the process itself"


def test_an_unresponsive_proc_and_its_actors_stay_so_until_it_answers() -> None:
    store = cluster(e.ActivityChanged("a1", 1, 0, "busy", 5.0, "step"), e.ResponsivenessChanged("p1", 1, 6.0, 6.5))
    assert (state(store, "p1", 1), state(store, "a1", 0)) == ("unresponsive", "unresponsive")
    assert store.document["ranks"]["a1"]["0"]["since"] == 6.0
    store.fold(e.ResponsivenessChanged("p1", 1, None, 9.0))
    assert (state(store, "p1", 1), state(store, "a1", 0)) == ("busy", "busy")


def test_a_preemption_notice_lasts_until_the_host_is_lost_or_stays() -> None:
    store = cluster(e.HostSeen("h1", notice="Slurm job 7 has reached its time limit", until=130.0))
    region = Region(("gpus",), NDSlice(0, (4,), (1,)))

    def notices(now: float) -> tuple[str, ...]:
        view = store.mesh_view("p1", region, now)
        assert view is not None
        return view.notices

    assert notices(100.0) == ("Host h1 is about to be taken away (Slurm job 7 has reached its time limit), in 30 s",)
    assert store.document["hosts"]["h1"]["until"] == 130.0
    store.fold(e.HostSeen("h1", why="it cannot be reached"))
    assert (notices(100.0), "notice" in store.document["hosts"]["h1"]) == ((), False)


def test_new_incarnations_are_responsive_though_the_old_end_went_unseen() -> None:
    store = cluster(e.ResponsivenessChanged("p1", 1, 6.0, 6.5), e.RankStateChanged("p1", 1, "alive", 1, 8.0))
    assert (state(store, "p1", 1), state(store, "a1", 0)) == ("idle", "idle")


def test_a_failed_rank_is_healing_then_idle_in_its_next_incarnation() -> None:
    store = cluster(
        e.ActivityChanged("a1", 1, 0, "busy", 5.0, "step"),
        e.RankStateChanged("p1", 1, "failed", 0, 6.0, "it ended by signal 9 (SIGKILL)", "7"),
        e.RankStateChanged("a1", 1, "failed", 0, 6.0, "it ended by signal 9 (SIGKILL)", "7"),
    )
    assert store.document["ranks"]["p1"]["1"]["detail"] == "it ended by signal 9 (SIGKILL)"
    assert store.document["meshes"]["p1"]["counts"] == {"idle": 3, "failed": 1}
    store.fold(e.RankStateChanged("p1", 1, "healing", 1, 7.0))
    store.fold(e.RankStateChanged("p1", 1, "alive", 1, 8.0))
    assert store.document["meshes"]["p1"]["counts"] == {"idle": 4}
    assert store.document["ranks"]["p1"]["1"] == {"incarnation": 1}
    store.fold(e.ActivityChanged("p1", 1, 0, "busy", 9.0, "cell"))  # of the old incarnation: too late
    assert state(store, "p1", 1) == "idle"


def test_an_actor_in_the_debugger_is_paused_with_its_proc() -> None:
    store = cluster(e.SessionOpened("s1", "a1", 3, 5.0, {"file": "train.py", "line": 42}))
    assert (state(store, "a1", 1), state(store, "p1", 3)) == ("paused", "paused")
    assert store.document["sessions"]["s1"] == {"mesh": "a1", "rank": 1, "since": 5.0, "file": "train.py", "line": 42}
    store.fold(e.SessionClosed("s1", 6.0))
    assert (state(store, "a1", 1), state(store, "p1", 3)) == ("idle", "idle")
    assert store.document["sessions"] == {}


def test_a_stopped_mesh_is_stopped_whole_and_forgotten_later() -> None:
    store = cluster(e.ActivityChanged("a1", 3, 0, "busy", 5.0, "step"), e.MeshEnded("a1", "stopped by %stop", 6.0))
    assert store.document["meshes"]["a1"]["counts"] == {"stopped": 2}
    assert store.document["meshes"]["a1"]["stopped"] == "stopped by %stop"
    assert state(store, "p1", 3) == "idle"
    store.fold(e.MeshForgotten("a1"))
    assert list(store.document["meshes"]) == list(store.document["ranks"]) == ["p1"]


def test_a_detached_mesh_lives_again_when_this_process_returns() -> None:
    store = cluster(
        e.MeshEnded("a1", "detached for 1h", 6.0, failed=True), e.MeshEnded("p1", "detached for 1h", 6.0, failed=True)
    )
    store.take()
    for spawned in (PROCS, ACTORS):
        store.fold(msgspec.structs.replace(spawned, ready=True, at=7.0))
    assert store.document["meshes"]["a1"]["counts"] == {"idle": 2}
    patch = store.take()["meshes"]["a1"]
    assert (patch["ended"], patch["stopped"]) == (None, None)  # for views, which have them still
    store.fold(e.SessionOpened("s1", "a1", 3, 8.0, {"file": "train.py", "line": 42}))
    assert (state(store, "p1", 3), state(store, "a1", 1)) == ("paused", "paused")


def test_when_nobody_watches_any_more_what_workers_told_is_dropped() -> None:
    store = cluster(
        e.ActivityChanged("a1", 3, 0, "busy", 5.0, "step", queue=3, calls=9, rate=2.0),
        e.Usage("p1", 3, 0.5, 10_000_000),
    )
    store.fold(e.WatchersLeft(8.0))
    assert store.document["ranks"] == {"p1": {"3": {}}, "a1": {"1": {"calls": 9}}}


def test_a_failure_names_its_ranks_and_who_was_told() -> None:
    store = cluster(e.MeshFailed("7", "a1", (3,), {"title": "trainers at gpus=1 died", "cause": "signal"}))
    store.fold(e.OwnerNotified("7", "<root>", "shown"))
    store.fold(e.FailureStateChanged("7", "healed", 9.0))
    assert store.document["failures"]["7"] == {
        "mesh": "a1",
        "ranks": [1],
        "told": [["<root>", "shown"]],
        "state": "healed",
        "ended": 9.0,
        "title": "trainers at gpus=1 died",
        "cause": "signal",
    }


# -- properties --------------------------------------------------------------------------------------------------------

UIDS = ("p1", "a1", "a2", "none")
times = st.floats(1, 100).map(lambda number: round(number, 2))
uids = st.sampled_from(UIDS)
ranks = st.integers(0, 4)
lives = st.integers(0, 2)
names = st.sampled_from(["1", "2", "3"])


def failed(number: str, uid: str, rank: int, time: float, status: int) -> e.MeshFailed:
    cause = Cause(kind="exit", exitcode=status, pid=rank, at=time)
    failure = MeshFailure(mesh_name=uid, mesh_uid=uid, cause=cause, extent=(("gpus",), (4,)), places=(0,))
    return e.MeshFailed(number, uid, (rank,), record(failure, time), failure)


EVENTS = st.one_of(
    st.sampled_from(
        [
            PROCS,
            ACTORS,
            e.MeshDescription(uid="a2", name="others", kind="actors", ranks=range(1, 3), on="p1", ready=True, at=3.0),
        ]
    ),
    st.builds(e.ProcessStarted, uids, ranks, st.integers(1, 99), times),
    st.builds(e.MeshReady, uids, times),
    st.builds(
        e.RankStateChanged,
        uids,
        ranks,
        st.sampled_from(["alive", "failed", "healing", "stopped"]),
        lives,
        times,
        st.sampled_from(["", "died"]),
        st.sampled_from(["", "1"]),
    ),
    st.builds(e.MeshEnded, uids, st.just("stopped"), times, st.booleans()),
    st.builds(e.MeshForgotten, uids),
    st.builds(e.ResponsivenessChanged, uids, ranks, st.none() | times, times),
    st.builds(
        e.ActivityChanged,
        uids,
        ranks,
        lives,
        st.sampled_from(["idle", "busy"]),
        times,
        st.sampled_from(["step", "save"]),
        st.integers(0, 2),
        st.integers(0, 2),
    ),
    st.builds(e.Usage, uids, ranks, st.floats(0, 2), st.integers(0, 9), st.just(-1.0), st.integers(0, 3), st.just(3)),
    st.builds(e.WatchersLeft, times),
    st.builds(e.MeshFailed, names, uids, st.tuples(ranks), st.just({"title": "it died", "pid": None})),
    st.builds(failed, names, uids, ranks, st.sampled_from([1.0, 2.0, 9.0]), st.sampled_from([7, 8])),
    st.builds(e.OwnerNotified, names, st.just("<root>"), st.just("asked")),
    st.builds(e.FailureStateChanged, names, st.sampled_from(["open", "healing", "healed"]), times),
    st.builds(e.SessionOpened, names, uids, ranks, times, st.sampled_from([{"line": 1}, {"file": "a.py"}])),
    st.builds(e.SessionClosed, names, times),
    st.builds(e.HostSeen, st.sampled_from(["h1", "h3"]), st.just(""), st.sampled_from(["", "unplugged"])),
    st.builds(e.DetachedMesh, names, st.sampled_from([{}, {"name": "w"}, {"until": 2.0}])),
)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(EVENTS, st.integers(0, 3)), max_size=40))
def test_any_snapshot_with_the_deltas_after_it_gives_the_state(steps: list[tuple[e.Event, int]]) -> None:
    store = ClusterState()
    views: list[dict[str, object]] = []  # views that came at different times, delta by delta
    for event, action in steps:
        store.fold(event)
        if not action:
            continue
        patch = json.loads(json.dumps(store.take()))
        for view in views:
            apply(view, copy.deepcopy(patch))
        if action == 2:
            views.append(copy.deepcopy(store.document))
    last = store.take()
    for view in views:
        assert apply(view, copy.deepcopy(last)) == store.document


@settings(deadline=None, max_examples=200)
@given(st.lists(EVENTS, max_size=40))
def test_counts_of_a_mesh_are_those_of_its_ranks(events: list[e.Event]) -> None:
    store = ClusterState()
    for event in events:
        store.fold(event)
    for uid, mesh in store.document["meshes"].items():
        size = {"p1": 4, "a1": 2, "a2": 2}[uid]
        shown = Counter(state(store, uid, index) for index in range(size))
        assert mesh["counts"] == shown
        bases = {"p1": range(4), "a1": (1, 3), "a2": range(1, 3)}[uid]
        view = store.mesh_view(uid, Region(["gpus"], NDSlice(bases[0], [size], [bases[1] - bases[0]])), 99.0)
        assert view is not None
        assert view.counts == shown  # text and static HTML say what live views say
        assert [rank.state for rank in view.ranks] == [state(store, uid, index) for index in range(size)]


# -- one mesh, as text and static HTML have it -------------------------------------------------------------------------


def view_of(store: ClusterState, uid: str, region: Region) -> MeshView:
    view = store.mesh_view(uid, region, now=10.0)
    assert view is not None
    return view


def test_a_slice_view_has_slice_positions_and_states_of_the_whole() -> None:
    store = cluster(
        e.ProcessStarted("p1", 3, 77, 1.0),
        e.RankStateChanged("a1", 3, "failed", 0, 6.0, "ValueError: no"),
        e.ResponsivenessChanged("p1", 1, 7.0, 7.0),
        e.ActivityChanged("p1", 2, 0, "busy", 8.0, "cell"),
    )
    procs = view_of(store, "p1", Region(["gpus"], NDSlice(1, [3], [1])))
    assert [(rank.rank, rank.point, rank.state, rank.detail) for rank in procs.ranks] == [
        (1, (0,), "unresponsive", "for 3 s"),
        (2, (1,), "busy", "cell"),
        (3, (2,), "idle", ""),
    ]
    assert (procs.hosts, procs.actors, procs.ranks[2].pid) == (("h1", "h2"), ("trainers",), 77)
    actor = view_of(store, "a1", Region([], NDSlice(3, [], [])))
    assert [(rank.point, rank.state, rank.detail, rank.host, rank.pid) for rank in actor.ranks] == [
        ((), "failed", "ValueError: no", "h2", 77)
    ]
    assert (actor.actor_class, actor.on, actor.stopped) == ("Trainer", "p1", "")


def test_a_paused_rank_shows_where_and_a_stopped_one_why() -> None:
    store = cluster(e.SessionOpened("s1", "a1", 3, 5.0, {"function": "step", "line": 42}))
    region = Region(["gpus"], NDSlice(1, [2], [2]))
    assert [(rank.state, rank.detail) for rank in view_of(store, "a1", region).ranks] == [
        ("idle", ""),
        ("paused", "step, line 42"),
    ]
    store.fold(e.MeshEnded("a1", "stopped by %stop", 6.0))
    stopped = view_of(store, "a1", region)
    assert (stopped.stopped, stopped.counts) == ("stopped by %stop", {"stopped": 2})
    store.fold(e.MeshForgotten("a1"))
    assert store.mesh_view("a1", region, now=10.0) is None


def test_ranks_of_a_shrunken_mesh_keep_their_facts_at_new_positions() -> None:
    store = cluster(e.ProcessStarted("p1", 2, 77, 5.0), e.RankStateChanged("p1", 3, "failed", 0, 6.0, "it ended"))
    before = copy.deepcopy(store.document)
    store.take()
    smaller = msgspec.structs.replace(
        PROCS, ranks=[0, 2, 3], sizes=(3,), strides=(), picked=(0, 2, 3), hosts=("h1", "h2"), ready=True
    )
    store.fold(e.MeshRedescribed(smaller))
    assert [state(store, "p1", index) for index in range(3)] == ["idle", "idle", "failed"]
    assert store.document["meshes"]["p1"]["counts"] == {"idle": 2, "failed": 1}
    assert store.document["ranks"]["p1"]["1"]["pid"] == 77
    assert (store.document["meshes"]["p1"]["sizes"], store.document["meshes"]["p1"]["picked"]) == ([3], [0, 2, 3])
    assert apply(before, store.take()) == store.document
