"""Stopping, killing and interrupting procs."""

import signal

import pytest

from monarch_nb.host import protocol, verbs
from tests.cluster.host_client import hosted, left_of
from tests.polling import until
from tests.processes import freeze

pytestmark = pytest.mark.timeout(120)


def test_stopping_escalates_until_all_are_gone() -> None:
    with hosted() as (_, client):
        soft, deaf, frozen = client.spawn(1, "idle")[0], client.spawn(1, "deaf")[0], client.spawn(1, "idle")[0]
        pids = {proc.address: proc.pid for proc in client.started(soft, deaf, frozen)}
        client.log(deaf, until="deaf now")
        freeze(pids[frozen])
        wish = protocol.Stop((soft, deaf, frozen), timeout_s=0.2, grace_s=1.0, reason="enough")
        ended = client.ask(verbs.STOP, wish)
        exits = {proc.address: proc for proc in ended.exits}
        assert exits[soft].signal == signal.SIGTERM
        assert exits[deaf].signal == signal.SIGKILL
        assert exits[frozen].signal == signal.SIGTERM
        assert all(proc.expected and proc.reason == "enough" for proc in exits.values())
        assert client.ask(verbs.STOP, wish).exits  # again: already ended


def test_a_stopped_process_can_be_killed() -> None:
    with hosted() as (_, client):
        [address] = client.spawn(1)
        freeze(client.started(address)[0].pid)
        client.ask(verbs.KILL, protocol.Kill((address,)))
        assert client.exited(address)[0].signal == signal.SIGKILL


def test_an_interrupt_reaches_the_main_thread() -> None:
    with hosted() as (_, client):
        [address] = client.spawn(1, "interruptible")
        client.log(address, until="waiting")
        client.ask(verbs.KILL, protocol.Kill((address,), signal.SIGINT))
        exited = client.exited(address)[0]
        assert (exited.exitcode, exited.last_lines[-1]) == (7, "interrupted")


def test_a_proc_that_is_stopped_before_it_started_ends() -> None:
    with hosted(prewarm=False) as (_, client):  # the template takes a second to come up
        [address] = client.spawn(1)
        ended = client.ask(verbs.STOP, protocol.Stop((address,), timeout_s=0, grace_s=0.1))
        assert ended.exits[0].expected


def test_shutting_a_host_down_ends_everything() -> None:
    with hosted() as (handle, client):
        client.started(*client.spawn(3))
        ended = client.ask(verbs.SHUTDOWN, protocol.Shutdown(timeout_s=0.1))
        assert len(ended.exits) == 3
        handle.wait(40)
        until(lambda: not left_of(handle.run_folder))
