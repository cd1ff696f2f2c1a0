"""How much of what ranks print a front end is given."""

from monarch_kernel.pacing import BYTES_BURST, RANK_BURST, Held, Pacing
from monarch_nb.mesh.output import Written


def written(address: str, count: int, line: str = "x") -> Written:
    return Written(address, "stdout", "c:1", 0, 1.0, f"{line}\n" * count)


def shown_of(pacing: Pacing, waiting: dict[str, list[Written]], held: dict[str, Held]) -> dict[str, int]:
    found: dict[str, int] = {}
    for _, line in pacing.share(waiting, held):
        found[line.address] = found.get(line.address, 0) + 1
    return found


def test_a_flood_of_one_rank_takes_nothing_from_the_others() -> None:
    held: dict[str, Held] = {}
    waiting = {f"h/p.{rank}.0": [written(f"h/p.{rank}.0", 100_000 if rank == 3 else 200)] for rank in range(8)}
    shown = shown_of(Pacing(), waiting, held)
    assert {count for address, count in shown.items() if address != "h/p.3.0"} == {200}
    assert shown["h/p.3.0"] <= RANK_BURST
    assert list(held) == ["h/p.3.0"]
    assert shown["h/p.3.0"] + held["h/p.3.0"].count == 100_000
    assert len(held["h/p.3.0"].last) == 5


def test_all_ranks_together_are_bounded_and_share_alike() -> None:
    held: dict[str, Held] = {}
    waiting = {f"h/p.{rank}.0": [written(f"h/p.{rank}.0", 900, "y" * 999)] for rank in range(8)}
    shown = shown_of(Pacing(), waiting, held)
    assert sum(shown.values()) * 1000 <= BYTES_BURST
    assert max(shown.values()) - min(shown.values()) <= 1
    for address, count in shown.items():
        assert count + held[address].count == 900


def test_lines_are_whole_and_in_order() -> None:
    held: dict[str, Held] = {}
    text = "".join(f"{number}\n" for number in range(3000))
    one = Written("h/p.0.0", "stdout", "c:1", 0, 1.0, text)
    shown = [line.text for _, line in Pacing().share({"h/p.0.0": [one]}, held)]
    assert shown == [str(number) for number in range(len(shown))]
    assert [line.text for line in held["h/p.0.0"].last] == ["2995", "2996", "2997", "2998", "2999"]
