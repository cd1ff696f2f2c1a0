"""How much of the ranks' output a front end receives."""

import pytest

from monarch_kernel.output.pacing import (
    BEGINNING,
    BYTES_BURST,
    FEW,
    LAST,
    LINES_BURST,
    LONGEST,
    RANK_BURST,
    HeldLines,
    Pacing,
)
from monarch_nb.logs.receiver import Written


def written(address: str, count: int, line: str = "x") -> Written:
    return Written(address, "stdout", "c:1", 0, 1.0, f"{line}\n" * count)


def shown_of(pacing: Pacing, waiting: dict[str, list[Written]], backlogs: dict[str, HeldLines]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for _, line in pacing.share(waiting, backlogs):
        counts[line.address] = counts.get(line.address, 0) + 1
    return counts


def test_a_flood_of_one_rank_takes_nothing_from_the_others() -> None:
    backlogs: dict[str, HeldLines] = {}
    waiting = {f"h/p.{rank}.0": [written(f"h/p.{rank}.0", 100_000 if rank == 3 else 200)] for rank in range(8)}
    shown = shown_of(Pacing(), waiting, backlogs)
    assert {count for address, count in shown.items() if address != "h/p.3.0"} == {200}
    assert shown["h/p.3.0"] <= RANK_BURST
    assert list(backlogs) == ["h/p.3.0"]
    assert shown["h/p.3.0"] + backlogs["h/p.3.0"].count == 100_000
    assert len(backlogs["h/p.3.0"].last) == LAST


def test_all_ranks_together_are_bounded_and_share_alike() -> None:
    backlogs: dict[str, HeldLines] = {}
    waiting = {f"h/p.{rank}.0": [written(f"h/p.{rank}.0", 900, "y" * 999)] for rank in range(8)}
    shown = shown_of(Pacing(), waiting, backlogs)
    assert sum(shown.values()) * 1000 <= BYTES_BURST
    assert max(shown.values()) - min(shown.values()) <= 1
    for address, count in shown.items():
        assert count + backlogs[address].count == 900


def test_lines_are_whole_and_in_order() -> None:
    backlogs: dict[str, HeldLines] = {}
    text = "".join(f"{number}\n" for number in range(3000))
    block = Written("h/p.0.0", "stdout", "c:1", 0, 1.0, text)
    shown = [line.text for _, line in Pacing().share({"h/p.0.0": [block]}, backlogs)]
    assert shown == [str(number) for number in range(len(shown))]
    assert [line.text for _, line in backlogs["h/p.0.0"].last] == [str(number) for number in range(3000 - LAST, 3000)]


def different(rank: int, count: int, since: int = 0) -> list[Written]:
    text = "".join(f"{rank} {number}\n" for number in range(since, since + count))
    return [Written(f"h/p.{rank}.0", "stdout", "c:1", 0, 1.0, text)]


def test_different_lines_are_bounded_equal_ones_counted_and_quiet_ranks_shown() -> None:
    backlogs: dict[str, HeldLines] = {}
    waiting = {f"h/p.{rank}.0": different(rank, 250 if rank else FEW) for rank in range(8)}
    shown = shown_of(Pacing(), waiting, backlogs)
    assert shown["h/p.0.0"] == FEW
    assert {count for address, count in shown.items() if address != "h/p.0.0"} == {BEGINNING}
    assert sum(shown.values()) <= LINES_BURST
    assert sum(shown.values()) + sum(backlog.count for backlog in backlogs.values()) == 7 * 250 + FEW
    same = {f"h/p.{rank}.0": [written(f"h/p.{rank}.0", 250)] for rank in range(8)}
    assert set(shown_of(Pacing(), same, {}).values()) == {250}


def test_a_flooding_rank_shows_nothing_until_it_has_been_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("monarch_kernel.output.pacing.time.monotonic", lambda: clock[0])
    pacing, backlogs = Pacing(), dict[str, HeldLines]()
    assert shown_of(pacing, {"h/p.0.0": different(0, 5000)}, backlogs) == {"h/p.0.0": BEGINNING}
    for second in range(5):  # as fast as allowed
        clock[0] += 1
        assert shown_of(pacing, {"h/p.0.0": different(0, 50, second * 50)}, backlogs) == {}
    for second in range(10):
        clock[0] += 1
        shown = shown_of(pacing, {"h/p.0.0": different(0, 5, second * 5)}, backlogs)
    assert shown == {"h/p.0.0": 5}
    shown_of(pacing, {"h/p.0.0": different(0, 5000)}, backlogs)
    pacing.reset()  # a new cell
    assert shown_of(pacing, {"h/p.0.0": different(0, 5)}, backlogs) == {"h/p.0.0": 5}


def test_the_backlog_is_short() -> None:
    backlogs: dict[str, HeldLines] = {}
    Pacing().share({"h/p.0.0": [written("h/p.0.0", 1000, "y" * 10_000)]}, backlogs)
    assert {len(line.text) for _, line in backlogs["h/p.0.0"].last} == {LONGEST}


@pytest.mark.parametrize("rank_lines", [10, 60, 400])
@pytest.mark.parametrize("length", [10, 5000])
def test_the_backlog_stays_in_order_whichever_bound_applies(rank_lines: int, length: int) -> None:
    waiting = {}
    for rank in range(40):
        text = "".join(f"{number} ".ljust(length, "y") + "\n" for number in range(rank_lines))
        waiting[f"h/p.{rank}.0"] = [Written(f"h/p.{rank}.0", "stdout", "c:1", 0, 1.0, text)]
    backlogs: dict[str, HeldLines] = {}
    shown = Pacing().share(waiting, backlogs)
    for address in waiting:
        of_rank = [int(line.text.split()[0]) for _, line in shown if line.address == address]
        backlog = [int(line.text.split()[0]) for _, line in backlogs[address].last] if address in backlogs else []
        assert of_rank == sorted(of_rank)
        assert backlog == sorted(backlog)
        assert max([*of_rank, *backlog]) == rank_lines - 1
