"""Section 1.7: context. The rest: tests/memory_network/test_context.py, log prefixes in test_api_local.py."""

from typing import Any

import pytest

from monarch.actor import Actor, ProcMesh, context, endpoint

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("faults")]


class Teller(Actor):
    @endpoint
    async def text(self) -> str:
        return str(context().actor_instance)

    @endpoint
    async def representation(self) -> str:
        return repr(context().actor_instance)

    @endpoint
    async def child(self) -> Any:
        proc = context().actor_instance.proc
        assert dict(proc.extent) == {}
        self.kid = proc.spawn("kid", Teller)
        return await self.kid.text.call_one()


def test_an_instance_is_written_as_the_chain_of_its_owners(quad: ProcMesh) -> None:
    tellers = quad.spawn("tellers", Teller)
    text = tellers.slice(gpus=1).text.call_one().get(20)
    assert tellers.slice(gpus=1).representation.call_one().get(20) == text
    assert text == f"<root>.<{Teller.__module__}.Teller tellers{{'gpus': 1/4}}>"
    assert tellers.slice(gpus=1).child.call_one().get(20) == text + f".<{Teller.__module__}.Teller kid>"
