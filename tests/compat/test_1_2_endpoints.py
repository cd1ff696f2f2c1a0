"""Section 1.2: actors and endpoints.

Elsewhere: kinds, collisions, arguments (test_class), adverbs (test_adverbs), `concurrent_endpoint` (test_execution),
errors with explicit ports (test_errors), `as_endpoint` (test_api_local), all in tests/memory_network.
"""

import inspect
import logging
from typing import Any, cast

import pytest

from monarch._src.actor.actor_mesh import ActorMesh
from monarch.actor import (
    Actor,
    ActorError,
    Channel,
    Port,
    ProcMesh,
    ValueMesh,
    as_endpoint,
    concurrent_endpoint,
    endpoint,
    send,
)

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("faults")]


class Counter(Actor):
    def __init__(self, start: int = 0) -> None:
        self.value = start

    @endpoint
    async def increment(self) -> None:
        self.value += 1

    @endpoint(instrument=False)
    async def value_of(self) -> int:
        return self.value

    @endpoint(propagate="inspect")
    async def plus(self, *, more: int = 0) -> int:
        return self.value + more

    @endpoint(explicit_response_port=True)
    async def respond(self, port: Port[int], more: int) -> None:
        port.send(self.value + more)

    @endpoint
    async def is_no_mesh(self) -> list[str]:
        errors = []
        for method, options in (("slice", {"gpus": 0}), ("flatten", {"name": "x"}), ("size", {})):
            try:
                getattr(self, method)(**options)
            except NotImplementedError as error:
                errors.append(str(error))
        return errors


class Empty(Actor):
    """Has no endpoints, and so the kind of an async actor."""

    async def __cleanup__(self, exc: Exception | None) -> None: ...

    async def looped(self) -> bool:
        import asyncio

        return asyncio.get_running_loop().is_running()


class Task(Actor):
    @concurrent_endpoint(explicit_response_port=True)
    async def answer(self, port: Port[str], value: str) -> None:
        port.send(value)

    @concurrent_endpoint
    async def raises(self) -> None:
        raise KeyError("who")

    @endpoint(explicit_response_port=True)
    async def answers_once(self, port: Port[str]) -> str:
        port.send("through the port")
        return "returned"


def test_the_first_program_of_the_documentation(quad: ProcMesh) -> None:
    counters = quad.spawn("counters", Counter, 3)
    counters.increment.broadcast()
    values = counters.value_of.call().get(20)
    assert isinstance(values, ValueMesh)
    assert [(point.rank, value) for point, value in values.items()] == [(rank, 4) for rank in range(4)]


def test_the_same_in_a_coroutine(quad: ProcMesh) -> None:
    import asyncio

    async def main() -> tuple[int, list[int]]:
        counters = quad.spawn("counters", Counter, start=1)
        await counters.increment.call()
        value = await counters.slice(gpus=0).value_of.call_one()
        streamed = [await future for future in counters.value_of.stream()]
        assert await counters.value_of.choose() == 2
        await cast(ActorMesh[Counter], counters).stop()
        return value, streamed

    assert asyncio.run(main()) == (2, [2, 2, 2, 2])


def test_decorators_keep_what_they_were_given() -> None:
    assert inspect.getsource(Counter.increment._method).strip().startswith("@endpoint")
    assert Counter.increment._explicit_response_port is False
    assert Counter.respond._explicit_response_port is True
    assert Counter.plus._propagator == "inspect"
    assert Counter.value_of._instrument is False
    assert Counter.increment._instrument is True


def test_send_to_one_that_is_chosen(quad: ProcMesh) -> None:
    port, receiver = Channel[int].open()
    send(quad.spawn("counters", Counter, 5).value_of, (), {}, port=port, selection="choose")
    assert receiver.recv().get(20) == 5
    with pytest.raises(TimeoutError):
        receiver.recv().get(0.05)


def test_send_is_to_all_or_to_one_that_is_chosen(quad: ProcMesh) -> None:
    with pytest.raises(ValueError, match="selection"):
        send(quad.spawn("counters", Counter).value_of, (), {}, selection="none")  # type: ignore[arg-type]


def test_an_explicit_port_answers_every_adverb(quad: ProcMesh) -> None:
    counters = quad.spawn("counters", Counter, 5)
    assert list(counters.respond.call(1).get(20).values()) == [6] * 4
    assert counters.respond.choose(more=2).get(20) == 7
    assert sorted(future.get(20) for future in counters.respond.stream(3)) == [8] * 4


def test_concurrent_endpoints_may_answer_through_a_port_too(quad: ProcMesh) -> None:
    task: Any = quad.slice(gpus=0).spawn("task", Task)
    assert task.answer.call_one("x").get(20) == "x"
    with pytest.raises(ActorError, match="KeyError"):
        task.raises.call_one().get(20)


def test_the_return_value_of_an_endpoint_with_a_port_is_ignored(quad: ProcMesh) -> None:
    assert quad.slice(gpus=0).spawn("task", Task).answers_once.call_one().get(20) == "through the port"  # type: ignore[call-arg]


def test_an_actor_without_endpoints_is_async(quad: ProcMesh) -> None:
    assert as_endpoint(quad.slice(gpus=0).spawn("empty", Empty).looped).call_one().get(20) is True


@pytest.mark.parametrize("propagate", [None, "cached", "inspect", "mocked", len])
def test_a_propagator_of_shapes_is_kept(propagate: Any) -> None:
    class Shaped(Actor):
        @endpoint(propagate=propagate)
        def forward(self, x: Any) -> Any: ...

    assert Shaped.forward._propagator == propagate


def test_an_unknown_name_on_a_mesh_is_an_attribute_error(quad: ProcMesh) -> None:
    task: Any = quad.slice(gpus=0).spawn("task", Task)
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = task.no_such_thing


def test_an_actor_itself_is_no_mesh(quad: ProcMesh) -> None:
    errors = quad.slice(gpus=0).spawn("counter", Counter).is_no_mesh.call_one().get(20)
    assert len(errors) == 3
    with pytest.raises(NotImplementedError):
        Counter().slice(gpus=0)
    for name in ("extent", "sizes", "initialized", "stop"):
        assert not hasattr(Counter(), name)
        with pytest.raises(NotImplementedError, match=f"{name} belongs to the mesh"):
            getattr(Counter(), name)
    counter = Counter()
    counter.sizes = {}  # type: ignore[misc]  # an attribute of its own, as any other
    assert counter.sizes == {}


def test_an_actor_logs_under_the_name_of_its_class() -> None:
    logger = Counter().logger
    assert isinstance(logger, logging.Logger)
    assert (logger.name, logger.level) == ("Counter", logging.DEBUG)


def test_rref_needs_an_endpoint_that_says_what_it_returns(quad: ProcMesh) -> None:
    with pytest.raises(NotImplementedError, match="propagate"):
        quad.spawn("counters", Counter).value_of.rref()
