"""Results of sampled stacks: merged trees, groups of ranks, differences, files for other programs. Pure."""

import json
import os
import random
import re
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from monarch_kernel.display.profile import flame_graph
from monarch_nb.profiling.groups import (
    ProfileSamples,
    RankProfile,
    Stack,
    differences,
    grouped,
    recursion_folded,
    tree,
    users_part,
)
from monarch_nb.profiling.measuring import RankTrace, merged_trace
from monarch_nb.profiling.result import Profile, folded, speedscope
from monarch_nb.profiling.sampler import MOST_STACKS, Sampler, Stacks, Step
from monarch_nb.profiling.verbs import Samples, StackFrame, Weight
from monarch_nb.shape import Extent

pytestmark = pytest.mark.timeout(30)


def function(name: str, line: int = 1, *, users: bool = True) -> StackFrame:
    file = "/home/me/train.py" if users else "/lib/torch/distributed.py"
    return StackFrame(file, line, name, line - line % 10, users)


STEP, LOAD, LEARN = function("Trainer.step", 25), function("load", 41), function("learn", 52)
REDUCE, WAIT = function("all_reduce", 300, users=False), function("wait", 310, users=False)


def rank(shares: dict[Stack, float], seconds: float = 10.0, samples: int = 1000) -> RankProfile:
    """A rank that was watched for some seconds, and spent these shares of them in these stacks; else it waited."""
    weights = {**shares, (): 1 - sum(shares.values())}
    return RankProfile({stack: [seconds * share, 0.0, samples * share] for stack, share in weights.items()}, seconds)


FAST: dict[Stack, float] = {(STEP, LOAD): 0.2, (STEP, LEARN): 0.2, (STEP, LEARN, REDUCE, WAIT): 0.6}
SLOW: dict[Stack, float] = {(STEP, LOAD): 0.78, (STEP, LEARN): 0.2, (STEP, LEARN, REDUCE, WAIT): 0.02}


def test_shares_of_a_function_include_its_callees_and_add_up() -> None:
    root = tree({0: rank(FAST), 1: rank(SLOW)})
    (step,) = root.children([0, 1])
    assert root.share([0, 1]) == pytest.approx(1.0)
    assert step.share([0]) == pytest.approx(1.0)
    assert {child.place.function: round(child.share([1]), 2) for child in step.children([0, 1])} == {
        "load": 0.78,
        "learn": 0.22,
    }


def test_lines_of_one_function_are_one_box_naming_the_longest() -> None:
    root = tree({0: rank({(function("load", 41),): 0.3, (function("load", 43),): 0.5})})
    load, waits = root.children([0])
    assert (load.place.function, load.line, round(load.share([0]), 2)) == ("load", 43, 0.8)
    assert waits.place.function == "waits for messages"


def test_ranks_doing_the_same_form_a_group_beside_the_slow_one() -> None:
    ranks = {number: rank(SLOW if number == 5 else FAST) for number in range(8)}
    assert grouped(ranks) == [(0, 1, 2, 3, 4, 6, 7), (5,)]


@pytest.mark.parametrize("samples", [20, 100, 1000])
def test_noise_of_few_samples_makes_no_groups(samples: int) -> None:
    chance = random.Random(samples)

    def sampled() -> RankProfile:
        stacks = chance.choices(list(FAST), list(FAST.values()), k=samples)
        counts = {stack: stacks.count(stack) / samples for stack in FAST}
        return rank(counts, samples=samples)

    assert [len(grouped({number: sampled() for number in range(16)})) for _ in range(20)] == [1] * 20


def test_differences_are_named_at_the_innermost_user_call_largest_first() -> None:
    ranks = {number: rank(SLOW if number == 2 else FAST) for number in range(3)}
    first, second = differences(ranks, grouped(ranks))
    table = {(diff.names, diff.line): tuple(round(share, 2) for share in diff.shares) for diff in (first, second)}
    assert table == {("Trainer.step → load", 41): (0.2, 0.78), ("Trainer.step → learn → all_reduce", 52): (0.6, 0.02)}


def test_ranks_that_do_nothing_differ_from_those_that_work() -> None:
    ranks = {0: rank(FAST), 1: rank({})}
    assert grouped(ranks) == [(0,), (1,)]
    assert "waits for messages" in [diff.names for diff in differences(ranks, grouped(ranks))]


