"""Waits that can never end are found, and say who waits for whom."""

from typing import Any

import pytest

from monarch_nb.actor import Actor, ActorError, ProcMesh, endpoint
from tests.cluster.fault_tools import SOON

pytestmark = pytest.mark.timeout(120)


class Node(Actor):
    """Calls the next one in a circle, or answers."""

    @endpoint
    def ask(self, others: list[Any]) -> Any:
        return others[0].ask.call_one(others[1:]).get() if others else "end"

    @endpoint
    def answer(self) -> str:
        return "alive"


def test_a_calls_b_which_calls_a(duo: ProcMesh) -> None:
    a: Any = duo.slice(gpus=0).spawn("anna", Node)
    b: Any = duo.slice(gpus=1).spawn("bert", Node)
    with pytest.raises(ActorError, match="deadlock") as caught:
        a.ask.call_one([b, a]).get(SOON)
    text = str(caught.value)
    for part in ("anna.ask", "bert", "waits for", "concurrent_endpoint"):
        assert part in text, text
    assert a.answer.call_one().get(SOON) == b.answer.call_one().get(SOON) == "alive"
