"""Which ranks are slow, from what they have sampled alone; and what a sampled stack says."""

import sys
from collections.abc import Sequence

import msgspec
import pytest

from monarch_nb.collectives.verbs import GroupKey
from monarch_nb.diagnosis.slow import MeasuredProcs, judge_times
from monarch_nb.diagnosis.slow_rank import callee_of
from monarch_nb.diagnosis.verbs import BegunCollectives, CallTime, RankTimes, TimeSpent

WORLD = GroupKey.of("0", (0, 1, 2, 3), "node1:29500")
STEP_S = 0.02
MODEL, DATA, SAVE = "/home/model.py:30", "/home/data.py:19", "/home/train.py:50"
Line = tuple[str, str, float]  # phase, line, share of the time
HEALTHY: tuple[Line, ...] = (("forward", MODEL, 0.5), ("data iterator", DATA, 0.1), ("collective", MODEL, 0.4))


def rank(
    lines: Sequence[Line] = HEALTHY,
    late: Sequence[float] = (0.0,),
    number: int = 100,
    *,
    ahead: float = 0.0,
    calls: Sequence[CallTime] = (),
    queued: float = 0.0,
    throttled: float = 0.0,
    groups: Sequence[tuple[GroupKey, Sequence[float]]] = (),
) -> RankTimes:
    """A rank that begins its collectives so many milliseconds after the others, in turns; also in each of `groups`."""
    begun = []
    for key, delays in groups or ((WORLD, late),):
        begins = [int(1e9 * (ahead + STEP_S * step + delays[step % len(delays)] / 1000)) for step in range(number)]
        begun.append(BegunCollectives(key, tuple(range(1, number + 1)), tuple(begins)))
    spent = tuple(TimeSpent(phase, source, share * 3.0) for phase, source, share in lines)
    return RankTimes(3.0, 500, spent, tuple(calls), tuple(begun), queued, throttled)


SLOW = (("forward", MODEL, 0.55), ("data iterator", DATA, 0.4), ("collective", MODEL, 0.05))


def procs(*ranks: RankTimes, clocks: dict[int, tuple[float, float]] | None = None) -> MeasuredProcs:
    return MeasuredProcs("trainers", dict(enumerate(ranks)), clocks or {})


def test_the_last_rank_that_waits_least_is_slow() -> None:
    (finding,) = judge_times(procs(rank(), rank(SLOW, late=[6.0]), rank(), rank()))
    assert (finding.kind, finding.ranks, finding.source, finding.sure) == ("slow", (1,), DATA, True)
    assert finding.text == (
        "ranks [1] holds the others up for 35 % of the time: it begins collectives 6.0 ms later than the others, in "
        "the mean of 100; work of its own takes 95 % of the time, that of the others 60 %; most of the difference is "
        "in the data iterator, at data.py:19 (40 % of the time, elsewhere 10 %)"
    )


def test_two_slow_ranks_are_named_together() -> None:
    (finding,) = judge_times(procs(*(rank() for _ in range(6)), rank(SLOW, late=[6.0]), rank(SLOW, late=[5.9])))
    assert (finding.ranks, finding.sure) == ((6, 7), True)
    assert "hold the others up for 35 % of the time: the slowest begins collectives 6.0 ms later" in finding.text


@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param([rank(), rank(), rank(), rank()], id="equal"),
        pytest.param([rank(), rank(SLOW), rank(), rank()], id="busy, but not late"),
        pytest.param([rank(), rank(late=[6.0]), rank(), rank()], id="late, but it waits as others do"),
        pytest.param([rank(SLOW, late=[6.0])], id="one rank"),
        pytest.param(
            [rank(SLOW, late=[5000.0] + 99 * [0.0]), *(rank(late=[0.0, 0.1 * r]) for r in (1, 2, 3))],
            id="one long event, as rank 0 saves",
        ),
        pytest.param([rank(SLOW, number=0), rank(number=0)], id="nothing that both take part in"),
        pytest.param([rank(SLOW, late=[0, 6, 0, 0]), *(rank(late=[0, 0, 6, 6]) for _ in range(2))], id="in turns"),
    ],
)
def test_a_healthy_program_has_no_finding(ranks: list[RankTimes]) -> None:
    assert judge_times(procs(*ranks)) == ()


def test_a_model_that_is_slower_as_a_whole() -> None:
    lines = [(f"/home/model.py:{line}", share) for line, share in ((1, 0.3), (2, 0.2), (3, 0.1))]
    healthy = [*(("forward", line, share) for line, share in lines), ("collective", MODEL, 0.4)]
    slow = [*(("forward", line, 1.5 * share) for line, share in lines), ("collective", MODEL, 0.1)]
    (finding,) = judge_times(procs(rank(healthy), rank(slow, late=[6.0]), rank(healthy)))
    assert finding.source == "/home/model.py:1"
    assert finding.text.endswith("most of the difference is in the forward pass (90 % of the time, elsewhere 60 %)")


def test_few_collectives_and_early_ones_are_a_suspicion() -> None:
    few = judge_times(procs(rank(number=8), rank(SLOW, late=[6.0], number=8), rank(number=8)))
    early = judge_times(procs(rank(), rank(SLOW, late=[6.0] * 30 + [0.0] * 70), rank(), rank()))
    assert [finding.sure for finding in (*few, *early)] == [False, False]