def test_a_recursive_function_is_one_box_with_its_depth() -> None:
    walk, leaf = function("walk", 60), function("leaf", 70)
    ranks = {0: rank({(STEP, *[walk] * 7, leaf): 0.5, (STEP, walk, leaf): 0.2, (STEP, *[walk] * 3): 0.1})}
    (step, _) = tree(ranks).children([0])
    (folded_walk,) = step.children([0])
    (folded_leaf,) = folded_walk.children([0])
    assert (folded_walk.name, round(folded_walk.share([0]), 2)) == ("walk ×7", 0.8)
    assert (folded_leaf.name, round(folded_leaf.share([0]), 2)) == ("leaf", 0.7)


def test_mutually_recursive_functions_are_folded_and_others_are_not() -> None:
    a, b, c = (function(name, 10 * number) for number, name in enumerate("abc", 1))

    def names(*stack: StackFrame) -> list[tuple[str, int]]:
        return [(frame.function, times) for frame, times in recursion_folded(stack)]

    assert names(a, b, c, b, c, b, c, a) == [("a", 1), ("b", 3), ("c", 3), ("a", 1)]
    assert names(a, b, a) == [("a", 1), ("b", 1), ("a", 1)]
    assert names(a, a, b, b, b) == [("a", 2), ("b", 3)]
    assert names() == []


def test_recursive_calls_name_the_innermost_line_and_differ_once() -> None:
    outer, inner = function("walk", 61), function("walk", 63)
    ranks = {0: rank({(STEP, *[outer] * 4, inner): 0.9}), 1: rank({})}
    first, _ = differences(ranks, grouped(ranks))
    assert (first.names, first.line) == ("Trainer.step → walk ×5", 63)


def test_boxes_of_a_flame_graph_are_as_wide_as_their_share() -> None:
    ranks = {0: rank({(STEP, LOAD): 0.2, (STEP, function("<b>", 90)): 0.6})}
    html = flame_graph(tree(ranks), [0], os.path.basename)
    assert re.findall(r'<li style="width:([\d.]+)%', html) == ["80.00", "75.00", "25.00", "20.00"]
    assert 'title="load · train.py:41 · 20.0% of the time' in html
    assert "&lt;b&gt; <span" in html
    assert (
        re.sub(r"<(?!/?(ul|li|div|span)\b)", "", html) == html
    )  # the tags that JupyterLab keeps in untrusted notebooks


def test_of_a_library_the_function_that_the_user_called_is_kept() -> None:
    assert users_part((STEP, LEARN, REDUCE, WAIT)) == (STEP, LEARN, REDUCE)
    assert users_part((STEP, REDUCE, LOAD)) == (STEP, LOAD)
    assert users_part((REDUCE, WAIT)) == (REDUCE, WAIT)


def samples(frames: Sequence[StackFrame], first: int, *weights: Weight) -> Samples:
    return Samples(1, 0, tuple(frames), first, weights, 1.0, 0.01)


def test_messages_that_overtake_each_other_lose_nothing() -> None:
    early = samples([STEP, LOAD], 0, Weight((0, 1), 1.0, 0.5, 100))
    late = samples([LEARN], 2, Weight((0, 2), 1.0, 0.25, 100))
    for order in ((early, late), (late, early)):
        totals = ProfileSamples()
        for message in order:
            totals.add(message)
        (profile,) = totals.ranks().values()
        assert profile.stacks == {(STEP, LOAD): [1.0, 0.5, 100], (STEP, LEARN): [1.0, 0.25, 100]}
        assert (profile.seconds, profile.samples) == (2.0, 200)


