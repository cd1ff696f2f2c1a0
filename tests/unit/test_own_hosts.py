"""Agents that a program starts on its own machine, beside hosts of others."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from monarch_nb.connect import own_hosts, routes
from monarch_nb.connect.own_hosts import LocalAgents
from monarch_nb.connect.routes import HostRoutes
from monarch_nb.host.launch import AgentStartError
from monarch_nb.mesh.registry import MeshRegistry
from monarch_nb.runtime import Future, pending_future, resolve_future
from monarch_nb.transport import UnreachableError
from monarch_nb.wire import Done

pytestmark = pytest.mark.timeout(20)


class OthersAgent:
    """A host of another program, whose agent answers a little later."""

    host, incarnation, endpoint, lost = "h2", 1, "ipc:///run/h2", ""
    is_local, via_gateway, dials_only_controller = True, False, False

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def request(self, _: Any, address: str, _verb: Any, hosts: Any) -> Future[Done]:
        answer: Future[Done] = pending_future(describe=lambda: "it has not answered yet")
        threading.Timer(0.1, self._answer, (answer, (address, dict(hosts.endpoints)))).start()
        return answer

    def _answer(self, answer: Future[Done], message: object) -> None:
        self.sent.append(message)
        resolve_future(answer, Done())


@pytest.fixture
def others_agent(monkeypatch: pytest.MonkeyPatch) -> OthersAgent:
    agent = OthersAgent()
    monkeypatch.setattr(routes, "request", agent.request)
    started = SimpleNamespace(host="h1", incarnation=1, run_folder=Path("/run/h1"), pid=1, address="h1/agent")
    started.wait = lambda *_: started if _ else threading.Event().wait()
    monkeypatch.setattr(own_hosts, "begin_agent", lambda *_, **__: started)
    return agent


@pytest.fixture
def agents(others_agent: OthersAgent) -> LocalAgents:
    parts: dict[type, Any] = {MeshRegistry: SimpleNamespace(agent_environment={})}
    node = SimpleNamespace(learn=lambda *_, **__: None)
    runtime: Any = SimpleNamespace(host="h1", address="h1/c0.0.0", local_hosts=set(), closed=False, node=node)
    runtime.part = parts.__getitem__
    parts[HostRoutes] = HostRoutes(runtime, lambda _: "")
    parts[HostRoutes].attached["h2"] = others_agent  # type: ignore[assignment]
    return LocalAgents(runtime, None)


def test_a_new_agent_starts_after_other_hosts_know_of_it(agents: LocalAgents, others_agent: OthersAgent) -> None:
    agents.ensure()
    assert {address for address, _ in others_agent.sent} == {"h1/agent", "h2/agent"}


def test_hosts_end_if_the_next_does_not_start(agents: LocalAgents, monkeypatch: pytest.MonkeyPatch) -> None:
    begin, ended = own_hosts.begin_agent, list[str]()

    def begin_two(host: str, *arguments: Any, **options: Any) -> Any:
        if len(agents.running) == 2:
            raise AgentStartError("no room")
        agent = begin(host, *arguments, **options)
        return SimpleNamespace(**{**vars(agent), "host": host})

    monkeypatch.setattr(own_hosts, "begin_agent", begin_two)
    monkeypatch.setattr(own_hosts, "shutdown_hosts", ended.extend)
    with pytest.raises(AgentStartError):
        agents.add(9)
    assert ended == list(agents.running)


@pytest.mark.parametrize(("count", "error"), [(0, ValueError), (10**8, ValueError), (2.5, TypeError)])
def test_an_impossible_number_of_hosts_starts_none(count: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        own_hosts.local_hosts(count)


def test_a_loss_is_announced_although_one_host_has_ended(agents: LocalAgents) -> None:
    sent, runtime = list[str](), agents._runtime
    hosts = runtime.part(HostRoutes)

    def post(address: str, *_: object) -> None:
        if address == "h2/agent":
            raise UnreachableError("it has ended")
        sent.append(address)

    runtime.later, runtime.post = (lambda _, run: run()), post  # type: ignore[method-assign]
    hosts.local.update({"h2": 1, "h3": 1})
    hosts.announce_lost("h4", "its agent has ended", 1, 1)
    assert sent == ["h3/agent"]
