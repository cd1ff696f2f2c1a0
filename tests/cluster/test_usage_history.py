"""The history of real processes: what they use is kept from the first look on, also while nobody watches."""

from collections.abc import Iterator
from typing import Any

import pytest

from monarch_nb.actor import Actor, endpoint
from monarch_nb.telemetry import history
from tests.cluster.actor_tools import SECONDS, spawned
from tests.polling import until

pytestmark = pytest.mark.timeout(120)


class Echo(Actor):
    @endpoint
    def say(self, data: bytes) -> bytes:
        return data


@pytest.fixture(scope="module")
def procs() -> Iterator[Any]:
    yield from spawned(2, "measured")


def test_cpu_memory_and_bytes_of_each_rank_are_kept(procs: Any) -> None:
    echoes = procs.spawn("echoes", Echo)
    seen = history(echoes)
    until(lambda: len(seen.samples) == 2, "a first sample of both")
    assert "no samples" not in repr(seen)
    before = len(seen.samples[0])
    echoes.slice(gpus=1).say.call_one(bytes(30 << 20)).get(SECONDS)
    until(lambda: seen.peak("received").value > 1 << 20, "the bytes to be measured")
    assert seen.peak("received").rank == 1
    assert seen.peak("sent").rank == 1
    assert len(seen.samples[0]) >= before
    assert all(each.memory > 1 << 20 for samples in seen.samples.values() for each in samples)
    assert {measure.field for measure in seen.measured(seen.parts)} == {"cpu", "memory", "received", "sent"}
    assert "gpus=1" in repr(seen)
    assert set(history(procs.slice(gpus=0)).samples) == {0}


def test_a_value_that_is_no_mesh_has_no_history() -> None:
    with pytest.raises(TypeError, match="has a history, not a str"):
        history("workers")  # type: ignore[arg-type]
