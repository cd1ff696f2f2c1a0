"""The debugger as an actor, for programs written for torchmonarch and for users' actors."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from monarch_nb import debug
from monarch_nb.actor import Actor, ActorError, ProcMesh, debug_controller, endpoint, get_or_spawn_controller
from monarch_nb.debug.actor import DebugController, DebugSessionInfo
from tests.cluster.actor_tools import spawned
from tests.cluster.debug_tools import SECONDS, Trainer, resume_all, stopped

pytestmark = pytest.mark.timeout(120)


class Asker(Actor):
    """Asks the debugger from a worker."""

    @endpoint
    async def wait_and_list(self) -> Any:
        controller = debug_controller()
        await controller.wait_pending_session.call_one()
        return await controller.list.call_one(print_output=False)


@pytest.fixture(scope="module")
def procs() -> Iterator[ProcMesh]:
    yield from spawned(3, "asked")


@pytest.fixture(scope="module")
def trainers(procs: ProcMesh) -> Any:
    return procs.spawn("trainers", Trainer)


@pytest.fixture(autouse=True)
def nothing_stays_stopped(trainers: Any) -> Iterator[None]:
    yield
    resume_all()


def test_the_controller_lists_what_is_stopped(trainers: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert debug_controller().list.call_one(print_output=False).get(SECONDS) == []
    future = trainers.step.call(1)
    stopped(3)
    infos = debug_controller().list.call_one().get(SECONDS)
    assert [(info.actor_name, info.rank, info.coords) for info in infos] == [
        ("trainers", rank, {"gpus": rank}) for rank in range(3)
    ]
    assert {type(info) for info in infos} == {DebugSessionInfo}
    assert {(info.function, info.lineno > 0, bool(info.hostname)) for info in infos} == {("Trainer.step", True, True)}
    assert "trainers" in capsys.readouterr().out
    debug.resume(trainers)
    future.get(SECONDS)


def test_commands_go_to_the_ranks_that_are_meant(trainers: Any) -> None:
    future = trainers.step.call(1)
    stopped(3)
    controller = debug_controller()
    for rank in ("1", 1, [1], range(1, 2)):
        assert controller.run.call_one("p rank", "trainers", rank).get(SECONDS) == "1"
    assert controller.run.call_one("p rank", "trainers", (0, -1)).get(SECONDS).split() == ["0", "gpus=0", "2", "gpus=2"]
    wrong: Any
    for wrong in ([], {"gpus": 1}, None):
        with pytest.raises(ActorError, match="write a rank"):
            controller.run.call_one("p loss", "trainers", wrong).get(SECONDS)
    assert "go on" in controller.run.call_one("c", "trainers", "gpus=0:2").get(SECONDS)
    assert [info.rank for info in controller.list.call_one(print_output=False).get(SECONDS)] == [2]
    assert "goes on" in controller.run.call_one("c").get(SECONDS)
    assert list(future.get(SECONDS).values()) == [2, 4, 6]
    with pytest.raises(ActorError, match="stopped: nothing"):
        controller.run.call_one("p loss").get(SECONDS)


def test_an_actor_of_the_program_asks_from_its_own_process(procs: ProcMesh, trainers: Any) -> None:
    asker = procs.slice(gpus=0).spawn("asker", Asker)
    answer = asker.wait_and_list.call_one()
    future = trainers.slice(gpus=1).step.call_one(1)
    assert [(info.actor_name, info.rank) for info in answer.get(SECONDS)] == [("trainers", 1)]
    debug.resume()
    future.get(SECONDS)


def test_the_debug_controller_is_found_by_its_name(trainers: Any) -> None:
    async def pending() -> Any:
        by_name = await get_or_spawn_controller("debug_controller", DebugController)
        future = trainers.slice(gpus=0).step.call_one(1)
        await by_name.wait_pending_session.call_one()
        await by_name.run.call_one("c")
        return await future

    assert asyncio.run(pending()) == 2
