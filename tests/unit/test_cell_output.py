"""Output of ranks, as cells show it: equal lines once, storms folded, and nothing in the wrong cell."""

import random
import re
from typing import Any

import pytest

from monarch_kernel.output import CellOutput
from monarch_kernel.output.grouping import MOST_PIECES, Grouping, TextPiece, merge_pieces
from monarch_kernel.output.pacing import LINES, LINES_BURST
from monarch_nb.logs import Line
from monarch_nb.logs.lines import Sources
from monarch_nb.logs.mesh_logs import LogOption
from tests.unit.log_tools import Cluster

pytestmark = pytest.mark.timeout(60)

RANKS = 4


class Page:
    """A notebook's page, with the output of each cell: a front end that knows the cell of each call."""

    has_displays = True

    def __init__(self) -> None:
        self.parent: Any = "cell"
        self.beginning: list[Any] = []
        self.streams: dict[str, str] = {}
        self.messages = 0
        self.displays: dict[str, Any] = {}
        self.homeless: set[str] = set()

    def write(self, text: str, name: str = "stdout", cell: Any = None) -> None:
        self.streams[cell or self.parent] = self.streams.get(cell or self.parent, "") + text
        self.messages += 1

    def display(self, bundle: Any, display_id: str, *, update: bool = False, cell: Any = None) -> None:
        assert update == (display_id in self.displays)
        self.displays[display_id] = bundle

    def of(self, address: str, call: str) -> Any:
        return None if call in self.homeless else f"cell of {call}" if call else self.parent


class Ranks(Cluster):
    """Some ranks that write, and a page that shows their output. Nothing is shown before `settle`."""

    def __init__(self) -> None:
        super().__init__(RANKS)
        self.page: Any = Page()
        self.output = CellOutput(self.page, self.logs, self.page)
        self.logs.present(self.output)

    def write(self, rank: int, text: str, call: str = "", **options: Any) -> int:
        end = self.logs.positions[f"h/p.{rank}.0"] = super().write(rank, text, call, **options)
        return end

    @property
    def shown(self) -> str:
        return str(self.page.streams.get("cell", ""))

    @property
    def fold(self) -> Any:
        [fold] = self.page.displays.values()
        return fold


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    clock = [100.0]
    monkeypatch.setattr("monarch_kernel.output.pacing.time.monotonic", lambda: clock[0])
    return clock


@pytest.fixture
def ranks(clock: list[float]) -> Ranks:
    return Ranks()


def test_equal_lines_that_come_together_are_one(ranks: Ranks) -> None:
    for rank in range(RANKS):
        ranks.write(rank, f"same\nrank {rank}\n")
    ranks.output.settle()
    assert ranks.shown.splitlines() == ["[gpus=0-3] same", *(f"[gpus={rank}] rank {rank}" for rank in range(RANKS))]


def test_many_lines_come_in_one_message(ranks: Ranks) -> None:
    for rank in range(RANKS):
        ranks.write(rank, "".join(f"{number}\n" for number in range(200)))
    ranks.output.settle()
    assert ranks.shown.splitlines() == [f"[gpus=0-3] {number}" for number in range(200)]
    assert ranks.page.messages == 1


def test_equal_lines_are_apart_where_that_is_wanted(ranks: Ranks) -> None:
    ranks.logs.options.set_merging("p", False)
    for rank in (0, 1):
        ranks.write(rank, "same\n")
    ranks.output.settle()
    assert ranks.shown == "[gpus=0] same\n[gpus=1] same\n"


def test_lines_go_to_their_calls_cell_or_only_to_logs(ranks: Ranks) -> None:
    ranks.page.homeless.add("thread")
    for call in ("1", "2", "thread"):
        ranks.write(0, f"of {call}\n", call)
    ranks.output.settle()
    assert ranks.page.streams == {"cell of 1": "[gpus=0] of 1\n", "cell of 2": "[gpus=0] of 2\n"}


def test_muted_meshes_are_silent_and_those_with_a_window_are_gathered(ranks: Ranks) -> None:
    ranks.logs.set_option("p", LogOption(stream=False))
    ranks.write(0, "unheard\n")
    ranks.logs.set_option("p", LogOption(stream=True, window=60.0))
    for rank in (0, 1, 0, 1):
        ranks.write(rank, "again\n")
    ranks.output.flush()
    assert ranks.shown == ""
    ranks.output.settle()
    assert ranks.shown == "[gpus=0-1] again (4 times)\n"


def test_a_flood_of_one_rank_is_folded_without_harming_the_others(ranks: Ranks, clock: list[float]) -> None:
    for number in range(0, 60_000, 1000):
        ranks.write(0, "".join(f"flood {line}\n" for line in range(number, number + 1000)))
        ranks.output.flush()
        clock[0] += 0.08
    for rank in range(RANKS):
        ranks.write(rank, "".join(f"calm {rank} {number}\n" for number in range(100)))
        clock[0] += 2.0
        ranks.output.settle()
    for rank in range(1, RANKS):
        assert all(f"[gpus={rank}] calm {rank} {number}\n" in ranks.shown for number in range(100))
    flood = ranks.shown.count("flood")
    calm = ranks.shown.count("calm 0")
    assert f"… {60_000 - flood + 100 - calm:,} more lines" in ranks.fold["text/plain"]
    assert "[gpus=0] calm 0 99" in ranks.fold["text/plain"], "the last line that was held back"


