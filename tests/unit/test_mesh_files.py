"""Files of meshes whose holders or agents were killed: the next reader corrects them."""

import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from monarch_nb.connect import AttachError, attach_mesh, detached_meshes, listing
from monarch_nb.host import mesh_files
from monarch_nb.host.mesh_files import HostRoute, MeshFile, has_ended, own_system, start_of
from monarch_nb.host.protocol import MeshHolder

pytestmark = pytest.mark.timeout(30)


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


@pytest.fixture
def sleeper() -> "Iterator[subprocess.Popen[bytes]]":
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


def holder(pid: int, **more: Any) -> MeshHolder:
    return MeshHolder(address="k/c", pid=pid, machine=platform.node(), what="the notebook a.ipynb", since=time.time(),
                  **{"system": own_system(), "started": start_of(pid), **more})  # fmt: skip


def write(endpoint: str = "tcp://node7:1", **fields: Any) -> Path:
    mesh = MeshFile(uid="p1", name="fleet", secret="s", ways=(HostRoute("node7.1", endpoint),), version="1", python="3",
                    machine=platform.node(), ranks=2, shape="hosts=2", **fields)  # fmt: skip
    path = mesh_files.path_of("p1", "fleet")
    mesh_files.write(path, mesh)
    return path


def test_a_mesh_is_held_until_its_holder_is_killed_then_left(sleeper: Any) -> None:
    write(holder=holder(sleeper.pid), keep=3600.0)
    assert "held by the notebook a.ipynb" in listing(detached_meshes())
    sleeper.kill()  # not waited for
    while not has_ended(holder(sleeper.pid)):
        time.sleep(0.01)
    [mesh] = detached_meshes()
    assert (mesh.holder, mesh.former, mesh.secret) == (None, "k/c", "s")
    assert "held by" not in listing([mesh])
    assert f"the notebook a.ipynb (process {sleeper.pid}) has ended; " in listing([mesh])
    sleeper.wait()
    assert has_ended(holder(sleeper.pid))


def test_nobody_out_of_sight_is_reported_as_ended(sleeper: Any) -> None:
    own_holder = holder(os.getpid())
    assert not has_ended(own_holder)
    assert has_ended(msgspec.structs.replace(own_holder, started=own_holder.started - 1)), "a later process has its id"
    sleeper.kill()
    sleeper.wait()
    assert not has_ended(holder(sleeper.pid, system="another machine"))
    assert not has_ended(holder(sleeper.pid, system=""))


def test_a_mesh_that_ends_with_its_holder_is_not_listed_afterwards(sleeper: Any) -> None:
    path = write(holder=holder(sleeper.pid))
    sleeper.kill()
    sleeper.wait()
    assert detached_meshes() == []
    record = mesh_files.read(path)
    assert record is not None
    assert (record.secret, record.ways) == ("", ())
    with pytest.raises(AttachError, match=r"fleet is gone: it has ended with its program: .* has ended; spawn it anew"):
        attach_mesh("fleet")
    assert not path.exists(), "who asked was told"


@pytest.mark.parametrize("jump", [-1e6, 1e6])
def test_a_clock_that_is_set_ends_no_lease_and_no_holder(
    sleeper: Any, monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    path = write(holder=holder(sleeper.pid), keep=3600.0)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + jump)
    [mesh] = detached_meshes()
    assert mesh.holder is not None, "it lives"
    mesh_files.leave(path, 3600.0, "it was detached")
    monkeypatch.setattr(time, "time", real)
    [mesh] = detached_meshes()
    assert 3500 < mesh_files.lease_left(mesh) <= 3600
    assert "; 1h of its lease left" in listing([mesh]) or "; 59m" in listing([mesh])
    mesh_files.change(path, boot="another machine", until=real() - 30)
    assert len(detached_meshes()) == 1, "the clocks of two machines differ"
    mesh_files.change(path, until=real() - 300)
    assert detached_meshes() == []


def test_an_expired_lease_or_a_killed_agent_leaves_nothing_listed(tmp_path: Path) -> None:
    now = time.time()
    write(left_at=now - 9, until=now + 9, why="it was detached")
    assert len(detached_meshes()) == 1
    write(left_at=now - 900, until=now - 600, why="it was detached")
    assert detached_meshes() == []
    write(f"ipc://{tmp_path}", left_at=now, until=now + 900, why="it was detached")
    with socket.socket(socket.AF_UNIX) as agent:
        agent.bind(str(tmp_path / "agent"))
        agent.listen()
        assert len(detached_meshes()) == 1
    assert (tmp_path / "agent").exists(), "as SIGKILL leaves it"
    assert detached_meshes() == []
