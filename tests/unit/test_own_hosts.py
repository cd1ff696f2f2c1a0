"""Agents that a program starts on its own machine, beside hosts of others."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from monarch_nb.connect import own_hosts, routes
from monarch_nb.connect.own_hosts import LocalAgents
from monarch_nb.connect.routes import Routes
from monarch_nb.mesh.registry import MeshRegistry
from monarch_nb.runtime import Future, pending_future, resolve_future
from monarch_nb.wire import Done

pytestmark = pytest.mark.timeout(20)


class OthersAgent:
    """A host of another program, whose agent answers a little later."""

    host, incarnation, endpoint, lost, near, behind, dials_nobody = "h2", 1, "ipc:///run/h2", "", True, False, False

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def hear(self, _: Any, address: str, _verb: Any, hosts: Any) -> Future[Done]:
        answer: Future[Done] = pending_future(describe=lambda: "it has not heard yet")

        def answered() -> None:
            self.heard.append((address, dict(hosts.endpoints)))
            resolve_future(answer, Done())

        threading.Timer(0.1, answered).start()
        return answer


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> OthersAgent:
    agent = OthersAgent()
    monkeypatch.setattr(routes, "request", agent.hear)
    started = SimpleNamespace(host="h1", incarnation=1, run_folder=Path("/run/h1"), pid=1, address="h1/agent")
    started.wait = lambda *_: started if _ else threading.Event().wait()
    monkeypatch.setattr(own_hosts, "begin_agent", lambda *_, **__: started)
    return agent


def test_a_new_agent_starts_after_other_hosts_know_of_it(other: OthersAgent) -> None:
    parts: dict[type, Any] = {MeshRegistry: SimpleNamespace(agent_environment={})}
    runtime: Any = SimpleNamespace(
        host="h1", address="h1/c0.0.0", part=parts.__getitem__, local_hosts=set(), closed=False,
        node=SimpleNamespace(learn=lambda *_, **__: None),
    )  # fmt: skip
    parts[Routes] = Routes(runtime, lambda _: "")
    parts[Routes].attached["h2"] = other  # type: ignore[assignment]
    LocalAgents(runtime, None).ensure()
    assert {address for address, _ in other.heard} == {"h1/agent", "h2/agent"}
