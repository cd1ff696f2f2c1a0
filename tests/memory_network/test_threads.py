"""Exceptions without a text, and code that ends its actor's thread, are reported."""

import asyncio
import contextlib
import gc
import logging
import sys
import threading
from typing import Any

import pytest

from monarch_nb.actor import Actor, ActorError, MeshFailure, ProcMesh, SupervisionError, current_rank, endpoint
from tests.cluster.actor_tools import SECONDS, Faults

pytestmark = [pytest.mark.timeout(120)]

WAYS = {"error": ValueError("no"), "exit": SystemExit(3), "interrupt": KeyboardInterrupt(), "number": 7}
BASES = {"error": Exception, "exit": BaseException}


def mute(way: str, base: str) -> BaseException:
    """An exception that has no text to give."""
    answer: Any = WAYS[way]

    def give(self: object, *_: object) -> Any:
        if isinstance(answer, BaseException):
            raise answer
        return answer

    names = dict.fromkeys(("__str__", "__repr__", "__format__"), give)
    return type("Mute", (BASES[base],), {**names, "__notes__": property(give)})()


class Work:
    def broken(self, way: str, base: str) -> None:
        raise mute(way, base)


class Sync(Actor, Work):
    def __init__(self, way: str = "", base: str = "") -> None:
        if way:
            self.broken(way, base)

    @endpoint
    def step(self, way: str, base: str) -> None:
        self.broken(way, base)

    @endpoint
    def refuses(self, way: str, base: str) -> Any:
        class Refuses:
            def __reduce__(self) -> Any:
                raise mute(way, base)

        return Refuses()

    @endpoint
    def rank(self) -> int:
        return int(current_rank().rank)


class Async(Actor, Work):
    @endpoint
    async def step(self, way: str, base: str) -> None:
        self.broken(way, base)

    @endpoint
    async def refuses(self, way: str, base: str) -> Any:
        return await self._refuses(way, base)

    async def _refuses(self, way: str, base: str) -> Any:
        class Refuses:
            def __reduce__(self) -> Any:
                raise mute(way, base)

        return Refuses()

    @endpoint
    async def rank(self) -> int:
        return int(current_rank().rank)


@pytest.fixture(scope="module")
def pair(quad: ProcMesh) -> ProcMesh:
    return quad.slice(gpus=slice(0, 2))


@pytest.mark.parametrize("cls", [Sync, Async])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("method", ["step", "refuses"])
def test_an_error_without_a_text_is_raised_and_its_actor_lives(
    pair: ProcMesh, faults: Faults, cls: Any, way: str, method: str
) -> None:
    actors = pair.spawn("mutes", cls)
    with pytest.raises(ActorError) as caught:
        getattr(actors, method).call(way, "error").get(SECONDS)
    assert "Mute" in str(caught.value)
    assert "Mute" in repr(caught.value)
    assert list(actors.rank.call().get(SECONDS).values()) == [0, 1]
    actors.stop().get(SECONDS)


@pytest.mark.parametrize("cls", [Sync, Async])
@pytest.mark.parametrize("way", WAYS)
def test_an_exit_without_a_text_fails_the_actor_by_name(pair: ProcMesh, faults: Faults, cls: Any, way: str) -> None:
    actors = pair.slice(gpus=0).spawn("leavers", cls)
    for _ in range(2):  # the second is refused, and does not wait forever
        with pytest.raises(SupervisionError, match="Mute"):
            actors.step.call(way, "exit").get(SECONDS)
    assert "Mute" in faults.next().report()
    actors.stop().get(SECONDS)


def test_errors_without_a_text_are_told_from_init_and_broadcast(pair: ProcMesh, faults: Faults) -> None:
    never = pair.slice(gpus=0).spawn("never", Sync, "exit", "error")
    with pytest.raises(SupervisionError, match="Mute"):
        never.rank.call().get(SECONDS)
    assert "its __init__ raised" in faults.next().report()
    lone = pair.slice(gpus=0).spawn("lone", Sync)
    lone.step.broadcast("exit", "error")
    assert "Mute" in faults.next().report()
    with pytest.raises(SupervisionError, match="Mute"):
        lone.rank.call().get(SECONDS)


class Unsure:
    """Has neither a truth nor a text, as arrays have no truth."""

    def __bool__(self) -> bool:
        raise ValueError("neither true nor false")

    def __str__(self) -> str:
        raise SystemExit(3)


class Logs(Actor):
    @endpoint
    def log(self) -> str:
        records: list[logging.LogRecord] = []
        handler = logging.Handler()
        handler.emit = records.append  # type: ignore[method-assign]
        logging.getLogger("texts").addHandler(handler)
        logging.getLogger("texts").warning(Unsure())
        return records[0].getMessage()


def test_anything_can_be_logged_by_an_actor(pair: ProcMesh, faults: Faults) -> None:
    actor = pair.slice(gpus=0).spawn("logs", Logs)
    assert actor.log.call_one().get(SECONDS).endswith("<Unsure: its str raised SystemExit: 3>")
    actor.stop().get(SECONDS)


class Owner(Actor):
    """Owns an actor that fails, and fails itself without a text."""

    def __init__(self, procs: ProcMesh, way: str) -> None:
        self.way = way
        self.child = procs.spawn("child", Sync)

    def __supervise__(self, failure: MeshFailure) -> Any:
        raise mute(self.way, "exit")

    @endpoint
    def hurt(self) -> None:
        self.child.step.broadcast("error", "error")

    def __cleanup__(self, error: Exception | None) -> None:
        raise mute(self.way, "exit")


def test_a_supervisor_without_a_text_fails_and_is_told(pair: ProcMesh, faults: Faults) -> None:
    owner = pair.slice(gpus=0).spawn("owner", Owner, pair.slice(gpus=1), "exit")
    owner.hurt.call().get(SECONDS)
    assert "Mute" in faults.next().report()
    with pytest.raises(SupervisionError):
        owner.hurt.call().get(SECONDS)


class Loop(Actor):
    """Code on an actor's loop, outside its endpoints, may end it."""

    @endpoint
    async def end_by_task(self) -> None:
        asyncio.get_running_loop().create_task(self._exit())

    async def _exit(self) -> None:
        sys.exit(3)

    @endpoint
    async def end_by_callback(self) -> None:
        asyncio.get_running_loop().call_soon(sys.exit, 3)
        await asyncio.sleep(SECONDS)

    @endpoint
    async def end_by_stop(self) -> None:
        asyncio.get_running_loop().stop()
        await asyncio.sleep(SECONDS)

    @endpoint
    async def alive(self) -> bool:
        return True

    async def __cleanup__(self, error: Exception | None) -> None:
        cleaned = threading.Event()
        asyncio.get_running_loop().call_soon(cleaned.set)
        await asyncio.sleep(0)
        print(f"cleaned up: {cleaned.is_set()}, {error}")


@pytest.mark.parametrize("method", ["end_by_task", "end_by_callback", "end_by_stop"])
def test_anything_that_ends_an_actors_loop_fails_it_once(
    pair: ProcMesh, faults: Faults, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    actor = pair.slice(gpus=0).spawn("loops", Loop)
    with contextlib.suppress(SupervisionError):  # if it waits for its end
        getattr(actor, method).call().get(SECONDS)
    assert "has ended" in faults.next().report()
    with pytest.raises(SupervisionError, match=r"the thread that runs .* has ended"):
        actor.alive.call().get(SECONDS)
    gc.collect()  # the task that ended it, too
    assert "never retrieved" not in caplog.text
