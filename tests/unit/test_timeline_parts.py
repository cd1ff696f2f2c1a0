"""The parts of a timeline that decide: rows and groups of ranks, drawing together, and the file for Perfetto."""

import random
import re
import time
from types import SimpleNamespace
from typing import Any

import pytest
from IPython.core.error import UsageError

from monarch_kernel.arguments import read_timeline
from monarch_kernel.display.timeline import _Picture, ticks
from monarch_nb.profiling import recording
from monarch_nb.profiling import rows as rows_module
from monarch_nb.profiling.recording import drawn_together
from monarch_nb.profiling.rows import TimelineRows
from monarch_nb.profiling.timelines import chrome_trace
from monarch_nb.profiling.verbs import Recorded, RecordedCall, RecordedSpan
from tests.polling import until

pytestmark = pytest.mark.timeout(60)


def call(name: str, began: float, ended: float, failed: bool = False, id: str = "") -> RecordedSpan:
    return RecordedSpan("call", name, began, ended, id, failed)


def rows_of(*spans: list[RecordedSpan]) -> TimelineRows:
    rows = TimelineRows(range(len(spans)))
    for rank, rank_spans in enumerate(spans):
        rows.add(Recorded(1, rank, tuple(rank_spans)))
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
    groups = rows.folded(0.0, 60.0)
    assert time.process_time() - began < 5.0
    assert [len(row.ranks) for row in groups] == [999, 1]
    assert groups[1].ranks == (slow,)


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
    end = ends["c"]
    assert (end.first, end.last, end.slowest, end.ranks) == (1.0, 1.2, 1, 2)
    assert (end.least, end.most) == (pytest.approx(1.0), pytest.approx(2.8))


def test_the_file_for_perfetto_has_ranks_calls_and_arrows_between_them() -> None:
    rows = rows_of([call("step", 101.0, 102.0, id="c"), RecordedSpan("collective", "all_reduce", 101.5, 101.5)])
    rows.add_calls([RecordedCall("c", "trainers.step", "m", 1, 100.5, 102.5, "train.py", 7)])
    rows.turn(0, "lost", "SIGKILL", 103.0)
    events = chrome_trace(rows, lambda rank: f"trainers gpus={rank}", 104.0)["traceEvents"]
    assert isinstance(events, list)
    named = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert named == ["controller", "trainers gpus=0"]
    caller_event = next(event for event in events if event["ph"] == "X" and event["pid"] == 0)
    assert (caller_event["ts"], caller_event["dur"], caller_event["args"]["source"]) == (0.0, 2e6, "train.py:7")
    ran = next(event for event in events if event["ph"] == "X" and event["name"] == "step")
    assert (ran["ts"], ran["dur"], ran["cat"]) == (5e5, 1e6, "call")
    begin, end = (next(event for event in events if event["ph"] == phase) for phase in "sf")
    assert (begin["id"], begin["pid"], end["pid"]) == (end["id"], 0, 1)
    assert next(event for event in events if event["name"] == "all_reduce")["ph"] == "i"
    assert next(event for event in events if event["name"] == "SIGKILL")["dur"] == 1e6


@pytest.mark.parametrize("length", [3e-5, 0.02, 0.7, 9.0, 70.0, 3600.0])
def test_an_axis_has_a_few_round_times(length: float) -> None:
    marks = list(ticks(1.0, 1.0 + length))
    assert 4 <= len(marks) <= 9
    assert len({text for _, text in marks}) == len(marks)
    assert all(1.0 - 1e-9 <= tick <= 1.0 + length + 1e-9 for tick, _ in marks)


@pytest.mark.parametrize("width", [240, 900])
def test_the_last_time_on_the_axis_is_not_cut_off(width: int) -> None:
    svg = _Picture(0.0, 50.0, width).svg("")
    (x, text) = re.findall(r'x="([\d.]+)" y="8" text-anchor="middle">([^<]+)<', svg)[-1]
    assert text == "50 s"
    assert float(x) + 3 * len(text) <= width


