"""The parts of a feed, without processes: rows out of batches, steps that are held, columns of Arrow's memory."""

import contextlib
import ctypes
import datetime
import gc
import itertools
import random
from pathlib import Path

import numpy as np
import pytest

from monarch_nb.data import ArrowError, arrow
from monarch_nb.data.feed import Ledger, Rows, Step, batches_of, rows_of

pytestmark = pytest.mark.timeout(60)


def test_rows_keep_their_order_for_all_sizes_of_batches_and_takes() -> None:
    chance = random.Random(5)
    for _ in range(200):
        sizes = [chance.randrange(0, 7) for _ in range(chance.randrange(1, 12))]
        starts = np.cumsum([0, *sizes])
        batches = [{"x": np.arange(a, b), "t": [str(n) for n in range(a, b)]} for a, b in itertools.pairwise(starts)]
        rows = Rows(batches)
        skipped = rows.skip(chance.randrange(0, 5))
        values: list[int] = []
        while (batch := rows.take(size := chance.randrange(1, 9))) is not None:
            assert rows_of(batch) <= size
            assert batch["t"] == [str(n) for n in batch["x"]]
            values += batch["x"].tolist()
        assert values == list(range(skipped, sum(sizes)))
        assert rows.take(3) is None


def test_rows_of_one_batch_are_not_copied() -> None:
    column = np.arange(100)
    rows = Rows([{"x": column}])
    batch = rows.take(30)
    assert batch is not None
    assert np.shares_memory(batch["x"], column)


def test_columns_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="have one length"):
        Rows([{"a": [1], "b": [1, 2]}]).take(1)


def test_steps_held_are_bounded_by_the_slowest_rank() -> None:
    chance = random.Random(6)
    for _ in range(100):
        ranks, ahead, last = chance.randrange(1, 5), chance.randrange(1, 4), chance.randrange(0, 20)
        ledger = Ledger(ranks, ahead)
        while ledger.slowest < last or ledger.ended is None:
            if ledger.may_read() and chance.random() < 0.7:
                ledger.add(Step([], ledger.next, 0) if ledger.next < last else None)
            rank = chance.randrange(ranks)
            done = ledger.done[rank]
            if done < ledger.next:
                assert ledger.step(done) == Step([], done, 0), "unfinished steps of a rank are held"
                ledger.finish(rank, done + 1)
            assert ledger.held <= ahead
            assert ledger.next <= ledger.slowest + ahead
        assert (ledger.ended, ledger.held, ledger.rows) == (last, 0, sum(range(last)))


def test_a_rank_that_is_behind_keeps_the_steps_that_it_needs() -> None:
    ledger = Ledger(2, 2)
    first = Step([], 7, 0)
    ledger.add(first)
    ledger.add(Step([], 5, 0))
    assert not ledger.may_read()
    assert not ledger.finish(0, 2)
    assert (ledger.behind(), ledger.step(0)) == ([1], first)
    assert ledger.finish(1, 1)
    assert ledger.rows == 7
    with pytest.raises(LookupError, match="batch 0 is gone"):
        ledger.step(0)


def test_samples_and_tuples_become_columns() -> None:
    assert [batch["0"].tolist() for batch in batches_of(iter([1.5, 2]))] == [[1.5], [2]]
    [batch] = batches_of([(np.ones((3, 2)), ["a", "b", "c"])])
    assert (rows_of(batch), batch["0"].shape) == (3, (3, 2))


def frame():
    polars = pytest.importorskip("polars", reason="NOT TESTED HERE: Arrow's memory needs polars")
    return polars, polars.DataFrame(
        {
            "i8": polars.Series([1, -2, 3], dtype=polars.Int8),
            "u32": polars.Series([1, 2, 2**32 - 1], dtype=polars.UInt32),
            "f": [1.5, None, -0.25],
            "yes": [True, False, True],
            "text": ["short", "a text that is longer than twelve bytes", None],
            "day": [datetime.date(1970, 1, 2)] * 3,
            "when": [datetime.datetime(1970, 1, 1, 0, 0, 1)] * 3,
            "vector": polars.Series([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], dtype=polars.Array(polars.Float32, 2)),
        }
    )


