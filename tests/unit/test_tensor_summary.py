"""The summary of live tensors: their sizes on each rank, the bytes that a cell has moved, and their display."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from monarch_kernel.display.html import LEFT
from monarch_kernel.display.tensors import module_html, module_text, tensors_html
from monarch_kernel.tensors import TensorListing
from monarch_nb.store import ClusterState
from monarch_nb.store import events as e
from monarch_nb.tensor.errors import ProgramLine
from monarch_nb.tensor.propagation import MeshLayout, Meta
from monarch_nb.tensor.references import LiveTensor, Moved, Synchronised
from monarch_nb.tensor.summary import Movement, Summary, busy_text, by_dimension, live_bytes, moved_text, summary_of
from monarch_nb.tensor.verbs import MemoryUsed, Spent

pytestmark = pytest.mark.timeout(60)
LAYOUT = MeshLayout((4, 2), ("data", "model"))
LINE = ProgramLine("/tmp/ipykernel_1/123.py", 7, "<module>")


def meta(*shape: int, placed: tuple[Any, Any] = (Shard(0), Replicate()), dtype: torch.dtype = torch.float32) -> Meta:
    return Meta.of(LAYOUT, shape, dtype, placed)


def moved(line: int, collective: str, count: int, nbytes: int, dimension: str = "data") -> Moved:
    return Moved(LINE._replace(line=line), "aten.mm", collective, dimension, count, nbytes)


def summed(live: list[LiveTensor] = [], moves: list[Moved] = [], waits: list[Synchronised] = []) -> Summary:  # noqa: B006
    return summary_of("tensors", LAYOUT, live, moves, waits, names={1: "w"}, file_name=lambda file: "Cell In[3]")


def test_bytes_on_each_rank_are_those_of_its_parts() -> None:
    nbytes = live_bytes([meta(5, 7), meta(5, 7), meta(8, placed=(Replicate(), Shard(0)), dtype=torch.bfloat16)], 8)
    assert nbytes == [2 * 56 + 8, 2 * 56 + 8] * 2 + [2 * 28 + 8] * 2 + [8] * 2


def test_largest_tensors_come_first_with_name_and_creating_line() -> None:
    summary = summed([LiveTensor(2, meta(8, 8), LINE), LiveTensor(1, meta(64, 64, placed=(Shard(0), Shard(1))), None)])
    first, second = summary.rows
    assert (first.name, first.title, first.placement, first.each) == (
        "w",
        "64×64 float32",
        ("Shard(0)", "Shard(1)"),
        2048,
    )
    assert (second.name, second.line.at) == ("", "Cell In[3]:7")
    assert (summary.count, summary.nbytes, summary.largest) == (2, 64 * 64 * 4 + 8 * 8 * 4, 2048 + 64)


def test_only_so_many_are_listed_and_all_are_counted() -> None:
    summary = summed([LiveTensor(number, meta(8, 8), LINE) for number in range(500)])
    assert len(summary.rows) == 60
    assert (summary.count, summary.live[0]) == (500, 500 * 64)


def test_shards_moved_by_a_cell_are_one_sentence_by_dimension() -> None:
    summary = summed(
        moves=[
            moved(7, "all_gather_into_tensor", 9, 900 << 20),
            moved(9, "all_gather_into_tensor", 5, 300 << 20, "model"),
            moved(9, "all_reduce_", 1, 24, "model"),
        ]
    )
    assert (
        moved_text(summary.moved)
        == "the last cell moved 1.17 GB in 14 all-gathers and 1 all-reduce; 9 of them from Cell In[3]:7"
    )
    assert by_dimension(summary.moved)[0] == ("data", "all-gather", 9, 900 << 20)
    assert moved_text(summed(moves=[moved(7, "reduce_scatter_tensor", 1, 64)]).moved) == (
        "the last cell moved 64 B in 1 reduce-scatter, from Cell In[3]:7"
    )
    assert moved_text(()) == "the last cell moved nothing between ranks"


def test_ranks_report_busy_time_in_the_cell_and_their_memory() -> None:
    def rank(index: int) -> MemoryUsed:
        times = [Spent(3, (0,), 0.010 + index / 1000), Spent(3, (0, 1), 1.5), Spent(2, (1,), 9.0)]
        return MemoryUsed(index << 20, (index + 1) << 20, 16 << 20, times)

    used = [rank(index) for index in range(8)]
    summary = summary_of("tensors", LAYOUT, [], [moved(7, "all_reduce", 1, 8)], [], used=used, cell=3)
    assert busy_text(summary.busy) == (
        "ranks were busy with it, or waited for each other, for 17.0 ms along data (the quickest 10.0 ms), "
        "1.50 s along data and model"
    )
    text, html = repr(shown(summary)), tensors_html(shown(summary))
    assert "memory of the processes: 0: 1.00 MB  1: 2.00 MB" in text
    for line in (busy_text(summary.busy), "at most 16.0 MB on each rank so far"):
        assert line in text
        assert line in html
    assert summary.live[7] == 7 << 20  # as measured
    assert summary_of("tensors", LAYOUT, [], [], [], used=used, cell=3).busy == ()  # it counts movements only


def test_tensors_of_lost_meshes_are_listed_with_the_reason() -> None:
    live = [LiveTensor(1, meta(64, 64), LINE), LiveTensor(2, meta(8, 8), LINE)]
    stopped = summary_of("tensors", LAYOUT, live, [], [], names={1: "w"}, lost="the mesh was stopped: by client")
    for text in (repr(shown(stopped)), tensors_html(shown(stopped))):
        assert "2 tensors, lost" in text
        assert "the mesh was stopped: by client" in text
        assert "64×64 float32" in text
        assert "live" not in text
        assert "the last cell" not in text
    healed = summary_of("tensors", LAYOUT, live, [], [], lost_numbers={2: "a process has ended"})
    assert (healed.gone, healed.largest, [row.lost for row in healed.rows]) == (1, 4096, [False, True])
    assert "1 of them lost" in repr(shown(healed))
    assert "1 of them lost" in tensors_html(shown(healed))


def shown(summary: Summary, *, waits: bool = False) -> TensorListing:
    tensors = TensorListing.__new__(TensorListing)
    tensors.waits, tensors.meshes = waits, {"1": summary}
    return tensors


def test_text_and_html_tell_the_same() -> None:
    summary = summed(
        [LiveTensor(1, meta(64, 64, placed=(Partial(), Shard(1))), LINE), LiveTensor(2, meta(5, 7), LINE)],
        [moved(7, "all_reduce", 3, 3 << 20)],
        [Synchronised(LINE, "item", 3)],
    )
    tensors = shown(summary)
    text, html = repr(tensors), tensors_html(tensors)
    for part in (
        "64×64 float32",
        "Partial(sum) Shard(1)",
        "Cell In[3]:7",
        "3.00 MB in 3 all-reduces",
        "waited 3 times",
    ):
        assert part in text
        assert part in html
    assert "live: 0-3: 8.05 kB  4-5: 8.03 kB  6-7: 8.00 kB" in text
    assert "live by rank: 8.00 kB to 8.05 kB" in html
    waits = shown(summary, waits=True)
    assert "Cell In[3]:7  item        3" in repr(waits)
    assert f"<td{LEFT}>item</td><td{LEFT}>3</td>" in tensors_html(waits)


def test_a_module_is_a_table_of_its_parameters_with_their_pictures() -> None:
    copied = meta(64, placed=(Replicate(), Replicate()))
    html = module_html("net: Sequential", [("0.weight", meta(64, 32)), ("0.<b>", copied)])
    assert "2 sharded tensors" in html
    assert html.count("<img") == 2
    assert "0.&lt;b&gt;" in html
    assert "Shard(0) Replicate()" in html
    assert module_text([("0.weight", meta(64, 32)), ("0.bias", copied)]).splitlines() == [
        "parameter  tensor         placement                on a rank",
        "0.weight   64×32 float32  Shard(0) Replicate()     2.00 kB",
        "0.bias     64 float32     Replicate() Replicate()  256 B",
        "by rank: 2.25 kB on each rank",
    ]


def test_the_store_has_the_summary_until_the_mesh_is_gone() -> None:
    cluster, record = ClusterState(), summed([LiveTensor(1, meta(8, 8), LINE)]).record
    cluster.fold(e.TensorsSeen("1", record))
    assert cluster.take() == {"tensors": {"1": record}}
    cluster.fold(e.TensorsSeen("1", {}))
    assert cluster.take() == {"tensors": {"1": None}}
    assert cluster.document["tensors"] == {}


def test_movements_of_one_line_are_kept_apart_by_operation() -> None:
    move = Movement(summed(moves=[moved(7, "all_reduce", 1, 8)]).moved[0].line, "aten.add", "all-reduce", "data", 1, 8)
    assert by_dimension([move, move]) == [("data", "all-reduce", 2, 16)]


def test_names_come_from_variables_and_from_parameters_of_modules() -> None:
    from monarch_kernel.tensors import names_of
    from monarch_nb.tensor.handle import MeshTensor

    stream: Any = SimpleNamespace(number=4, device=torch.device("cpu"), queue=[], table=SimpleNamespace(entries={}))

    def handle(number: int) -> MeshTensor:
        return MeshTensor(meta(8, 8), SimpleNamespace(stream=stream, number=number))  # type: ignore[arg-type]

    net = torch.nn.Module()
    net.weight = torch.nn.Parameter(torch.zeros(2))  # a local one has no place
    net.register_buffer("mask", handle(2))
    assert names_of({"t": handle(1), "_1": handle(3), "net": net, "n": 5}) == {(4, 1): "t", (4, 2): "net.mask"}
