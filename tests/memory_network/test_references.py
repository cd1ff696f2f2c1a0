"""Meshes in messages arrive as references to the same actors."""

from typing import Any

import pytest

from monarch_nb.actor import Actor, ProcMesh, current_rank, endpoint, this_host, this_proc

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("faults")]


class Holder(Actor):
    def __init__(self, *meshes: Any) -> None:
        self.meshes = meshes
        self.log: list[Any] = []

    @endpoint
    def rank(self) -> int:
        return current_rank().rank

    @endpoint
    def add(self, x: Any) -> None:
        self.log.append(x)

    @endpoint
    def read(self) -> list[Any]:
        return self.log

    @endpoint
    def ask(self, mesh: Any) -> list[int]:
        return mesh.rank.call().get(20).values()

    @endpoint
    def ask_held(self) -> list[int]:
        return self.meshes[0].rank.call().get(20).values()

    @endpoint
    def ask_nested(self, box: dict[str, Any]) -> list[list[int]]:
        return [mesh.rank.call().get(20).values() for mesh in box["meshes"]]

    @endpoint
    def echo(self, mesh: Any) -> Any:
        return mesh

    @endpoint
    def same(self, first: Any, second: Any) -> tuple[bool, bool, int]:
        return first == second, first._state is second._state, len({first, second})

    @endpoint
    def spawn_here(self, procs: Any, name: str) -> Any:
        return procs.spawn(name, Holder)

    @endpoint
    def describe(self, mesh: Any) -> tuple[dict[str, int], str]:
        return mesh.sizes, repr(mesh)


class AsyncAsker(Actor):
    @endpoint
    async def ask(self, mesh: Any) -> list[int]:
        return (await mesh.rank.call()).values()


@pytest.fixture(scope="module")
def holders(quad: ProcMesh) -> Any:
    return quad.spawn("holders", Holder)


def test_an_actor_calls_another_one_it_was_given(quad: ProcMesh, holders: Any) -> None:
    assert holders.slice(gpus=0).ask.call_one(holders.slice(gpus=slice(1, 4))).get(20) == [0, 1, 2]
    asker: Any = quad.slice(gpus=3).spawn("asker", AsyncAsker)
    assert asker.ask.call_one(holders.slice(gpus=slice(0, 3, 2))).get(20) == [0, 1]


def test_references_may_be_constructor_arguments(quad: ProcMesh, holders: Any) -> None:
    second: Any = quad.spawn("others", Holder, holders.slice(gpus=slice(2, 4)))
    assert second.ask_held.call().get(20).values() == [[0, 1]] * 4


def test_references_travel_inside_of_containers(holders: Any) -> None:
    box = {"meshes": [holders.slice(gpus=0), holders.slice(gpus=slice(1, 3))]}
    assert holders.slice(gpus=3).ask_nested.call_one(box).get(20) == [[0], [0, 1]]


def test_a_mesh_that_travels_back_is_the_same_object(quad: ProcMesh, holders: Any) -> None:
    holder = holders.slice(gpus=1)
    for mesh in (holders, holder, holders.rename(gpus="ranks"), quad, quad.slice(gpus=0), this_host(), this_proc()):
        result = holder.echo.call_one(mesh).get(20)
        assert result == mesh
        assert hash(result) == hash(mesh)
        assert result.sizes == mesh.sizes
    assert holder.echo.call_one(holders).get(20)._state is holders._state
    assert holders != holder
    assert quad != quad.slice(gpus=0)


def test_two_references_in_a_process_share_what_is_known(holders: Any) -> None:
    assert holders.slice(gpus=2).same.call_one(holders, holders).get(20) == (True, True, 1)
    assert holders.slice(gpus=2).same.call_one(holders, holders.slice(gpus=0)).get(20) == (False, True, 2)


def test_a_reference_describes_itself_as_the_original_does(holders: Any) -> None:
    assert holders.slice(gpus=0).describe.call_one(holders).get(20) == (holders.sizes, repr(holders))


def test_a_process_mesh_can_be_given_away_to_spawn_on(quad: ProcMesh, holders: Any) -> None:
    mesh = holders.slice(gpus=0).spawn_here.call_one(quad.slice(gpus=slice(1, 3)), "made").get(20)
    assert mesh.rank.call().get(20).values() == [0, 1]
    assert holders.slice(gpus=3).ask.call_one(mesh).get(20) == [0, 1]


def test_calls_of_two_actors_on_one_process_are_messages_too(quad: ProcMesh, holders: Any) -> None:
    holder: Any = quad.slice(gpus=0).spawn("one", Holder, holders.slice(gpus=0))
    assert holder.ask_held.call_one().get(20) == [0]
    local = [1]
    mesh: Any = this_proc().spawn("here", Holder)
    mesh.add.call_one(local).get(20)
    local.append(2)
    assert mesh.read.call_one().get(20) == [[1]]
    mesh.stop().get(20)
