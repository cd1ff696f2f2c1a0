"""Addresses of processes: formatting and parsing agree, and any text can be parsed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_nb.wire import Address, agent_of, controller_address, host_of, parse_address, proc_address
from tests.effort import tries

pytestmark = pytest.mark.timeout(tries(30))
NAMES = st.from_regex(r"[a-z][a-z0-9]{0,8}", fullmatch=True)
NUMBERS = st.integers(0, 1 << 24)


@given(NAMES, NAMES.map(lambda name: f"p{name}"), NUMBERS, NUMBERS)
def test_the_address_of_a_proc_has_host_mesh_rank_and_incarnation(
    host: str, mesh: str, rank: int, incarnation: int
) -> None:
    text = proc_address(host, mesh, rank, incarnation)
    address = parse_address(text)
    assert (address.host, address.place, str(address)) == (host, (mesh, rank, incarnation), text)
    assert address.is_proc
    assert not address.is_agent
    assert host_of(text) == host


def test_agents_and_controllers_are_no_procs() -> None:
    agent, controller = parse_address(agent_of("h1")), parse_address(controller_address("h1", "9f2"))
    assert agent == Address("h1", "agent")
    assert (agent.is_agent, agent.is_proc, agent.is_controller) == (True, False, False)
    assert (controller.is_agent, controller.is_proc, controller.is_controller) == (False, False, True)
    assert controller.place == ("c9f2", 0, 0)


@pytest.mark.parametrize("text", ["", "/", "h1", "h1/", "h1/p", "h1/p.x.0", "h1/p.1", "h1/p.-1.0", "h1/p." + "9" * 99])
def test_addresses_outside_of_a_mesh_have_no_rank_in_one(text: str) -> None:
    address = parse_address(text)
    assert address.place == ("", 0, 0)
    assert not address.is_proc


@pytest.mark.fuzz
@given(st.text(max_size=60) | st.text(alphabet="hpc/.0123456789²٣-", max_size=30))
def test_any_text_can_be_taken_apart(text: str) -> None:
    assert parse_address(text).host == host_of(text)
