"""Simulated time: streams of ranks, exchanges, waits and memory."""

import pytest

from monarch_nb.tensor.simulated.simulator import trace_events
from monarch_nb.tensor.simulated.timeline import SimulatedTimeline, groups, labels, ranks_named

pytestmark = pytest.mark.timeout(30)


def spans(timeline: SimulatedTimeline, rank: int, lane: str) -> list[tuple[str, float, float]]:
    return [(task.name, task.start, task.end) for task in timeline.tasks[rank][lane]]


def test_operations_of_a_stream_follow_each_other_and_streams_overlap() -> None:
    timeline = SimulatedTimeline()
    for lane in ("main", "main", "other"):
        timeline.operate((0,), lane, "aten.mm", None)
    assert spans(timeline, 0, "main") == [("aten.mm", 0, 10), ("aten.mm", 10, 20)]
    assert spans(timeline, 0, "other") == [("aten.mm", 0, 10)]
    assert timeline.elapsed == 20


def test_an_exchange_ends_after_its_last_rank_has_come() -> None:
    timeline = SimulatedTimeline()
    timeline.operate((1,), "main", "aten.mm", None)
    timeline.exchange([(0, 1), (2, 3)], "main", "reduce", None)
    assert [spans(timeline, rank, "main")[-1] for rank in range(4)] == [
        ("reduce", 0, 110),
        ("reduce", 10, 110),
        ("reduce", 0, 100),
        ("reduce", 0, 100),
    ]


def test_a_wait_lasts_until_what_was_recorded_or_half_a_microsecond() -> None:
    timeline = SimulatedTimeline()
    timeline.operate((0,), "main", "aten.mm", None)
    recorded = timeline.recorded((0,), "main")
    timeline.operate((0,), "main", "aten.mm", None)
    timeline.wait("other", recorded, "waiting for main", None)
    timeline.wait("other", recorded, "waiting for main", None)
    assert spans(timeline, 0, "other") == [("waiting for main", 0, 10), ("waiting for main", 10, 10.5)]


def test_values_arrive_when_both_ranks_are_there_and_copies_are_quick() -> None:
    timeline = SimulatedTimeline()
    timeline.operate((1,), "main", "aten.mm", None)
    timeline.send([(0, 1), (0, 0)], "main", "main", None)
    assert spans(timeline, 1, "main")[-1] == ("receive", 10, 110)
    assert spans(timeline, 0, "main") == [("send", 0, 110)]
    timeline.send([(2, 2)], "main", "main", None)
    assert spans(timeline, 2, "main") == [("send", 0, 1)]


def test_memory_counts_from_its_task_until_its_last_holder_ends() -> None:
    timeline = SimulatedTimeline()
    timeline.operate((0,), "main", "aten.mm", None)
    timeline.operate((0,), "main", "aten.mm", None)
    memory = timeline.allocate(400, (0,), "main")
    memory.holders += 1
    timeline.release(memory)
    timeline.operate((0,), "main", "aten.mm", None)
    timeline.allocate(100, (0,), "main")
    timeline.release(memory)
    assert timeline.memory_of(0) == [(10, 400), (20, 500), (30, 100)]
    assert timeline.peak == 500


def test_views_take_no_time_and_are_not_in_the_trace() -> None:
    timeline = SimulatedTimeline()
    timeline.operate((0,), "main", "aten.view", None)
    timeline.operate((0,), "main", "aten.ones", None)
    shown = [event["name"] for event in trace_events(timeline, "stream_only", grouped=False) if event["ph"] == "X"]
    assert (timeline.elapsed, shown) == (10, ["aten.ones"])


def test_ranks_that_do_the_same_are_shown_together() -> None:
    timeline = SimulatedTimeline()
    timeline.operate((0, 1, 2), "main", "aten.mm", None)
    timeline.operate((1,), "main", "aten.mm", None)
    assert [ranks_named(ranks) for ranks in groups(timeline)] == ["ranks 0, 2", "rank 1"]
    named = [event["args"] for event in trace_events(timeline, "stream_only", grouped=True) if event["ph"] == "M"]
    assert named == [{"name": name} for name in ("ranks 0, 2", "main", "rank 1", "main")]


def test_labels_are_part_of_the_names_of_tasks() -> None:
    timeline = SimulatedTimeline()
    labels.append("forward")
    timeline.operate((0,), "main", "aten.mm", None)
    labels.clear()
    assert spans(timeline, 0, "main") == [("aten.mm forward", 0, 10)]
