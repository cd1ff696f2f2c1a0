"""Ways to processes."""

import pytest

from monarch_nb.routing import Hop, NoRoute, RoutingTable

pytestmark = pytest.mark.timeout(20)


def proc_routes():
    routes = RoutingTable("h1/p.0.0", agent="h1/agent")
    routes.learn("h1", run_folder="/run/mnb-h1")
    return routes


def test_messages_to_oneself_stay():
    assert proc_routes().next_hop("h1/p.0.0") == Hop("self", "h1/p.0.0")


def test_processes_of_this_machine_are_reached_through_their_run_folder():
    routes = proc_routes()
    routes.learn("h2", run_folder="/run/mnb-h2")
    assert routes.next_hop("h1/p.1.0") == Hop("ipc", "h1/p.1.0", "ipc:///run/mnb-h1/p.1.0")
    assert routes.next_hop("h2/agent") == Hop("ipc", "h2/agent", "ipc:///run/mnb-h2/agent")


def test_everything_else_goes_to_ones_own_agent():
    assert proc_routes().next_hop("h9/p.1.0") == Hop("agent", "h1/agent", "ipc:///run/mnb-h1/agent")


def test_an_agent_dials_other_hosts_agents_for_all_its_processes():
    routes = RoutingTable("h1/agent", agent="h1/agent")
    routes.learn("h2", endpoint="tcp://10.0.0.2:5000")
    assert routes.next_hop("h2/p.1.0") == Hop("tcp", "h2/agent", "tcp://10.0.0.2:5000")
    with pytest.raises(NoRoute, match=r"h1/agent to h3/p\.0\.0"):
        routes.next_hop("h3/p.0.0")


def test_a_peer_that_dialled_is_answered_on_that_connection():
    routes = RoutingTable("h1/agent")
    routes.attached("k/c")
    routes.attached("h3/agent")
    assert routes.next_hop("k/c") == Hop("inbound", "k/c")
    assert routes.next_hop("h3/p.0.0") == Hop("inbound", "h3/agent")
    routes.detached("h3/agent")
    with pytest.raises(NoRoute):
        routes.next_hop("h3/p.0.0")


def test_an_explicit_way_goes_before_all_others():
    routes = proc_routes()
    routes.learn("h5/p.0.0", via="h1/p.7.0")
    assert routes.next_hop("h5/p.0.0") == Hop("ipc", "h1/p.7.0", "ipc:///run/mnb-h1/p.7.0")
    routes.learn("h6", via="h1/agent")
    assert routes.next_hop("h6/p.0.0").address == "h1/agent"


def test_ways_that_lead_in_circles_end():
    routes = RoutingTable("h1/agent")
    routes.learn("h2", via="h3/agent")
    routes.learn("h3", via="h2/agent")
    with pytest.raises(NoRoute):
        routes.next_hop("h2/agent")


def test_newer_knowledge_replaces_older_and_forgetting_removes_it():
    routes = RoutingTable("h1/agent")
    routes.learn("h2", endpoint="tcp://a:1")
    routes.next_hop("h2/agent")
    routes.learn("h2", endpoint="tcp://b:2")
    assert routes.next_hop("h2/agent").endpoint == "tcp://b:2"
    routes.attached("h2/p.0.0")
    routes.forget("h2")
    with pytest.raises(NoRoute):
        routes.next_hop("h2/p.0.0")


def test_a_relay_precedes_an_endpoint_until_it_is_withdrawn():
    routes = RoutingTable("h1/agent")
    routes.learn("h2", endpoint="tcp://10.0.0.2:5000", via="h0/c")
    routes.attached("h0/c")
    assert routes.next_hop("h2/p.1.0") == Hop("inbound", "h0/c")
    routes.learn("h2", via="")
    assert routes.next_hop("h2/p.1.0") == Hop("tcp", "h2/agent", "tcp://10.0.0.2:5000")


def test_lost_agents_are_dialled_and_undialable_processes_awaited():
    routes = RoutingTable("h1/agent")
    routes.learn("h2", endpoint="tcp://10.0.0.2:5000")
    for address in ("h2/agent", "h0/c"):
        routes.attached(address)
        assert routes.next_hop(address) == Hop("inbound", address)
    assert routes.dial_instead("h2/agent") == "tcp://10.0.0.2:5000"
    assert routes.next_hop("h2/agent") == Hop("tcp", "h2/agent", "tcp://10.0.0.2:5000")
    assert routes.dial_instead("h0/c") == ""
    assert routes.next_hop("h0/c") == Hop("inbound", "h0/c")