def test_a_line_names_ranks_or_means_the_newest() -> None:
    request = read_timeline("%timeline", "trainers gpus=0-2 --save 'a b.json'")
    assert request.place is not None
    assert (request.place.name, request.save, request.stop) == ("trainers", "a b.json", False)
    newest = read_timeline("%timeline", "--stop --save step.json")
    assert (newest.place, newest.save, newest.stop) == (None, "step.json", True)
    with pytest.raises(UsageError, match="--nosuch"):
        read_timeline("%timeline", "trainers --nosuch")


def random_rows(seconds: int = 100, ranks: int = 1000) -> TimelineRows:
    chance = random.Random(3)
    rows = TimelineRows(range(ranks))
    for second in range(seconds):
        for rank in range(ranks):
            began = second + 0.5 * chance.random()
            span = call(chance.choice(("step", "eval")), began, began + 0.5 * chance.random(), id=f"c{second}")
            rows.add(Recorded(1, rank, (span,)))
    return rows


def test_a_look_at_ranks_that_are_all_different_compares_few(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, compared = random_rows(), 0
    alike = rows_module._alike

    def counted(*args: Any) -> bool:
        nonlocal compared
        compared += 1
        return alike(*args)

    monkeypatch.setattr(rows_module, "_alike", counted)
    groups = rows.folded(70.0, 100.0, groups=24, most=225)
    assert len(groups) == 24
    assert compared < 20_000  # of half a million pairs
    assert sum(len(row.spans) for row in groups) <= 2.5 * rows_module.BARS


def test_what_is_followed_is_summed_up_as_it_comes_in(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, looked = random_rows(seconds=60, ranks=100), set()
    inside = rows._inside

    def noted(rank: int, *args: Any) -> list[RecordedSpan]:
        looked.add(rank)
        return inside(rank, *args)

    monkeypatch.setattr(rows, "_inside", noted)
    groups = rows.folded(30.0, 60.0, groups=8)
    assert len(looked) == len(groups) == 8  # the spans of others are not looked at
    rows.folded(10.0, 30.0, groups=8)
    assert len(looked) == 100


def test_sums_divide_ranks_as_their_spans_do() -> None:
    rows = TimelineRows(range(40))
    for second in range(60):
        for rank in range(40):
            length = 0.9 if rank == 7 else 0.5
            began = second + (0.02 if rank == 9 and second % 2 else 0.0)
            rows.add(Recorded(1, rank, (call("step", began, began + length, failed=(rank, second) == (21, 50)),)))
    rest = tuple(rank for rank in range(40) if rank not in (7, 21))
    assert [row.ranks for row in rows.folded(30.0, 60.0)] == [rest, (7,), (21,)]
    assert [row.ranks for row in rows.folded(29.0, 59.0)] == [rest, (7,), (21,)]
    long = TimelineRows([0, 1])
    long.add(Recorded(1, 0, (call("step", 0.0, 59.0),)))
    long.add(Recorded(1, 1, (), running=(call("step", 0.0, 0.0, id="c"),)))
    assert [row.ranks for row in long.folded(30.0, 60.0)] == [(0, 1)]


def test_a_process_sends_news_alone_and_at_its_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "SEND_S", 0.01)
    monkeypatch.setattr(recording, "ASKS", 10_000)
    runtime: Any = SimpleNamespace(recorder=None, cells={})
    process = recording.ProcessRecording(runtime)
    often, seldom = list[Recorded](), list[Recorded]()
    process.begin(("a", 1, "", 0), lambda recorded: not often.append(recorded))
    process.begin(("b", 1, "", 0), lambda recorded: not seldom.append(recorded), 1e6)
    time.sleep(0.2)
    assert (often, seldom) == ([], [])
    runtime.recorder.stretch("span", "load", time.monotonic())
    until(lambda: bool(often), "what was recorded to be sent")
    time.sleep(0.2)
    assert [span.name for recorded in often for span in recorded.spans] == ["load"]
    assert len(often) == 1
    assert seldom == []
    rest = process.end(("b", 1, "", 0))
    assert rest is not None
    assert [span.name for span in rest.spans] == ["load"]
    process.close()
    assert runtime.recorder is None
