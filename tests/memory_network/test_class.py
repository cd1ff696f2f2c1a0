"""Wrong classes and wrong calls raise at the caller, before anything is sent."""

from functools import partial
from typing import Any

import numpy as np
import pytest

from monarch_nb.actor import Actor, ProcMesh, concurrent_endpoint, endpoint
from monarch_nb.runtime import current_runtime

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("faults")]


class Mixed(Actor):
    @endpoint
    def one(self) -> None: ...

    @endpoint
    async def two(self) -> None: ...


class SyncWithAsyncCleanup(Actor):
    @endpoint
    def one(self) -> None: ...

    async def __cleanup__(self, exc: Exception | None) -> None: ...


class AsyncWithSyncCleanup(Actor):
    @endpoint
    async def one(self) -> None: ...

    def __cleanup__(self, exc: Exception | None) -> None: ...


class SyncWithAsyncSupervise(Actor):
    @endpoint
    def one(self) -> None: ...

    async def __supervise__(self, failure: Any) -> bool:  # type: ignore[override]
        return True


class SyncWithAsyncUndeliverable(Actor):
    @endpoint
    def one(self) -> None: ...

    async def _handle_undeliverable_message(self, message: Any) -> bool:
        return True


class AsyncInit(Actor):
    async def __init__(self) -> None: ...  # type: ignore[misc]


class Good(Actor):
    def __init__(self, start: int, *, step: int = 1) -> None:
        self.start = start + step

    @endpoint
    def add(self, x: int, *, times: int = 1) -> int:
        return self.start + x * times

    def helper(self) -> int:
        return 1

    plus = endpoint(partial(add, x=1))  # type: ignore[arg-type]

    @endpoint
    def named(this, self: int) -> int:  # noqa: N805
        return self

    @endpoint
    def uses_helper(self) -> int:
        return self.helper() + self.add(1)

    value = 3


class AsyncWithSyncSupervise(Actor):
    @endpoint
    async def one(self) -> int:
        return 1

    def __supervise__(self, failure: Any) -> bool:
        return True


class Holder(Actor):
    def __init__(self, arrays: list[Any]) -> None:
        self.arrays = arrays

    @endpoint
    def first(self) -> list[int]:
        return [int(array[0]) for array in self.arrays]


@pytest.mark.parametrize(
    ("cls", "text"),
    [
        (Mixed, "Mixed mixes both async and sync endpoints: two are async, one are not"),
        (SyncWithAsyncCleanup, "has sync endpoints, but an async __cleanup__"),
        (AsyncWithSyncCleanup, "has async endpoints, but a synchronous __cleanup__"),
        (SyncWithAsyncSupervise, "has sync endpoints, but an async __supervise__"),
        (SyncWithAsyncUndeliverable, "has sync endpoints, but an async _handle_undeliverable_message"),
        (AsyncInit, "has an async __init__, which nobody awaits"),
        (int, "must be a class derived from"),
        (Good(1), "must be a class derived from"),
    ],
)
def test_a_class_that_cannot_work_is_refused_before_anything_is_created(quad: ProcMesh, cls: Any, text: str) -> None:
    before = set(current_runtime().meshes)
    with pytest.raises(ValueError, match=text):
        quad.spawn("x", cls)
    assert set(current_runtime().meshes) == before


def test_an_actor_is_spawned_with_many_small_arrays(quad: ProcMesh) -> None:
    arrays = [np.full(8192, number, dtype=np.uint8) for number in range(6)]
    assert quad.spawn("holders", Holder, arrays).first.call().get(20).values() == 4 * [[0, 1, 2, 3, 4, 5]]


@pytest.mark.parametrize("name", ["slice", "stop", "size", "initialized", "split", "rename", "flatten", "extent"])
def test_an_endpoint_must_not_hide_what_a_mesh_can_do(quad: ProcMesh, name: str) -> None:
    cls = type("Clash", (Actor,), {name: endpoint(lambda self: None)})
    with pytest.raises(
        ValueError, match=rf"ActorMesh has an attribute that collides with an endpoint name: Clash\.{name}"
    ):
        quad.spawn("x", cls)


def test_a_sync_supervise_is_welcome_in_an_async_actor(quad: ProcMesh) -> None:
    assert quad.slice(gpus=0).spawn("x", AsyncWithSyncSupervise).one.call_one().get(20) == 1


def test_concurrent_endpoints_must_be_async_and_cannot_be_stacked() -> None:
    with pytest.raises(ValueError, match="can only wrap async endpoints: one"):

        @concurrent_endpoint
        def one(self: Any) -> None: ...

    with pytest.raises(ValueError, match="does not wrap @endpoint: two"):

        @concurrent_endpoint
        @endpoint
        async def two(self: Any) -> None: ...


def test_a_plain_method_says_how_to_make_it_an_endpoint(quad: ProcMesh) -> None:
    good: Any = quad.spawn("good", Good, 1)
    with pytest.raises(RuntimeError, match=r"helper is not annotated as an endpoint.*add a @endpoint decorator"):
        good.helper()
    with pytest.raises(AttributeError, match=r"nothing.*add"):
        _ = good.nothing
    with pytest.raises(AttributeError):
        _ = good.value
    assert not hasattr(good, "__array__")


def test_arguments_that_do_not_fit_are_told_at_the_caller(quad: ProcMesh) -> None:
    good: Any = quad.spawn("good", Good, 1)
    for args, kwargs in (((), {}), ((1, 2), {}), ((1,), {"speed": 2})):
        for adverb in ("call", "choose", "stream", "broadcast"):
            with pytest.raises(TypeError, match=r"good\.add"):
                getattr(good.add, adverb)(*args, **kwargs)
    with pytest.raises(TypeError, match="Good"):
        quad.spawn("bad", Good)
    with pytest.raises(TypeError, match="Good"):
        quad.spawn("bad", Good, 1, 2)
    with pytest.raises(TypeError, match="no arguments"):
        quad.spawn("bad", AsyncWithSyncSupervise, 1)
    with pytest.raises(TypeError, match="must be a str, not None"):
        quad.spawn(None, Good, 1)  # type: ignore[arg-type]
    assert good.add.call(2, times=3).get(20).values() == [8] * 4


def test_an_endpoint_needs_an_adverb(quad: ProcMesh) -> None:
    good: Any = quad.spawn("good", Good, 1)
    with pytest.raises(TypeError, match=r"\.call\(\.\.\.\)"):
        good.add(1)


def test_actors_may_use_their_own_methods_and_endpoints(quad: ProcMesh) -> None:
    good: Any = quad.slice(gpus=0).spawn("good", Good, 1)
    assert good.uses_helper.call_one().get(20) == 4
    assert good.plus.call_one().get(20) == 3
    assert good.named.call_one(self=5).get(20) == 5


def test_endpoints_are_inherited_and_overridden(quad: ProcMesh) -> None:
    class Better(Good):
        @endpoint
        def add(self, x: int, *, times: int = 1) -> int:
            return -super().add._method(self, x) if False else -x

    better: Any = quad.slice(gpus=0).spawn("better", Better, 1)
    assert better.add.call_one(5).get(20) == -5
    assert better.uses_helper.call_one().get(20) == 0


def test_the_source_of_an_endpoint_can_be_had_from_the_class() -> None:
    assert Good.add._method.__name__ == "add"
    assert Good.add.__name__ == "add"
