"""The lines of a mesh as values: filters, order, ranks, and following them."""

import time
from datetime import datetime, timedelta
from typing import Any

import pytest

from monarch_nb.logs import LogRecord, Logs
from monarch_nb.logs.mesh_logs import LogOption
from monarch_nb.logs.view import MOST_WAITING, LogFilter, LogReader, level_of, since_of
from monarch_nb.mesh.mesh_events import MeshHealed
from monarch_nb.shape import Point
from tests.unit.log_tools import Cluster

pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


def reader(cluster: Cluster, *ranks: int, **options: Any) -> LogReader:
    procs = cluster.procs
    return LogReader(cluster.logs, "workers", procs, LogFilter("p", procs.region, ranks or range(4), **options))


def texts(logs: Logs) -> list[str]:
    return [record.text for record in logs]


def test_lines_of_all_ranks_are_ordered_by_time_and_labelled(cluster: Cluster) -> None:
    cluster.write(1, "second\n", time=2.0)
    cluster.write(0, "first\n", time=1.0)
    cluster.write(1, "third\n", "c:2", stream=2, level=30, time=3.0)
    logs = reader(cluster).there()
    assert texts(logs) == ["first", "second", "third"]
    third = logs[-1]
    assert (third.rank["gpus"], third.stream, third.level, third.call, third.time) == (1, "stderr", 30, "c:2", 3.0)
    assert "[gpus=1] third" in str(third)
    assert repr(logs).startswith("3 lines of workers\n")


def test_lines_are_found_by_rank_text_level_time_stream_and_number(cluster: Cluster) -> None:
    now = time.time()
    for rank in range(4):
        for number in range(5):
            cluster.write(rank, f"entry {number}\n", time=now - 60)
        cluster.write(rank, "careful\n", stream=2, level=30, time=now)
    assert len(reader(cluster, grep="entry [34]").there()) == 8
    assert len(reader(cluster, 1, 2, grep="entry").there()) == 10
    assert texts(reader(cluster, 1, grep="entry").there(last=2)) == ["entry 3", "entry 4"]
    assert texts(reader(cluster, 0, level="warning").there()) == ["careful"]
    assert len(reader(cluster, since="5s").there()) == len(reader(cluster, stream="stderr").there()) == 4
    assert len(reader(cluster, since=-60).there()) == 0


@pytest.mark.parametrize("wrong", [{"grep": "("}, {"level": "LOUD"}, {"since": "soon"}, {"stream": "stdlog"}])
def test_senseless_arguments_are_refused_by_name(cluster: Cluster, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        reader(cluster, **wrong)


def test_levels_and_times_may_be_written_in_several_ways() -> None:
    assert [level_of(level) for level in (None, 10, "10", "info")] == [0, 10, 10, 20]
    start = datetime.now()
    assert since_of(start) == start.timestamp()
    for ago in (300, "5m", timedelta(minutes=5)):
        assert since_of(ago) == pytest.approx(time.time() - 300, abs=5)


def test_files_of_all_incarnations_are_listed_with_lines_only_they_have(cluster: Cluster) -> None:
    for incarnation in (0, 1):
        cluster.start(2, incarnation)
        cluster.write(2, f"life {incarnation}\n", incarnation=incarnation, skipped=100)
    logs = reader(cluster).there()
    assert texts(logs) == ["life 0", "life 1"]
    assert logs.files == {2: "/logs/2.1.log"}
    assert logs.heading == "2 lines of workers, 200 more in the files only (see .files)"
    assert texts(reader(cluster, 0).there()) == []


def test_only_the_last_lines_are_shown_of_many(cluster: Cluster) -> None:
    records = [
        LogRecord(float(n), Point(0, cluster.procs.region.extent), "stdout", 0, f"line {n}") for n in range(1000)
    ]
    logs = Logs("workers", records, {})
    assert "the last 200 of them" in logs.heading
    assert logs.text.splitlines()[0].endswith("line 800")


def test_lines_are_followed_until_the_mesh_ends(cluster: Cluster) -> None:
    cluster.write(0, "there\n")
    records = reader(cluster, 0, 1).follow(lambda: False)
    assert next(records).text == "there"
    cluster.write(1, "news\n")
    cluster.write(3, "of nobody here\n")
    assert next(records).text == "news"
    cluster.write(0, "last words\n")
    cluster.procs.stopped = "stopped by client"
    assert [record.text for record in records] == ["last words"]


def test_a_slow_follower_learns_how_many_lines_it_missed(cluster: Cluster) -> None:
    cluster.write(0, "first\n")
    ended = False
    stream = reader(cluster).follow(lambda: ended)
    assert next(stream).text == "first"
    cluster.write(0, "".join(f"{number}\n" for number in range(MOST_WAITING + 5)))
    ended = True
    records = [record.text for record in stream]
    assert (records[0], records[-2]) == ("5", str(MOST_WAITING + 4))
    assert records[-1] == "… 5 lines were missed; the files have them"


def test_a_healed_rank_keeps_its_log_level_and_is_followed(cluster: Cluster) -> None:
    cluster.logs.happened(MeshHealed(cluster.procs, [(1, 1)]))
    assert cluster.levels == []
    cluster.logs.set_option("p", LogOption(level=13))
    cluster.logs.happened(MeshHealed(cluster.procs, [(1, 1), (3, 2)]))
    assert cluster.levels == [(1, 13), (3, 13)]
    cluster.start(0)
    cluster.procs.spawn_spec = None
    cluster.start(1)
    assert cluster.logs.receiver.addresses("p") == ["h/p.0.0"]
