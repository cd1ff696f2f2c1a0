"""Parameters published and pulled in one process: versions are whole, shards fit together."""

import random
import threading

import numpy as np
import pytest

from monarch_nb.connect import shutdown
from monarch_nb.rdma import BufferDroppedError, ParameterSource, ParameterStore, Shard
from monarch_nb.rdma.parameters import Box, common

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True, scope="module")
def cleanup():
    yield
    shutdown()


def box(chance: random.Random, shape: tuple[int, ...]) -> Box:
    starts = tuple(chance.randrange(size) for size in shape)
    return Box(starts, tuple(chance.randrange(1, size - start + 1) for size, start in zip(shape, starts, strict=True)))


def part(array: np.ndarray, box: Box) -> np.ndarray:
    return array[tuple(slice(start, start + size) for start, size in zip(box.start, box.shape, strict=True))].ravel()


def test_stretches_of_two_shards_are_what_numpy_finds_in_both() -> None:
    chance = random.Random(7)
    for _ in range(300):
        shape = tuple(chance.randrange(1, 6) for _ in range(chance.randrange(1, 5)))

        source, target = box(chance, shape), box(chance, shape)
        array = np.arange(np.prod(shape)).reshape(shape)
        values, copy = part(array, source), np.full(target.count, -1)
        stretches = list(common(source, target))
        for stretch in stretches:
            copy[stretch.target : stretch.target + stretch.count] = values[
                stretch.source : stretch.source + stretch.count
            ]
        both = set(values) & set(part(array, target))
        assert [value for value in copy if value >= 0] == [value for value in part(array, target) if value in both]
        if source == target:
            assert len(stretches) == 1, "what lies side by side is one stretch"


def test_a_module_is_pulled_whole() -> None:
    import torch

    learner, generator = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
    store = ParameterStore(learner)
    assert store.publish() == 1
    assert store.source.pull(generator).get(20) == 1
    assert torch.equal(learner.weight, generator.weight)
    with torch.no_grad():
        learner.weight += 1
    store.source.pull(generator).get(20)
    assert not torch.equal(learner.weight, generator.weight), "what is not published is not seen"
    assert store.publish() == 2
    assert store.source.pull(generator, after=1).get(20) == 2
    assert torch.equal(learner.weight, generator.weight)


def test_a_pull_waits_for_the_version_it_asks_for() -> None:
    import torch

    store = ParameterStore({"w": torch.ones(3)})
    target = torch.zeros(3)
    future = store.source.pull({"w": target}, after=0)
    assert not future.done()
    store.publish()
    assert future.get(20) == 1
    with pytest.raises(TimeoutError, match="pulling parameters"):
        store.source.pull({"w": target}, after=5, timeout=0.1).get(20)


def test_shards_of_two_learners_become_other_shards() -> None:
    import torch

    weights = torch.arange(48, dtype=torch.float64).reshape(6, 8)
    rows = [Shard(weights[3 * rank : 3 * rank + 3].clone(), start=(3 * rank, 0), of=(6, 8)) for rank in range(2)]
    stores = [ParameterStore({"w": shard, "b": torch.tensor(5.0)}) for shard in rows]
    for store in stores:
        store.publish()
    source = ParameterSource.of(store.source for store in stores)
    columns = torch.zeros(6, 3, dtype=torch.float64)
    bias = torch.tensor(0.0)
    source.pull({"w": Shard(columns, start=(0, 2), of=(6, 8)), "b": bias}).get(20)
    assert torch.equal(columns, weights[:, 2:5])
    assert bias == 5.0
    target = torch.zeros(6, 8, dtype=torch.float64)
    with pytest.raises(ValueError, match="have 24 of the 48 elements of w"):
        stores[0].source.pull({"w": target})


def test_versions_of_several_stores_are_the_same() -> None:
    import torch

    stores = [ParameterStore({name: torch.zeros(1)}) for name in "ab"]
    source = ParameterSource.of(store.source for store in stores)
    target = {name: torch.full((1,), -1.0) for name in "ab"}
    for store in stores:
        store.publish()
    stores[0].publish()  # and the other one not yet
    assert source.pull(target).get(20) == 1


def test_parameters_that_do_not_fit_are_refused_by_name() -> None:
    import torch

    store = ParameterStore({"w": torch.zeros(3)})
    with pytest.raises(KeyError, match="nobody publishes v; there are w"):
        store.source.pull({"v": torch.zeros(3)})
    with pytest.raises(ValueError, match=r"w is published as torch\.float32 of shape"):
        store.source.pull({"w": torch.zeros(4)})
    with pytest.raises(ValueError, match=r"into torch\.float16"):
        store.source.pull({"w": torch.zeros(3, dtype=torch.float16)})
    with pytest.raises(ValueError, match="is not part of"):
        Shard(torch.zeros(3), start=(2,), of=(4,))
    with pytest.raises(ValueError, match="at least one parameter"):
        ParameterStore({})


def test_a_store_that_is_dropped_says_so() -> None:
    import torch

    store = ParameterStore({"w": torch.zeros(3)})
    store.publish()
    store.drop()
    with pytest.raises(BufferDroppedError):
        store.source.pull({"w": torch.zeros(3)}).get(20)


def test_no_version_is_torn_however_fast_they_follow_each_other() -> None:
    import torch

    values = torch.zeros(1 << 16)
    store = ParameterStore({"w": values})
    store.publish()
    stop = threading.Event()

    def publish() -> None:
        while not stop.is_set():
            values.add_(1)
            store.publish()

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        target = torch.zeros(1 << 16)
        for _ in range(50):
            version = store.source.pull({"w": target}).get(20)
            assert target.unique().tolist() == [version - 1]
    finally:
        stop.set()
        thread.join(20)
