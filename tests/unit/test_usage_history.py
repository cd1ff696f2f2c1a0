"""Usage of processes: samples in constant memory, and how they are shown."""

from itertools import pairwise

import pytest

from monarch_kernel.views.curves import PARTS, common_lines
from monarch_nb.store.history import LONG_S, MOST_SAMPLES, PART_S, UsageHistory, UsageSample, common
from monarch_nb.telemetry.histories import MEASURES

pytestmark = pytest.mark.timeout(60)


def sample(time: float, cpu: float = 0.0) -> UsageSample:
    return UsageSample(time, cpu, 0.0, -1.0, 0.0, 0.0, 0.0)


def test_memory_is_constant_and_peaks_are_kept_as_samples_thin() -> None:
    history = UsageHistory()
    for second in range(3600):
        history.add("p", 0, sample(1e9 + second, cpu=7.5 if second == 1234 else 0.5))
    samples = history.of("p")[0]
    assert MOST_SAMPLES // 2 <= len(samples) < MOST_SAMPLES
    assert [item.cpu for item in samples if item.cpu > 1] == [7.5]
    assert samples[-1].at == 1e9 + 3599
    gaps = [later.at - earlier.at for earlier, later in pairwise(samples)]
    assert gaps[-1] == pytest.approx(1.0)
    assert gaps[0] > 8


def test_what_is_older_than_an_hour_goes() -> None:
    history = UsageHistory()
    for minute in range(1000):
        history.add("p", 0, sample(60.0 * minute))
    samples = history.of("p")[0]
    # Until the next thinning, half of what is kept may come on top.
    assert samples[0].at >= 60.0 * 999 - LONG_S - 60.0 * MOST_SAMPLES


def test_ranks_and_meshes_are_apart_and_the_oldest_meshes_go() -> None:
    history = UsageHistory()
    history.add("p", 1, sample(1.0, 1.0))
    history.add("p", 0, sample(2.0, 2.0))
    assert {rank: samples[0].cpu for rank, samples in history.of("p").items()} == {0: 2.0, 1: 1.0}
    for number in range(100):
        history.add(f"m{number}", 0, sample(3.0))
    assert history.of("p") == {}
    assert history.of("m99")


def test_many_ranks_are_three_curves_over_common_times() -> None:
    history, now = UsageHistory(), 1e9 + 3600.0
    for second in range(0, 3600, 30):
        for rank in range(1000):
            history.add("p", rank, sample(1e9 + second, cpu=float(rank)))
    parts = history.common("p")
    highest, mean, lowest = common_lines(MEASURES[0], parts, now)
    assert [line["label"] for line in (highest, mean, lowest)] == ["highest", "mean", "lowest"]
    for curve, value in ((highest, 999.0), (mean, 499.5), (lowest, 0.0)):
        points = curve["points"]
        assert isinstance(points, list)
        assert {y for _, y in points} == {value}
        assert 100 <= len(points) <= PARTS


def test_a_peak_of_all_ranks_names_its_rank_and_its_moment() -> None:
    history = UsageHistory()
    for second in range(7200):
        for rank in range(3):
            history.add("p", rank, sample(1e9 + second, cpu=5.0 if (second, rank) == (6000, 2) else 1.0))
    parts = history.common("p")
    assert len(parts) <= LONG_S / PART_S + 2
    peak = max(parts, key=lambda part: part.high[0])
    assert (peak.high[0], peak.rank[0], peak.when[0], peak.low[0]) == (5.0, 2, 1e9 + 6000, 1.0)
    assert peak.mean[0] == pytest.approx(1.0 + 4.0 / 15)
    assert common({rank: samples[-6:] for rank, samples in history.of("p").items()})[-1].mean == parts[-1].mean