def test_one_collective_of_four_shows_the_slow_rank() -> None:
    def noise(seed: int) -> list[float]:
        return [0.0] + [((seed * step * 7919) % 13) / 100 for step in range(1, 40)]

    late = noise(1)
    late[::4] = [6.0] * 10
    (finding,) = judge_times(procs(rank(late=noise(2)), rank(SLOW, late=late), rank(late=noise(3))))
    assert (finding.ranks, finding.sure) == ((1,), True)


@pytest.mark.parametrize(("queued", "sure"), [(0.0, True), (0.9, False)])
def test_a_crowded_machine_makes_a_slow_rank_a_suspicion(queued: float, sure: bool) -> None:
    slow = rank(SLOW, late=[6.0], queued=queued + 0.9)
    (finding,) = judge_times(procs(rank(queued=queued), slow, rank(queued=queued)))
    assert finding.sure is sure
    assert "waiting for a free processor takes" in finding.text


def test_a_rank_slow_for_less_than_a_second_is_a_suspicion() -> None:
    (finding,) = judge_times(procs(*(rank(SLOW if r == 1 else HEALTHY, [6.0 * (r == 1)], 45) for r in range(3))))
    assert finding.sure is False


def test_ranks_that_a_slow_one_delays_elsewhere_are_innocent() -> None:
    """Rank 0 is slow; rank 1 waits for it in their group, and is late for rank 3."""
    tensor, second_tensor = GroupKey.of("1", (0, 1), ""), GroupKey.of("2", (2, 3), "")
    data, second_data = GroupKey.of("3", (0, 2), ""), GroupKey.of("4", (1, 3), "")
    (finding,) = judge_times(
        procs(
            rank(SLOW, groups=[(tensor, [6.0]), (data, [6.0])]),
            rank(groups=[(tensor, [0.0]), (second_data, [6.0])]),
            rank(groups=[(second_tensor, [0.0]), (data, [0.0])]),
            rank(groups=[(second_tensor, [0.1]), (second_data, [0.0])]),
        )
    )
    assert (finding.ranks, finding.sure) == ((0,), True)
    assert "6.0 ms later than the others, in the mean of 200" in finding.text


def test_ranks_without_collectives_are_compared_by_their_calls() -> None:
    def calls(seconds: float) -> list[CallTime]:
        return [CallTime(f"c{number}", "trainers.step", seconds) for number in range(20)]

    idle = (("", MODEL, 0.5), ("idle", "", 0.5))
    slow = (("", MODEL, 0.9), ("idle", "", 0.1))
    ranks = [rank(idle, number=0, calls=calls(0.05)), rank(slow, number=0, calls=calls(0.09))]
    (finding,) = judge_times(procs(*ranks))
    assert (finding.ranks, finding.source, finding.sure) == ((1,), MODEL, True)
    assert "it takes 40.0 ms longer for a call, in the mean of 18" in finding.text


def test_clocks_of_other_machines_are_corrected() -> None:
    ranks = rank(), rank(SLOW, late=[6.0], ahead=-40.0), rank(), rank()
    (finding,) = judge_times(procs(*ranks, clocks={1: (-40.001, -39.999)}))
    assert finding.ranks == (1,)
    assert judge_times(procs(*ranks, clocks={1: (-40.02, -39.98)})) == ()


@pytest.mark.parametrize(
    ("rank_times", "cause"),
    [
        (rank(SLOW, late=[6.0], queued=0.9), "waiting for a free processor takes 30 % of the time, elsewhere 0 %"),
        (rank(SLOW, late=[6.0], throttled=0.9), "the limit of its container takes 30 % of the time, elsewhere 0 %"),
    ],
)
def test_a_reason_outside_of_the_program_is_named(rank_times: RankTimes, cause: str) -> None:
    (finding,) = judge_times(procs(rank(), rank_times, rank()))
    assert finding.text.endswith(cause)


def test_the_function_that_an_instruction_calls_is_named() -> None:
    names = []

    class Work:
        def wait(self) -> "Work":
            frame = sys._getframe(1)
            names.append(callee_of(frame.f_code, frame.f_lasti))
            return self

    def make(work: Work) -> Work:
        return work

    work = Work()
    work.wait()
    make(work).wait()
    (make(make(work)), work.wait())
    wait = work.wait
    wait()
    [work.wait() for _ in range(2)]
    assert names == ["wait"] * 6
    assert callee_of(Work.wait.__code__, 0) == ""


def test_a_time_without_samples_has_no_finding() -> None:
    assert judge_times(MeasuredProcs("trainers", {}, {})) == ()


def test_a_gpu_that_is_slowed_down_is_named() -> None:
    slow = msgspec.structs.replace(rank(SLOW, late=[6.0]), gpu="it is too hot (91 °C)", gpu_share=1.0)
    (finding,) = judge_times(procs(rank(), slow, rank()))
    assert "; its GPU runs slower than it could: it is too hot (91 °C)" in finding.text
    assert "its GPU is busy" not in finding.text, "that of the others is not known"
    healthy = msgspec.structs.replace(rank(), gpu_share=0.62)
    (finding,) = judge_times(procs(healthy, slow, healthy))
    assert "; its GPU is busy for 100 % of the time, those of the others for 62 %" in finding.text
