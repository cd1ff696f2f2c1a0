"""The closed leg on the way to a host: name, port, agent, key, versions."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from monarch_nb.doctor import legs, shut
from monarch_nb.host import packages
from monarch_nb.transport import Keys
from tests.cluster.hosts_tools import HostProcess, key, nothing_left, user_hosts
from tests.ports import free_port

pytestmark = pytest.mark.timeout(60)
__all__ = ["key", "nothing_left"]


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory, key: Path) -> Iterator[HostProcess]:
    with user_hosts(tmp_path_factory.mktemp("agent"), 1, key=key) as [agent]:
        yield agent


def test_an_open_way_has_five_legs(agent: HostProcess, key: Path) -> None:
    checks = legs(agent.endpoint, key, 5)
    assert [leg.about for leg in checks] == ["name", "port", "agent", "key", "versions"]
    assert not shut(checks)


def test_the_first_closed_leg_is_named_with_the_remedy(
    agent: HostProcess, key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def last(endpoint: str, key: "Path | None") -> str:
        checks = legs(endpoint, key, 5.0)
        assert [leg.level for leg in checks] == ["ok"] * (len(checks) - 1) + ["error"]
        return f"{checks[-1].about}: {checks[-1].found} {checks[-1].advice}"

    assert last("node7:22222", key).startswith("address: 'node7:22222' is not an address of a host")
    assert last("tcp://no-such-machine.invalid:22222", key).startswith("name: 'no-such-machine.invalid' is not known")
    assert "connection is refused The machine is there: start an agent" in last(f"tcp://127.0.0.1:{free_port()}", key)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert last(f"tcp://127.0.0.1:{silent.getsockname()[1]}", key).startswith("agent: whatever listens at")
    wrong_key = tmp_path / "other.key"
    Keys.load_or_create(wrong_key)
    assert last(agent.endpoint, wrong_key).startswith("key: ")
    assert "needs a key" in last(agent.endpoint, None)
    assert last(agent.endpoint, tmp_path / "none").startswith("key: there is no key file")
    monkeypatch.setattr(packages, "__version__", "9.9.9")
    assert last(agent.endpoint, key).startswith("versions: ")
