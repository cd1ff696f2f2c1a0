"""Reports of ended procs."""

import os
import signal

import pytest

from monarch_nb.host import protocol, verbs
from monarch_nb.wire import Done, Layout, Verb
from tests.cluster.host_client import Client, Refusal, hosted
from tests.polling import until
from tests.processes import freeze

pytestmark = pytest.mark.timeout(120)


def test_a_killed_proc_is_told_at_once_with_its_last_lines() -> None:
    with hosted() as (_, client):
        [address] = client.spawn(1, "talks")
        [started] = client.started(address)
        client.log(address, until="from C\n")
        os.kill(started.pid, signal.SIGKILL)
        [end] = client.exited(address)
        assert end.reason.startswith("the process this actor was running on failed: Killed(sig=9)")
        assert (end.signal, end.exitcode, end.pid, end.expected) == (signal.SIGKILL, None, started.pid, False)
        assert end.last_lines == (*(f"line {n}" for n in range(11, 30)), "from C")


@pytest.mark.parametrize("cold", [False, True])
def test_an_exit_status_and_a_traceback_are_told(cold: bool) -> None:
    with hosted(prewarm=not cold) as (_, client):
        [three] = client.spawn(1, "returns_three", bootstrap_env_cold=cold)
        [exited] = client.exited(three)
        assert (exited.exitcode, exited.signal, exited.last_lines) == (3, None, ("leaving with three",))
        [raising] = client.spawn(1, "raises", bootstrap_env_cold=cold)
        [exited] = client.exited(raising)
        assert exited.exitcode == 1
        assert exited.last_lines[-1] == "RuntimeError: the runner is broken"


def test_everyone_who_watches_is_told_also_who_comes_late() -> None:
    with hosted() as (handle, client):
        second = Client(handle.host, handle.run_folder, "second")
        third = Client(handle.host, handle.run_folder, "third")
        try:
            [address] = client.spawn(1)
            [started] = client.started(address)
            second.ask(verbs.WATCH, protocol.Addresses((address,)))
            os.kill(started.pid, signal.SIGTERM)
            assert second.exited(address)[0].signal == signal.SIGTERM
            client.exited(address)
            third.ask(verbs.WATCH, protocol.Addresses((address,)))
            assert third.exited(address)[0].signal == signal.SIGTERM
        finally:
            second.close()
            third.close()


def test_watching_a_proc_before_it_is_spawned_reports_only_its_end() -> None:
    with hosted(prewarm=False) as (handle, client):
        layout = Layout("p9", (client.host,), 1)
        watcher = Client(handle.host, handle.run_folder, "watcher")
        watcher.ask(verbs.WATCH, protocol.Addresses((layout.address(0, 0),)))
        [started] = client.started(*client.spawn(1, layout=layout))
        os.kill(started.pid, signal.SIGKILL)
        [exited] = watcher.exited(started.address)
        watcher.close()
        assert "sig=9" in exited.reason


def test_watching_what_was_never_there_is_answered_soon() -> None:
    with hosted(prewarm=False) as (_, client):
        client.ask(verbs.WATCH, protocol.Addresses((f"{client.host}/p9.0.0",)))
        assert "never started here" in client.exited(f"{client.host}/p9.0.0")[0].reason


def test_children_of_a_dead_proc_go_with_it() -> None:
    with hosted() as (_, client):
        [address] = client.spawn(1, "with_child")
        [started] = client.started(address)
        child = int(client.log(address, until="\n").split()[1])
        os.kill(started.pid, signal.SIGKILL)
        client.exited(address)
        until(lambda: not os.path.exists(f"/proc/{child}"))  # not even as a zombie


@pytest.mark.parametrize("state", ["stopped", pytest.param("gil", marks=pytest.mark.slow)])
def test_a_living_proc_that_does_not_answer_is_told_not_failed(state: str) -> None:
    with hosted() as (_, client):
        [address] = client.spawn(1, "idle" if state == "stopped" else "holds_gil")
        [started] = client.started(address)
        if state == "stopped":
            freeze(started.pid)
        event = client.event(verbs.PROC_UNRESPONSIVE, timeout=20)
        assert list(event.since) == [address]
        assert client.status().procs[0].unresponsive_since == event.since[address]
        os.kill(started.pid, signal.SIGCONT)
        assert client.event(verbs.PROC_RESPONSIVE).since == event.since
        assert client.status().procs[0].unresponsive_since is None


def test_a_request_that_makes_no_sense_is_refused_and_harms_nobody() -> None:
    with hosted(prewarm=False) as (_, client):
        with pytest.raises(Refusal, match="know no"):
            client.ask(Verb("agent.dance", Done, Done, doc=""), Done())
        with pytest.raises(Refusal, match="MalformedMessageError"):
            client.ask(Verb(verbs.KILL.name, Done, Done, doc=""), Done())
        assert client.status().procs == ()
