"""The parts of a timeline that decide: rows and groups of ranks, drawing together, and the file for Perfetto."""

import time

import pytest
from IPython.core.error import UsageError

from monarch_kernel.arguments import read_timeline
from monarch_kernel.display.timeline import ticks
from monarch_nb.profiling.messages import Recorded, RecordedCall, RecordedSpan
from monarch_nb.profiling.recording import drawn_together
from monarch_nb.profiling.rows import TimelineRows
from monarch_nb.profiling.trace_events import chrome_trace

pytestmark = pytest.mark.timeout(60)


def call(name: str, began: float, ended: float, failed: bool = False, id: str = "") -> RecordedSpan:
    return RecordedSpan("call", name, began, ended, id, failed)


def rows_of(*spans: list[RecordedSpan]) -> TimelineRows:
    rows = TimelineRows(range(len(spans)))
    for rank, each in enumerate(spans):
        rows.add(Recorded(1, rank, tuple(each)))
    return rows


def test_ranks_that_do_the_same_together_are_one_row() -> None:
    rows = rows_of(*([call("step", 1.0 + rank / 1000, 2.0)] for rank in range(7)), [call("step", 1.0, 3.0)])
    first, second = rows.folded(0.0, 4.0)
    assert (first.ranks, second.ranks) == (tuple(range(7)), (7,))
    assert [span.name for span in second.spans] == ["step"]


def test_the_same_call_at_another_time_makes_another_row() -> None:
    rows = rows_of([call("step", 0.0, 1.0)], [call("step", 3.0, 4.0)])
    assert len(rows.folded(0.0, 4.0)) == 2


def test_a_short_failure_divides_ranks_but_a_short_difference_does_not() -> None:
    rows = rows_of([call("a", 0.0, 1.0)], [call("a", 0.0, 1.01)], [call("a", 0.0, 1.0, failed=True)])
    assert [row.ranks for row in rows.folded(0.0, 10.0)] == [(0, 1), (2,)]
    assert len(rows.folded(0.99, 1.02)) == 3


def test_a_thousand_ranks_fold_into_few_rows_quickly() -> None:
    slow = 417
    rows = rows_of(
        *(
            [call("step", step + 0.0, step + (0.9 if rank == slow else 0.5)) for step in range(60)]
            for rank in range(1000)
        )
    )
    began = time.process_time()
    found = rows.folded(0.0, 60.0)
    assert time.process_time() - began < 5.0
    assert [len(row.ranks) for row in found] == [999, 1]
    assert found[1].ranks == (slow,)


def test_memory_is_bounded_and_the_oldest_are_left_out() -> None:
    rows = TimelineRows(range(1000))
    for number in range(2000):
        rows.add(Recorded(1, 5, (call("step", number, number + 0.5),)))
    assert len(rows.spans[5]) == 200
    assert rows.dropped == 1800
    assert rows.spans[5][-1].began == 1999


def test_what_lasts_ends_now_and_replaces_itself() -> None:
    rows = TimelineRows([0])
    rows.add(Recorded(1, 0, (), running=(call("step", 1.0, 0.0, id="c"),)))
    assert [(span.began, span.ended) for span in rows.of(0, 5.0)] == [(1.0, 5.0)]
    rows.add(Recorded(1, 0, (call("step", 1.0, 6.0, id="c"),)))
    assert [(span.began, span.ended) for span in rows.of(0, 9.0)] == [(1.0, 6.0)]


def test_a_loss_ends_what_ran_and_a_heal_ends_the_loss() -> None:
    rows = TimelineRows([0])
    rows.add(Recorded(1, 0, (), running=(call("step", 1.0, 0.0, id="c"),)))
    rows.turn(0, "lost", "SIGKILL", 2.0)
    rows.turn(0, "healing", "", 3.0)
    rows.turn(0, "", "", 4.0)
    assert [(span.kind, span.began, span.ended, span.failed) for span in rows.of(0, 9.0)] == [
        ("call", 1.0, 2.0, True),
        ("lost", 2.0, 3.0, False),
        ("healing", 3.0, 4.0, False),
    ]