@pytest.mark.parametrize("seed", range(10))
def test_a_storm_ends_in_one_fold_with_each_ranks_last_lines(ranks: Ranks, clock: list[float], seed: int) -> None:
    """At any pace and in any pieces."""
    chance = random.Random(seed)
    queues = {rank: [f"rank {rank} line {number}\n" for number in range(6000)] for rank in range(RANKS)}
    start = clock[0]
    while any(queues.values()):
        rank = chance.choice([rank for rank, lines in queues.items() if lines])
        count = chance.choice([1, 40, 300, 2000])
        ranks.write(rank, "".join(queues[rank][:count]))
        del queues[rank][:count]
        if chance.random() < 0.3:
            clock[0] += chance.choice([0.08, 0.08, 1.0])
            ranks.output.flush()
    ranks.output.settle()
    shown = ranks.shown.count("rank ")
    assert shown <= LINES_BURST + LINES * (clock[0] - start) + RANKS
    assert f"[gpus=0-3] … {24_000 - shown:,} more lines, the last 800 here" in ranks.fold["text/html"]
    details, _, rest = ranks.fold["text/html"].partition("</details>")
    for rank in range(RANKS):
        assert f"[gpus={rank}] rank {rank} line 5999\n" in details
        assert f"[gpus={rank}] rank {rank} line 5999\n" in rest
    for begin in ranks.page.beginning:  # the next cell has room again
        begin()
    for rank in range(RANKS):
        ranks.write(rank, f"one {rank}\n")
    ranks.output.settle()
    assert re.findall(r"one (\d)", ranks.shown) == ["0", "1", "2", "3"]


def test_lines_that_were_never_sent_are_counted_in_the_fold(ranks: Ranks) -> None:
    ranks.write(0, "seen\n", skipped=1234)
    ranks.output.settle()
    assert ranks.shown == "[gpus=0] seen\n"
    assert "… 1,234 more lines" in ranks.fold["text/plain"]


def test_bars_are_one_line_each_in_the_order_of_ranks(ranks: Ranks) -> None:
    for rank in (2, 0):
        ranks.write(rank, f"\r{rank} 10%\r{rank} 20%")
    assert ranks.output.progress() == "[gpus=0] 0 20%\n[gpus=2] 2 20%"


def bar(done: int, seconds: int, values: str = "") -> str:
    return f"step:  {10 * done}%|███  | {done}/10 [00:0{seconds}<00:02, {done / seconds:.2f}it/s{values}]"


def test_equal_bars_of_ranks_are_one_as_far_as_the_last(ranks: Ranks) -> None:
    for rank, done in ((0, 4), (1, 3), (2, 5)):
        ranks.write(rank, f"\r{bar(done, rank + 1)}")
    ranks.write(3, f"\r{bar(9, 1, ', loss=0.5')}")
    assert ranks.output.progress() == f"[gpus=0-2] {bar(3, 2)}\n[gpus=3] {bar(9, 1, ', loss=0.5')}"
    for rank in range(3):
        ranks.write(rank, f"\r{bar(10, rank + 1)}\n")
    ranks.output.settle_lines()
    assert ranks.shown == f"[gpus=0-2] {bar(10, 1)}\n"


def test_where_streams_take_turns_all_the_time_each_comes_as_one() -> None:
    few = [TextPiece("cell", stream, "x\n") for stream in ("stdout", "stdout", "stderr", "stdout")]
    assert [(piece.stream, piece.text) for piece in merge_pieces(few)] == [
        ("stdout", "x\nx\n"),
        ("stderr", "x\n"),
        ("stdout", "x\n"),
    ]
    many = [TextPiece("cell", ("stdout", "stderr")[number % 2], f"{number}\n") for number in range(2 * MOST_PIECES)]
    assert [piece.stream for piece in merge_pieces(many)] == ["stdout", "stderr"]
    assert merge_pieces(many)[0].text == "".join(f"{number}\n" for number in range(0, 2 * MOST_PIECES, 2))


def test_a_line_that_one_rank_repeats_is_not_merged_with_itself() -> None:
    grouping = Grouping(cell_of=lambda _: "cell", source_of=Sources({}).of, merges=lambda _: True, take=None)
    lines = [Line(f"h/p.{rank}.0", "x") for rank in (0, 0, 1)]
    texts = [piece.text for piece in grouping.pieces(lines, named=False) if isinstance(piece, TextPiece)]
    assert texts == ["[rank=0-1] x\n", "[rank=0] x\n"]
