"""Ways to processes, leases, and who answers."""

import pytest

from monarch_nb.routing import Hop, Leases, NoRoute, Responsiveness, Routes

pytestmark = pytest.mark.timeout(20)


def proc_routes():
    routes = Routes("h1/p.0.0", agent="h1/agent")
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


def test_an_agent_dials_the_agents_of_other_hosts_for_all_their_processes():
    routes = Routes("h1/agent", agent="h1/agent")
    routes.learn("h2", endpoint="tcp://10.0.0.2:5000")
    assert routes.next_hop("h2/p.1.0") == Hop("tcp", "h2/agent", "tcp://10.0.0.2:5000")
    with pytest.raises(NoRoute, match=r"h1/agent to h3/p\.0\.0"):
        routes.next_hop("h3/p.0.0")


def test_who_dialled_in_is_answered_on_that_connection():
    routes = Routes("h1/agent")
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
    routes = Routes("h1/agent")
    routes.learn("h2", via="h3/agent")
    routes.learn("h3", via="h2/agent")
    with pytest.raises(NoRoute):
        routes.next_hop("h2/agent")


def test_newer_knowledge_replaces_older_and_forgetting_removes_it():
    routes = Routes("h1/agent")
    routes.learn("h2", endpoint="tcp://a:1")
    routes.next_hop("h2/agent")
    routes.learn("h2", endpoint="tcp://b:2")
    assert routes.next_hop("h2/agent").endpoint == "tcp://b:2"
    routes.attached("h2/p.0.0")
    routes.forget("h2")
    with pytest.raises(NoRoute):
        routes.next_hop("h2/p.0.0")


def test_a_lease_runs_out_once_after_silence():
    leases = Leases()
    leases.hold("k/c", 0.0)
    leases.heard("k/c", 30.0)
    assert leases.deadline() == 90.0
    assert leases.expired(89.9) == []
    (lease,) = leases.expired(90.0)
    assert (lease.owner, lease.seconds) == ("k/c", 60.0)
    assert leases.expired(1000.0) == []
    assert leases.deadline() is None


def test_a_detached_owner_may_be_silent_longer_and_a_dropped_lease_never_ends():
    leases = Leases(10.0)
    leases.hold("k/c", 0.0, seconds=3600.0)
    leases.hold("k/d", 0.0)
    leases.drop("k/d")
    assert "k/c" in leases
    assert "k/d" not in leases
    assert leases.expired(3599.0) == []
    assert [lease.owner for lease in leases.expired(3600.0)] == ["k/c"]


def test_signs_of_life_without_a_lease_mean_nothing():
    leases = Leases()
    leases.heard("k/c", 0.0)
    assert leases.expired(1000.0) == []


def test_silence_is_told_once_and_so_is_its_end():
    who = Responsiveness(every=1.0, after=5.0)
    who.watch("h1/p.0.0")
    assert who.due(0.0) == ["h1/p.0.0"]
    assert who.answered("h1/p.0.0", 0.1) is None
    assert who.due(0.5) == []
    assert who.due(1.0) == ["h1/p.0.0"]
    assert who.silent(5.9) == []
    (silence,) = who.silent(6.0)
    assert (silence.address, silence.since) == ("h1/p.0.0", 1.0)
    assert who.silent(7.0) == []
    assert who.since("h1/p.0.0") == 1.0
    assert who.answered("h1/p.0.0", 60.0) == silence
    assert who.since("h1/p.0.0") is None
    assert who.answered("h1/p.0.0", 61.0) is None


def test_questions_do_not_pile_up_at_a_stopped_process():
    who = Responsiveness()
    who.watch("h1/p.0.0")
    assert sum(len(who.due(second)) for second in range(1000)) == 1


def test_processes_no_longer_watched_are_not_told():
    who = Responsiveness()
    who.watch("h1/p.0.0")
    who.due(0.0)
    who.forget("h1/p.0.0")
    assert who.silent(100.0) == []
    assert who.due(100.0) == []
    assert who.answered("h1/p.0.0", 100.0) is None


def test_a_way_through_somebody_goes_before_an_endpoint_until_it_is_taken_back():
    routes = Routes("h1/agent")
    routes.learn("h2", endpoint="tcp://10.0.0.2:5000", via="h0/c")
    routes.attached("h0/c")
    assert routes.next_hop("h2/p.1.0") == Hop("inbound", "h0/c")
    routes.learn("h2", via="")
    assert routes.next_hop("h2/p.1.0") == Hop("tcp", "h2/agent", "tcp://10.0.0.2:5000")


def test_an_agent_that_dialled_and_is_gone_is_dialled_and_a_process_that_cannot_be_is_waited_for():
    routes = Routes("h1/agent")
    routes.learn("h2", endpoint="tcp://10.0.0.2:5000")
    for address in ("h2/agent", "h0/c"):
        routes.attached(address)
        assert routes.next_hop(address) == Hop("inbound", address)
    assert routes.dial_instead("h2/agent") == "tcp://10.0.0.2:5000"
    assert routes.next_hop("h2/agent") == Hop("tcp", "h2/agent", "tcp://10.0.0.2:5000")
    assert routes.dial_instead("h0/c") == ""
    assert routes.next_hop("h0/c") == Hop("inbound", "h0/c")
