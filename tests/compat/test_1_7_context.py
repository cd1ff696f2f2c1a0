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
    async def text(self) -> str:
        return str(context().actor_instance)

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


def test_an_instance_is_written_as_the_chain_of_its_owners(quad: ProcMesh) -> None:
    tellers = quad.spawn("tellers", Teller)
    text = tellers.slice(gpus=1).text.call_one().get(20)
    assert text == f"<root>.<{Teller.__module__}.Teller tellers{{'gpus': 1/4}}>"
    assert tellers.slice(gpus=1).child.call_one().get(20) == text + f".<{Teller.__module__}.Teller kid>"
