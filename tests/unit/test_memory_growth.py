"""Which ranks use more memory than others, and what grows: from readings alone."""

import msgspec
import pytest

from monarch_nb.diagnosis.memory import is_steady, judge_growth, judge_memory
from monarch_nb.diagnosis.memory_rank import Growth, MemoryGrowth
from monarch_nb.diagnosis.verbs import GpuMemory, ProcessMemory, TensorsAlike
from monarch_nb.host.procs.children import MemoryReadings
from monarch_nb.wire import size_text

MB = 1 << 20
LINE = "/home/train.py:41"


def names(ranks: object) -> str:
    return f"ranks {list(ranks)}"  # type: ignore[call-overload]


def use(megabytes: int, free: int = 16_000, tensors: tuple[TensorsAlike, ...] = ()) -> ProcessMemory:
    size = megabytes * MB
    return ProcessMemory(size, "Pss", size, size, 32_000 * MB, free * MB, 0, 0, tensors)


def growth(*lines: Growth, resident: tuple[int, ...] = (100, 100, 100, 100, 100)) -> MemoryGrowth:
    return MemoryGrowth(20.0, Growth("", "resident", "cpu", 1, tuple(MB * size for size in resident)), lines, ())


def line(*megabytes: float, count: int = 40, source: str = LINE) -> Growth:
    return Growth(source, "float32 [64, 1024]", "cpu", count, tuple(int(MB * size) for size in megabytes))


@pytest.mark.parametrize(
    ("sizes", "grows"),
    [
        ((0, 1, 2, 3, 4), True),
        ((100, 101, 102, 103, 104), True),
        ((0, 4, 4, 4, 4), False),  # a cache that is full, an optimizer's state
        ((0, 0, 0, 0, 4), False),  # once, at the end
        ((0, 2, 4, 4, 4), False),  # it has stopped
        ((4, 3, 2, 1, 0), False),
        ((0, 4, 2, 5, 4), False),
    ],
)
def test_memory_that_grows_throughout_is_told_from_a_single_step(sizes: tuple[int, ...], grows: bool) -> None:
    assert is_steady(sizes) is grows


def test_the_line_that_allocates_what_stays_is_named() -> None:
    growths = {
        0: growth(line(0, 20, 20, 20, 20)),
        1: growth(line(0, 5, 10, 15, 20), line(0, 1, 2, 3, 4, source="/home/other.py:1")),
        2: growth(line(0, 5, 10, 15, 21)),
    }
    (finding,) = judge_growth("trainers", growths, names)
    assert (finding.kind, finding.ranks, finding.source, finding.sure) == ("memory", (1, 2), LINE, True)
    assert finding.text == (
        "ranks [1, 2] grow by 21.0 MB and less in 20 s at train.py:41: what is allocated there stays, such as 40 "
        "tensors float32 [64, 1024]"
    )


def test_few_allocations_and_unexplained_memory_are_suspicions() -> None:
    few = judge_growth("trainers", {0: growth(line(0, 5, 10, 15, 20, count=4))}, names)
    hidden = judge_growth("trainers", {0: growth(resident=(100, 120, 140, 160, 180))}, names)
    assert [(finding.sure, finding.source) for finding in (*few, *hidden)] == [(False, LINE), (False, "")]
    assert "neither objects of Python nor tensors" in hidden[0].text
    assert judge_growth("trainers", {0: growth(line(0, 0.1, 0.2, 0.3, 0.4))}, names) == ()


def test_a_rank_that_uses_much_more_is_suspected_with_its_tensors() -> None:
    big = TensorsAlike("float32 [4096, 4096]", "cpu", 12, 800 * MB)
    uses = {0: use(1900, tensors=(big,)), 1: use(1000), 2: use(1010)}
    (finding,) = judge_memory("trainers", uses, dict.fromkeys(uses, "a"), names)
    assert (finding.ranks, finding.sure) == ((0,), False)
    assert finding.text == (
        "ranks [0] uses 1.86 GB, the others 0.98 GB; 12 tensors float32 [4096, 4096] take 800 MB, elsewhere 0 B"
    )
    assert judge_memory("trainers", {0: use(150), 1: use(100)}, {0: "a", 1: "a"}, names) == ()


def test_a_host_with_next_to_no_memory_left_is_named() -> None:
    uses = {0: use(1000), 1: use(1000), 2: use(1000, free=900)}
    (finding,) = judge_memory("trainers", uses, {0: "a", 1: "a", 2: "b"}, names)
    assert (finding.ranks, finding.sure) == ((2,), True)
    assert finding.text == "ranks [2] uses 0.98 GB; host b has 900 MB of 31.2 GB left"


def test_a_full_gpu_is_named_with_who_has_it() -> None:
    def on_gpu(own: int, used: int) -> ProcessMemory:
        return msgspec.structs.replace(use(100), gpu=GpuMemory(0.5, own * MB, used * MB, 80_000 * MB))

    uses = {0: on_gpu(20_000, 79_000), 1: on_gpu(30_000, 79_000), 2: on_gpu(20_000, 40_000)}
    (finding,) = judge_memory("trainers", uses, {0: "a", 1: "a", 2: "b"}, names)
    assert (finding.ranks, finding.sure) == ((0, 1), True)
    assert finding.text == (
        "ranks [0, 1]: their GPU on host a has 0.98 GB of 78.1 GB left; 48.8 GB are in use by them, 28.3 GB by other "
        "processes"
    )
    (finding,) = judge_memory("trainers", {0: on_gpu(-1, 79_000)}, {0: "a"}, names)
    assert finding.text == "ranks [0]: its GPU on host a has 0.98 GB of 78.1 GB left"


def test_readings_before_a_death_are_few_and_reach_far_back() -> None:
    readings = MemoryReadings()
    assert readings.text(0.0) == ""
    for second in range(601):
        readings.add(float(second), (second + 1) * MB)
    parts = readings.text(601.0).split(", ")
    assert parts[0] == "601 MB 1 s before"
    assert 3 <= len(parts) <= 6
    assert parts[-1] == "1.00 MB 601 s before"


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.98 kB"),
        (4 << 20, "4.00 MB"),
        (1000 << 20, "0.98 GB"),
        (16 << 30, "16.0 GB"),
    ],
)
def test_sizes_have_three_digits(size: float, text: str) -> None:
    assert size_text(size) == text