def test_the_text_begins_with_differences_and_warns_of_few_samples(tmp_path: Path) -> None:
    totals = ProfileSamples()
    profile = Profile("trainers", Extent(["gpus"], [3]).region, 100.0, totals)
    for number in range(3):
        shares = SLOW if number == 2 else FAST
        totals.add(
            Samples(
                1,
                number,
                (STEP, LOAD, LEARN, REDUCE, WAIT),
                0,
                tuple(
                    Weight(tuple((STEP, LOAD, LEARN, REDUCE, WAIT).index(item) for item in stack), 0.1 * share, 0.0, 6)
                    for stack, share in shares.items()
                ),
                0.1,
                0.0002,
            )
        )
    profile.seconds = 0.1
    text = repr(profile)
    assert (
        text.splitlines()[0]
        == "profile of trainers: 0.1 s, 54 samples of 3 ranks, 2 groups, sampling took 0.2% of each"
    )
    assert (
        text.index("samples are few") < text.index("what differs") < text.index("gpus=0-1\n") < text.index("gpus=2\n")
    )
    assert "78% gpus=2   20% gpus=0-1" in text
    document = json.loads(profile.save(tmp_path / "p.json").read_text())
    assert [entry["name"] for entry in document["profiles"]] == [f"trainers gpus={number}" for number in range(3)]
    assert "trainers gpus=2;Trainer.step;load 78" in profile.save(tmp_path / "p.txt").read_text().splitlines()
    with pytest.raises(ValueError, match=r"p\.png: profiles are written as"):
        profile.save(tmp_path / "p.png")


def test_speedscope_gets_each_frame_once_and_weights_in_seconds() -> None:
    document = speedscope("trainers", {0: "a", 1: "b"}, {0: rank(FAST), 1: rank(SLOW)})
    names = [frame["name"] for frame in document["shared"]["frames"]]
    assert sorted(names) == ["Trainer.step", "all_reduce", "learn", "load", "wait", "waits for messages"]
    assert [round(profile["endValue"], 6) for profile in document["profiles"]] == [10.0, 10.0]
    assert folded({0: "a"}, {0: rank({(function("a;b"),): 1.0})}).splitlines() == [
        "a;a,b 10000",
        "a;waits for messages 0",
    ]


# -- the sampler -------------------------------------------------------------------------------------------------------


class StackSource:
    """Stacks for a sampler, and the samples that it sends."""

    def __init__(self, *stacks: Stack | Any) -> None:
        self.stacks = list(stacks)
        self.sent: list[Samples] = []

    def __call__(self) -> Iterator[tuple[str, int, Any]]:
        yield from (("worker", 0, stack) for stack in self.stacks)

    def sampler(self) -> Sampler:
        return Sampler(self, named_by_number, number=7, rank=3, hz=200.0, named=False, send=self.send)

    def send(self, samples: Samples) -> bool:
        self.sent.append(samples)
        return True


def named_by_number(step: Step) -> StackFrame:
    return function(f"f{step[0]}", step[1])


def test_all_the_time_that_was_watched_is_somewhere() -> None:
    source = StackSource(((1, 10), (2, 20)))
    sampler = source.sampler()
    sampler.start()
    time.sleep(0.3)
    rest = sampler.stop()
    totals = ProfileSamples()
    for message in (*source.sent, rest):
        assert (message.number, message.rank) == (7, 3)
        totals.add(message)
    profile = totals.ranks()[3]
    ((stack, weight),) = profile.stacks.items()
    assert [frame.function for frame in stack] == ["f1", "f2"]
    assert weight[0] == pytest.approx(profile.seconds)
    assert 0.1 < profile.seconds < 5
    assert profile.cost < profile.seconds
    assert sampler.stop().weights == ()


def test_an_actor_that_comes_later_is_sampled_from_then_on() -> None:
    source = StackSource()
    sampler = source.sampler()
    sampler._note(5.0)
    source.stacks.append(((1, 10),))
    sampler._note(1.0)
    rest = sampler.stop()
    assert (rest.seconds, [weight.seconds for weight in rest.weights]) == (1.0, [1.0])


def test_a_sampler_that_nobody_listens_to_ends() -> None:
    source = StackSource(())
    source.send = lambda samples: False  # type: ignore[method-assign]
    before = set(threading.enumerate())
    sampler = source.sampler()
    sampler.start()
    (thread,) = set(threading.enumerate()) - before
    thread.join(10)
    assert not thread.is_alive()


