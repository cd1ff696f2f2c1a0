"""What processes have used: samples in constant memory, and how they are shown."""

from itertools import pairwise

import pytest

from monarch_kernel.views.histories import common
from monarch_nb.store.history import KEPT, LONG_S, UsageHistory, UsageSample

pytestmark = pytest.mark.timeout(60)


def sample(at: float, cpu: float = 0.0) -> UsageSample:
    return UsageSample(at, cpu, 0.0, -1.0, 0.0, 0.0, 0.0)


def test_memory_is_constant_and_peaks_are_kept_as_samples_thin() -> None:
    history = UsageHistory()
    for second in range(3600):
        history.add("p", 0, sample(1e9 + second, cpu=7.5 if second == 1234 else 0.5))
    kept = history.of("p")[0]
    assert KEPT // 2 <= len(kept) < KEPT
    assert [each.cpu for each in kept if each.cpu > 1] == [7.5]
    assert kept[-1].at == 1e9 + 3599
    gaps = [later.at - earlier.at for earlier, later in pairwise(kept)]
    assert gaps[-1] == pytest.approx(1.0)
    assert gaps[0] > 8


def test_what_is_older_than_an_hour_goes() -> None:
    history = UsageHistory()
    for minute in range(1000):
        history.add("p", 0, sample(60.0 * minute))
    kept = history.of("p")[0]
    # Until the next thinning, half of what is kept may come on top.
    assert kept[0].at >= 60.0 * 999 - LONG_S - 60.0 * KEPT


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
    ranks = [[(-2.0 + step / 60, float(rank)) for step in range(120)] for rank in range(1000)]
    highest, mean, lowest = common(ranks)
    assert [each["label"] for each in (highest, mean, lowest)] == ["highest", "mean", "lowest"]
    for curve, value in ((highest, 999.0), (mean, 499.5), (lowest, 0.0)):
        points = curve["points"]
        assert isinstance(points, list)
        assert {y for _, y in points} == {value}
        assert 100 <= len(points) <= 120