@pytest.mark.parametrize("start", [0, 1])
def test_columns_are_what_polars_says_they_are(start: int) -> None:
    _, table = frame()
    [batch] = batches_of(table.slice(start))
    assert batch["i8"].tolist() == [1, -2, 3][start:]
    assert batch["i8"].dtype == np.int8
    assert batch["u32"].tolist() == [1, 2, 2**32 - 1][start:]
    assert np.array_equal(batch["f"], [1.5, np.nan, -0.25][start:], equal_nan=True)
    assert batch["yes"].tolist() == [True, False, True][start:]
    assert batch["text"] == ["short", "a text that is longer than twelve bytes", None][start:]
    assert batch["day"].tolist() == [1, 1, 1][start:]
    assert set(batch["when"].tolist()) <= {10**6, 10**9}, "the ticks that Arrow keeps"
    assert batch["vector"].tolist() == [[1, 2], [3, 4], [5, 6]][start:]


def test_columns_without_tensors_are_refused_by_name_with_the_remedy() -> None:
    polars, table = frame()
    with pytest.raises(ArrowError, match="column holes has missing values"):
        next(batches_of(polars.DataFrame({"holes": [1, None]})))
    pairs = polars.Series([[1, 2], [3, None]], dtype=polars.Array(polars.Int32, 2))
    with pytest.raises(ArrowError, match="column pairs has missing values"):
        next(batches_of(polars.DataFrame({"pairs": pairs})))
    with pytest.raises(ArrowError, match=r"column ragged is of Arrow type .*have the query cast it"):
        next(batches_of(polars.DataFrame({"ragged": [[1], [2, 3]]})))
    assert [rows_of(batch) for batch in batches_of(table.lazy())] == [3]


@pytest.mark.parametrize(("valid", "holes"), [(0b0111, False), (0b0101, True)])
def test_an_uncounted_column_has_missing_values_where_its_bits_say_so(valid: int, holes: bool) -> None:
    """As of a slice: pyarrow gives -1 for the number of missing values."""
    bits, values = ctypes.c_uint8(valid), (ctypes.c_int64 * 4)(1, 2, 3, 4)
    buffers = (ctypes.c_void_p * 2)(ctypes.addressof(bits), ctypes.addressof(values))
    array = arrow._Array(length=3, null_count=-1, n_buffers=2, buffers=buffers)
    with pytest.raises(ArrowError, match="missing values") if holes else contextlib.nullcontext():
        assert arrow._column_of(arrow.Column("x", "l"), array, None, 0, 3).tolist() == [1, 2, 3]


def test_columns_of_one_name_are_refused() -> None:
    duckdb = pytest.importorskip("duckdb", reason="NOT TESTED HERE: duckdb")
    with pytest.raises(ArrowError, match="several columns x"):
        next(batches_of(duckdb.sql("select 1 as x, 2 as x")))


def test_a_query_is_read_piece_by_piece_and_in_order(tmp_path: Path) -> None:
    polars, _ = frame()
    if not hasattr(polars.LazyFrame, "collect_batches"):
        pytest.skip("NOT TESTED HERE: this polars collects all of a query at once")
    polars.DataFrame({"x": np.arange(2_000_000)}).write_parquet(tmp_path / "x.parquet", row_group_size=100_000)
    batches = batches_of(polars.scan_parquet(tmp_path / "x.parquet").filter(polars.col("x") % 2 == 0))
    first = next(batches)["x"]
    assert 0 < len(first) < 1_000_000, "all at once"
    assert np.array_equal(np.concatenate([first, *(batch["x"] for batch in batches)]), np.arange(0, 2_000_000, 2))


def test_memory_of_a_batch_stays_when_its_source_is_gone() -> None:
    polars, _ = frame()
    table = polars.concat([polars.DataFrame({"x": np.full(100_000, n)}) for n in range(5)])
    batches = list(batches_of(table))
    del table
    gc.collect()
    assert sum(int(batch["x"].sum()) for batch in batches) == 1_000_000


def test_duckdb_is_read_too() -> None:
    duckdb = pytest.importorskip("duckdb", reason="NOT TESTED HERE: duckdb")
    relation = duckdb.connect().sql("select range as x, range * 0.5 as half, 'row ' || range as t from range(5000)")
    batches = list(batches_of(relation))
    assert sum(map(rows_of, batches)) == 5000
    assert np.concatenate([batch["x"] for batch in batches]).tolist() == list(range(5000))
    assert batches[-1]["t"][-1] == "row 4999"
    low, high = (batch["half"] for batch in batches_of(duckdb.sql("select -2.75 as half union all select 12345.5")))
    assert (low.tolist(), high.tolist()) == ([-2.75], [12345.5])
