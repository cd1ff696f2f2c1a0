"""Section 1.7: context. The rest: tests/memory_network/test_context.py, log prefixes in test_api_local.py."""

from typing import Any

import pytest

from monarch.actor import (
    Actor,
    Context,
    Point,
    ProcMesh,
    context,
    current_actor_name,
    current_rank,
    current_size,
    endpoint,
)

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("faults")]


class Teller(Actor):
    @endpoint
    async def ranks(self) -> tuple[str, str, dict[str, int]]:
        return str(context().actor_instance.rank), str(current_rank()), current_size()

    @endpoint
    async def text(self) -> str:
        return str(context().actor_instance)

    @endpoint
    async def same(self) -> bool:
        return current_actor_name() == str(context().actor_instance.actor_id)

    @endpoint
    async def child(self) -> Any:
        proc = context().actor_instance.proc
        assert dict(proc.extent) == {}
        self.kid = proc.spawn("kid", Teller)
        return await self.kid.text.call_one()


def test_the_client_is_the_root_with_a_place_of_its_own() -> None:
    assert isinstance(context(), Context)
    assert str(context().actor_instance) == "<root>"
    assert isinstance(context().message_rank, Point)
    assert (context().message_rank.rank, current_rank().rank, current_size()) == (0, 0, {})
    assert current_actor_name() == str(context().actor_instance.actor_id)


def test_the_spawn_rank_is_fixed_and_message_ranks_are_the_slices(quad: ProcMesh) -> None:
    tellers = quad.spawn("tellers", Teller)
    assert tellers.slice(gpus=slice(2, 4)).ranks.call().get(20).item(gpus=1) == (
        "{'gpus': 3/4}",
        "{'gpus': 1/2}",
        {"gpus": 2},
    )


def test_an_instance_is_written_as_the_chain_of_its_owners(quad: ProcMesh) -> None:
    tellers = quad.spawn("tellers", Teller)
    text = tellers.slice(gpus=1).text.call_one().get(20)
    assert text == f"<root>.<{Teller.__module__}.Teller tellers{{'gpus': 1/4}}>"
    assert tellers.slice(gpus=1).child.call_one().get(20) == text + f".<{Teller.__module__}.Teller kid>"


def test_an_actors_name_is_its_id(quad: ProcMesh) -> None:
    assert all(quad.spawn("tellers", Teller).same.call().get(20).values())