def test_clocks_of_other_hosts_are_set_right() -> None:
    rows = TimelineRows([0])
    rows.add(Recorded(1, 0, (call("step", 11.0, 12.0),)), ahead=10.0)
    assert rows.of(0, 5.0)[0].began == pytest.approx(1.0)


def test_short_calls_that_follow_each_other_are_one_with_a_count() -> None:
    spans = [call("ping", n / 1000, (n + 0.9) / 1000) for n in range(100)] + [call("pong", 0.05, 0.06)]
    merged = sorted(drawn_together(spans, 0.001), key=lambda span: span.name)
    assert [(span.name, span.count) for span in merged] == [("ping", 100), ("pong", 1)]
    assert merged[0].ended == pytest.approx(0.0999)


def test_both_ends_of_a_call_are_found_by_its_id() -> None:
    rows = rows_of([call("step", 1.0, 2.0, id="c")], [call("step", 1.2, 4.0, id="c")], [call("other", 0, 1, id="d")])
    ends = rows.ends(["c", "nosuch"], 9.0)
    assert list(ends) == ["c"]
    found = ends["c"]
    assert (found.first, found.last, found.slowest, found.ranks) == (1.0, 1.2, 1, 2)
    assert (found.least, found.most) == (pytest.approx(1.0), pytest.approx(2.8))


def test_the_file_for_perfetto_has_ranks_calls_and_arrows_between_them() -> None:
    rows = rows_of([call("step", 101.0, 102.0, id="c"), RecordedSpan("collective", "all_reduce", 101.5, 101.5)])
    rows.add_calls([RecordedCall("c", "trainers.step", "m", 1, 100.5, 102.5, "train.py", 7)])
    rows.turn(0, "lost", "SIGKILL", 103.0)
    events = chrome_trace(rows, lambda rank: f"trainers gpus={rank}", 104.0)["traceEvents"]
    assert isinstance(events, list)
    named = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert named == ["controller", "trainers gpus=0"]
    sent = next(event for event in events if event["ph"] == "X" and event["pid"] == 0)
    assert (sent["ts"], sent["dur"], sent["args"]["source"]) == (0.0, 2e6, "train.py:7")
    ran = next(event for event in events if event["ph"] == "X" and event["name"] == "step")
    assert (ran["ts"], ran["dur"], ran["cat"]) == (5e5, 1e6, "call")
    begin, end = (next(event for event in events if event["ph"] == phase) for phase in "sf")
    assert (begin["id"], begin["pid"], end["pid"]) == (end["id"], 0, 1)
    assert next(event for event in events if event["name"] == "all_reduce")["ph"] == "i"
    assert next(event for event in events if event["name"] == "SIGKILL")["dur"] == 1e6


@pytest.mark.parametrize("length", [3e-5, 0.02, 0.7, 9.0, 70.0, 3600.0])
def test_an_axis_has_a_few_round_times(length: float) -> None:
    found = list(ticks(1.0, 1.0 + length))
    assert 4 <= len(found) <= 9
    assert len({text for _, text in found}) == len(found)
    assert all(1.0 - 1e-9 <= at <= 1.0 + length + 1e-9 for at, _ in found)


def test_a_line_names_ranks_or_means_the_newest() -> None:
    given = read_timeline("%timeline", "trainers gpus=0-2 --save 'a b.json'")
    assert given.place is not None
    assert (given.place.name, given.save, given.stop) == ("trainers", "a b.json", False)
    newest = read_timeline("%timeline", "--stop --save step.json")
    assert (newest.place, newest.save, newest.stop) == (None, "step.json", True)
    with pytest.raises(UsageError, match="--nosuch"):
        read_timeline("%timeline", "trainers --nosuch")