def test_numbers_of_stacks_are_bounded_and_omissions_counted() -> None:
    source = StackSource()
    source.stacks = [((1, number),) for number in range(3 * MOST_STACKS // 2)]
    sampler = source.sampler()
    sampler._note(0.1)
    assert sampler.stop().dropped == MOST_STACKS // 2


class Idle:
    """An actor that waits for messages, as the sampler sees it."""

    def __init__(self, target: Any) -> None:
        self.thread = threading.Thread(target=target, daemon=True)
        self.thread.start()
        self.executor = self
        self.spec = SimpleNamespace(name="idle")
        self.running = self.constructing = None
        self.async_runs: dict[str, Any] = {}


def test_frames_are_named_by_function_and_line_and_threads_by_name() -> None:
    begun, stop = threading.Event(), threading.Event()

    def napping() -> None:
        begun.set()
        stop.wait(20)

    stacks = Stacks()
    threading.Thread(target=napping, name="loader", daemon=True).start()
    begun.wait(20)
    cell: Any = Idle(lambda: stop.wait(20))
    try:
        frames = {name: [*map(stacks.frame, stack)] for name, _, stack in stacks.samples([cell], threads=True)}
    finally:
        stop.set()
    assert frames["idle"] == []
    first, *below = frames["loader"]
    assert first.function.endswith("napping")
    assert (first.file, first.line) == (__file__, napping.__code__.co_firstlineno + 2)
    assert (first.users, below[0].users) == (True, False)
    assert "MainThread" in frames


def test_waiting_of_a_process_counts_while_all_its_actors_wait() -> None:
    stop = threading.Event()
    cells: Any = [Idle(lambda: stop.wait(20)), Idle(lambda: stop.wait(20))]
    stacks = Stacks()
    of_cells: dict[int, Stack] = {0: (), 1: ()}
    stacks._of_actor = lambda cell, frame: of_cells[cells.index(cell)]  # type: ignore[method-assign,assignment]
    try:
        assert [stack for name, _, stack in stacks.samples(cells, threads=True) if name == "idle"] == [()]
        of_cells[1] = (STEP,)
        assert [stack for name, _, stack in stacks.samples(cells, threads=True) if name == "idle"] == [(STEP,)]
        assert [stack for _, _, stack in stacks.samples(cells, threads=False)] == [(), (STEP,)]
    finally:
        stop.set()


def test_a_heading_says_where_shares_exceed_all_of_the_time() -> None:
    samples = ProfileSamples()
    weights = (Weight((0,), 1.0, 0.0, 100), Weight((1,), 0.9, 0.0, 90))
    samples.add(Samples(1, 0, (LOAD, LEARN), 0, weights, 1.0, 0.0, 0))
    profile = Profile("workers", Extent(["gpus"], [1]).region, 100, samples)
    assert profile.heading()[-1] == "threads ran side by side: shares add up to 190%"


# -- PyTorch's traces --------------------------------------------------------------------------------------------------


def trace(*events: dict[str, Any], base: int = 0) -> dict[str, Any]:
    return {"baseTimeNanoseconds": base, "traceEvents": list(events)}


def test_traces_of_ranks_are_aligned_at_one_zero_of_time() -> None:
    add = {"ph": "X", "name": "add", "pid": 77, "tid": 1, "ts": 5.0, "dur": 2.0}
    label = {"ph": "M", "name": "process_labels", "pid": 77, "args": {"labels": "CPU"}}
    merged = merged_trace(
        [
            RankTrace(1, "trainers gpus=1", trace(add, base=3_000_000)),
            RankTrace(0, "trainers gpus=0", trace(label, add, base=1_000_000)),
        ]
    )["traceEvents"]
    adds = [event for event in merged if event["name"] == "add"]
    assert [event["ts"] for event in adds] == [5.0, 2005.0]
    assert len({event["pid"] for event in adds}) == 2
    names = {event["pid"]: event["args"]["name"] for event in merged if event["name"] == "process_name"}
    assert [names[event["pid"]] for event in adds] == ["trainers gpus=0 CPU", "trainers gpus=1"]
    order = {event["pid"]: event["args"]["sort_index"] for event in merged if event["name"] == "process_sort_index"}
    assert order[adds[0]["pid"]] < order[adds[1]["pid"]]


def test_a_fast_clock_is_corrected_and_arrows_stay_in_their_rank() -> None:
    flow = {"ph": "s", "id": 4, "name": "fwdbwd", "pid": 1, "tid": 1, "ts": 1.0}
    merged = merged_trace([RankTrace(0, "a", trace(flow)), RankTrace(1, "b", trace(flow), ahead=2.0)])["traceEvents"]
    first, second = (event for event in merged if event["name"] == "fwdbwd")
    assert (first["id"], second["id"]) == ("0.4", "1.4")
    assert first["ts"] - second["ts"] == pytest.approx(2e6)
