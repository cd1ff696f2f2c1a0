"""Names of monarch.actor that work on any mesh: folding answers, methods without @endpoint, log prefixes…"""

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from monarch_nb.actor import (
    Accumulator,
    Actor,
    ActorError,
    Future,
    Port,
    ProcMesh,
    WouldBlockRuntime,
    as_endpoint,
    config,
    current_rank,
    endpoint,
    returns_future,
)

pytestmark = pytest.mark.timeout(120)


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class Ranked(Actor):
    @endpoint
    def rank(self, times: int = 1) -> int:
        return current_rank().rank * times

    @endpoint
    def fail(self) -> int:
        raise ValueError("no")

    def plain(self, value: int, *, more: int = 0) -> int:
        return current_rank().rank + value + more

    def through(self, port: "Port[int]", value: int) -> None:
        port.send(value * 2)

    async def waiting(self) -> None: ...

    @endpoint
    def say(self, prefix: bool) -> list[str]:
        config.prefix_python_logs_with_actor = prefix
        logger, handler = logging.getLogger("said"), Lines()
        logger.addHandler(handler)
        logger.warning("at %d%%", 50)
        logger.warning("100%")
        logger.warning("")
        logger.removeHandler(handler)
        config.prefix_python_logs_with_actor = True
        return handler.lines

    @endpoint
    def body(self) -> str:
        @returns_future
        async def inner() -> int:
            return 5

        @returns_future
        async def nested() -> int:
            return inner().get()

        assert inner().get() == 5
        try:
            nested().get()
        except WouldBlockRuntime as error:
            return str(error)
        return ""


class Async(Actor):
    def plain(self) -> int:
        return 1

    async def waiting(self, value: int) -> int:
        await asyncio.sleep(0)
        return value


@pytest.fixture
def ranked(quad: ProcMesh) -> Iterator[Any]:
    mesh: Any = quad.spawn("ranked", Ranked)
    yield mesh
    mesh.stop().get(20)


def test_an_accumulator_folds_the_answers_of_a_mesh(ranked: Any) -> None:
    total: Accumulator[Any, int, int] = Accumulator(ranked.rank, 100, lambda so_far, answer: so_far + answer)
    assert total.accumulate().get(20) == 106
    assert total.accumulate(10).get(20) == 160

    async def main() -> int:
        return await total.accumulate(times=2)

    assert asyncio.run(main()) == 112


def test_an_accumulator_raises_what_a_rank_raises(ranked: Any) -> None:
    with pytest.raises(ActorError, match="no"):
        Accumulator(ranked.fail, 0, lambda so_far, answer: so_far + answer).accumulate().get(20)


def test_an_accumulator_sends_at_once_and_folds_when_looked_at(ranked: Any) -> None:
    answers: list[int] = []
    future: Future[int] = Accumulator(ranked.rank, 0, lambda so_far, answer: answers.append(answer) or 0).accumulate()
    ranked.rank.call().get(20)
    assert answers == []
    future.get(20)
    assert sorted(answers) == [0, 1, 2, 3]
    with pytest.raises(TypeError):
        Accumulator(ranked.rank, 0, max).accumulate(1, 2, 3)


def test_a_method_without_endpoint_can_be_called_all_the_same(ranked: Any) -> None:
    plain = as_endpoint(ranked.plain)
    assert plain.call(10, more=1).get(20).values() == [11, 12, 13, 14]
    assert as_endpoint(ranked.slice(gpus=2).plain).call_one(1).get(20) == 1  # rank 0 of its slice
    with pytest.raises(TypeError, match=r"ranked\.plain"):
        plain.call()


def test_such_a_method_may_answer_through_a_port(ranked: Any) -> None:
    through = as_endpoint(ranked.through, explicit_response_port=True)
    assert through.call(4).get(20).values() == [8, 8, 8, 8]


def test_only_methods_of_spawned_actors_can_be_made_endpoints(ranked: Any) -> None:
    for wrong in (ranked.rank, Ranked.plain, print):
        with pytest.raises(ValueError):
            as_endpoint(wrong)
    with pytest.raises(TypeError, match="no event loop"):
        as_endpoint(ranked.waiting)


def test_async_actors_run_both_kinds_of_such_methods(quad: ProcMesh) -> None:
    mesh: Any = quad.slice(gpus=0).spawn("async", Async)
    assert as_endpoint(mesh.waiting).call_one(7).get(20) == 7
    assert as_endpoint(mesh.plain).call_one().get(20) == 1


def test_log_records_of_an_actor_begin_with_who_says_it(ranked: Any) -> None:
    prefix = f"[actor=<root>.<{Ranked.__module__}.Ranked ranked{{'gpus': 1/4}}>] "
    assert ranked.slice(gpus=1).say.call_one(True).get(20) == [f"{prefix}at 50%", f"{prefix}100%", ""]
    assert ranked.slice(gpus=1).say.call_one(False).get(20) == ["at 50%", "100%", ""]


def test_log_records_outside_actors_stay_as_they_are(ranked: Any) -> None:
    handler = Lines()
    logging.getLogger("outside").addHandler(handler)
    logging.getLogger("outside").warning("plain")
    assert handler.lines == ["plain"]


def test_bodies_run_on_an_actors_own_thread(ranked: Any) -> None:
    assert "await" in ranked.slice(gpus=0).body.call_one().get(20)
