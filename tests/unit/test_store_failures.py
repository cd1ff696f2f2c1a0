"""Failures of several ranks that are one event are one failure in the state that all views show."""

from typing import Any

import msgspec
import pytest

from monarch_nb.runtime import CauseKind
from monarch_nb.store import ClusterState
from monarch_nb.store import events as e
from monarch_nb.store.failures import record, rows, tails, text
from monarch_nb.store.incidents import Incident, Member
from monarch_nb.supervision import Cause, MeshFailure

pytestmark = pytest.mark.timeout(20)

SIZE = 8


def cluster(size: int = SIZE) -> ClusterState:
    store = ClusterState()
    shape: dict[str, Any] = {"ranks": range(size), "labels": ("gpus",), "sizes": (size,), "strides": (1,), "at": 1.0}
    store.fold(e.MeshDescription(uid="P", name="w", kind="procs", hosts=("h1",), per_host=size, ready=True, **shape))
    store.fold(e.MeshDescription(uid="A", name="a", kind="actors", on="P", ready=True, **shape))
    half = {**shape, "ranks": range(size // 2), "sizes": (size // 2,)}
    store.fold(e.MeshDescription(uid="B", name="b", kind="actors", on="P", ready=True, **half))
    return store


def failed(
    number: int, rank: int, cause: Cause, time: float = 10.0, uid: str = "A", also: tuple[str, ...] = ("w",)
) -> e.MeshFailed:
    name = {"A": "a", "B": "b", "P": "w"}[uid]
    size = SIZE // 2 if uid == "B" else SIZE
    cause = msgspec.structs.replace(cause, host="h1", at=time, actor=f"<root>.<Worker {name}{{'gpus': {rank}/{size}}}>")
    failure = MeshFailure(
        mesh_name=name, mesh_uid=uid, cause=cause, failure_id=number, extent=(("gpus",), (size,)), places=(rank,),
        also=also,
    )  # fmt: skip
    return e.MeshFailed(str(number), uid, (rank,), record(failure, time), failure)


def exits(rank: int, **more: Any) -> Cause:
    return Cause(kind="exit", exitcode=7, pid=100 + rank, text=f"process {100 + rank} ended", **more)


def rank_failed(rank: int, number: int, uid: str = "A") -> e.RankStateChanged:
    return e.RankStateChanged(uid, rank, "failed", 0, 10.0, "", str(number))


ORDER = (3, 0, 7, 1, 2, 6, 5, 4)


def all_exited(**more: Any) -> ClusterState:
    store = cluster()
    for number, rank in enumerate(ORDER, 1):
        store.fold(failed(number, rank, exits(rank, **more), 10.0 + number / 10))
        store.fold(rank_failed(rank, number))
    return store


def failure_of(store: ClusterState) -> dict[str, Any]:
    [failure] = store.document["failures"].values()
    return dict(failure)


def test_ranks_that_end_alike_together_are_one_failure() -> None:
    failure = failure_of(all_exited())
    assert failure["title"] == "a: 8 of 8 ranks ended with exit status 7"
    assert failure["ranks"] == list(range(8))
    assert failure["where"] == "all 8 ranks"
    assert failure["processes"] == [["h1", [100, 101, 102, 103, 104, 105, 106, 107]]]
    assert dict(rows(failure))["host"] == "h1, pids 100, 101, 102, 103, 104, 105, 106, 107"
    assert failure["next"] == "heal_mesh(a) brings them back"
    assert failure["report"].endswith("heal_mesh(a) brings them back")


def test_some_ranks_are_named_as_they_can_be_typed() -> None:
    store = cluster()
    for number, rank in enumerate((5, 1, 2), 1):
        store.fold(failed(number, rank, Cause(kind="signal", signal=9, pid=rank)))
    failure = failure_of(store)
    assert failure["title"] == "a, gpus=1-2,5: 3 of 8 ranks died, killed by signal 9 (SIGKILL)"
    assert failure["next"] == "heal_mesh(a) brings them back; a.slice(...) without gpus=1-2,5 still works"


def test_advice_is_current_for_ranks_that_failed_earlier_too() -> None:
    store = cluster()
    store.fold(failed(1, 5, Cause(kind="signal", signal=9)))
    store.fold(rank_failed(5, 1))
    assert "without gpus=5 still works" in failure_of(store)["next"]
    for number, rank in enumerate(set(range(8)) - {5}, 2):
        store.fold(failed(number, rank, exits(rank), 20.0))
        store.fold(rank_failed(rank, number))
    both = store.document["failures"]
    assert list(both) == ["1", "2"]
    for failure in both.values():
        assert "slice" not in failure["next"]
        assert "slice" not in failure["report"]


def test_equal_last_lines_are_told_once_and_others_by_rank() -> None:
    failure = failure_of(all_exited(last_lines=("step 11", "going down")))
    assert tails(failure) == [("", ["step 11", "going down"])]
    assert text(failure).count("going down") == 1
    store = cluster()
    for rank in range(3):
        store.fold(failed(rank + 1, rank, exits(rank, last_lines=("even" if rank % 2 == 0 else "odd",))))
    assert tails(failure_of(store)) == [("gpus=0,2", ["even"]), ("gpus=1", ["odd"])]


def test_other_causes_later_times_and_repeats_are_separate_failures() -> None:
    store = cluster()
    for number, (rank, cause, time) in enumerate(
        [(0, exits(0), 10.0), (1, Cause(kind="exit", exitcode=8), 10.0), (2, exits(2), 13.0), (2, exits(2), 13.1)], 1
    ):
        store.fold(failed(number, rank, cause, time))
    assert [failure["ranks"] for failure in store.document["failures"].values()] == [[0], [1], [2], [2]]


def test_a_healed_failure_is_over() -> None:
    store = cluster()
    store.fold(failed(1, 0, exits(0)))
    store.fold(e.FailureStateChanged("1", "healed", 10.2))
    store.fold(failed(2, 1, exits(1), 10.4))
    assert [failure["state"] for failure in store.document["failures"].values()] == ["healed", "open"]


def test_a_failure_is_healed_when_all_its_ranks_are() -> None:
    store = all_exited()
    for number in range(1, 9):
        assert failure_of(store)["state"] == "open"
        store.fold(e.FailureStateChanged(str(number), "healing", 12.0))
    assert failure_of(store)["state"] == "healing"
    for number in range(1, 9):
        assert "ended" not in failure_of(store)
        store.fold(e.FailureStateChanged(str(number), "healed", 13.0))
    assert (failure_of(store)["state"], failure_of(store)["ended"]) == ("healed", 13.0)


def test_the_recipient_of_a_failure_is_named_once() -> None:
    store = all_exited()
    store.fold(e.OwnerNotified("1", "a call", "asked"))
    for number in range(2, 9):
        store.fold(e.OwnerNotified(str(number), "<root>", "shown"))
    assert failure_of(store)["told"] == [["a call", "asked"], ["<root>", "shown"]]


def test_ranks_point_at_the_failure_reported_for_them_in_any_order() -> None:
    store = cluster()
    store.fold(rank_failed(0, 1))
    store.fold(rank_failed(1, 2))
    store.fold(rank_failed(1, 2, "P"))
    store.fold(failed(1, 0, exits(0)))
    store.fold(failed(2, 1, exits(1)))
    store.fold(rank_failed(1, 2))
    ranks = store.document["ranks"]
    assert [ranks["A"]["0"]["failure"], ranks["A"]["1"]["failure"], ranks["P"]["1"]["failure"]] == ["1"] * 3
    assert store.failure_key("2") == "1"


def test_ended_processes_are_one_event_whatever_actors_reported_them() -> None:
    store = cluster()
    store.fold(failed(1, 0, exits(0), uid="B", also=("w", "a")))  # somebody waited for b
    store.fold(failed(2, 1, exits(1), also=("w", "b")))
    assert (failure_of(store)["name"], failure_of(store)["ranks"]) == ("b", [0, 1])
    store.fold(failed(3, 6, exits(6)))  # there is no b
    failure = failure_of(store)
    assert (failure["mesh"], failure["kind"], failure["ranks"]) == ("P", "procs", [0, 1, 6])
    assert failure["title"] == "w, gpus=0-1,6: 3 of 8 ranks ended with exit status 7"
    assert failure["also"] == ["a", "b"]


def test_texts_that_differ_in_numbers_are_one_event_with_each_text() -> None:
    store = cluster()
    for number, rank in enumerate((2, 0), 1):
        message = f"a.step: ValueError: rank {rank} is out"
        store.fold(failed(number, rank, Cause(kind="exception", text=message, traceback=f"Traceback\n{message}")))
    failure = failure_of(store)
    assert failure["title"] == "a, gpus=0,2: 2 of 8 ranks failed: a.step: ValueError: rank 0 is out (the texts differ)"
    assert failure["texts"] == [
        ["gpus=0", "a.step: ValueError: rank 0 is out"],
        ["gpus=2", "a.step: ValueError: rank 2 is out"],
    ]
    assert "re-creates them with their original arguments" in failure["next"]
    assert failure["traceback"].endswith("rank 0 is out")


def test_a_thousand_ranks_are_told_in_bounded_room() -> None:
    store = ClusterState()
    store.fold(
        e.MeshDescription(uid="A", name="a", kind="actors", ranks=range(1000), labels=("gpus",), sizes=(1000,), at=1.0)
    )
    for rank in range(0, 1000, 2):
        cause = Cause(kind="exit", exitcode=7, host="h1", pid=9000 + rank, last_lines=(f"rank {rank}",) * 20)
        failure = MeshFailure(
            mesh_name="a", mesh_uid="A", cause=cause, failure_id=1, extent=(("gpus",), (1000,)), places=(rank,)
        )
        store.fold(e.MeshFailed(str(rank + 1), "A", (rank,), record(failure, 5.0), failure))
        store.fold(rank_failed(rank, rank + 1))
    entry = failure_of(store)
    assert len(entry["title"]) < 250
    assert "500 of 1000 ranks ended" in entry["title"]
    assert len(entry["report"]) < 5000
    assert len(entry["lines"]) <= 8


@pytest.mark.parametrize("kind", ["left", "taken", "shrunk", "stopped"])
def test_ranks_without_failure_have_none(kind: CauseKind) -> None:
    cause = Cause(kind=kind, text="detached for 1h", actor="c")
    failure = MeshFailure(mesh_name="c", mesh_uid="c", cause=cause, extent=(("gpus",), (4,)), places=())
    assert "failed" not in record(failure, 0.0)["title"]


@pytest.mark.parametrize(("oom", "late"), [(True, 110.0), (None, 101.0)])
def test_deaths_for_memory_that_follow_each_other_slowly_are_one_event(oom: bool | None, late: float) -> None:
    incident = Incident("1", "m")
    incident.add("1", Member(None, (0,), {"oom": oom, "detected": 100.0}))
    assert incident.takes((1,), late)
    assert not incident.takes((0,), late)  # it has died of the next
    assert not incident.takes((1,), late + 10.0)
