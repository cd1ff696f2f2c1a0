"""Folders that are copied to hosts, and from hosts."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch.gather_mount import gather_mount
from monarch.remotemount import remotemount
from monarch_nb.actor import Actor, ActorError, HostMesh, current_rank, endpoint, this_host
from monarch_nb.connect import shutdown
from monarch_nb.connect.own_hosts import local_hosts
from monarch_nb.job import LocalJob, ProcessJob, job_loads
from monarch_nb.job import mounts as copying
from monarch_nb.job import mounts as mounting
from tests.cluster.actor_tools import faults  # noqa: F401 - a fixture
from tests.polling import until

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("faults")]


@pytest.fixture(scope="module")
def hosts() -> Iterator[HostMesh]:
    yield local_hosts(2)
    shutdown()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    root = tmp_path / "source"
    (root / "package" / "deep").mkdir(parents=True)
    (root / ".monarch").mkdir()
    (root / ".monarch" / "job_state.json").write_text("{}")
    (root / "package" / "code.py").write_text("x = 1\n")
    (root / "package" / "deep" / "run.sh").write_text("#!/bin/sh\n")
    (root / "package" / "deep" / "run.sh").chmod(0o555)
    (root / "empty").write_text("")
    (root / "link").symlink_to("package/code.py")
    (root / "large").write_bytes(os.urandom(200_000))
    return root


def is_copy(source: Path, copy: Path) -> bool:
    expected, actual = copying.tree_of(source), copying.tree_of(copy)
    files = [name for name, entry in expected.items() if entry.kind == "file"]
    return expected == actual and all((source / name).read_bytes() == (copy / name).read_bytes() for name in files)


def test_a_folder_is_mounted_on_each_host_and_follows_changes(
    hosts: HostMesh, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "CHUNK", 64_000)  # the large file takes several messages
    mount = remotemount(hosts, str(source), str(tmp_path / "on-$SUBDIR"))
    with pytest.raises(RuntimeError, match="is not mounted"):
        mount.refresh()
    mount.open()
    copies = [tmp_path / "on-hosts_0", tmp_path / "on-hosts_1"]
    assert all(is_copy(source, copy) for copy in copies)
    assert not (copies[0] / ".monarch").exists()
    read = open(copies[0] / "package" / "code.py")  # noqa: SIM115 - it stays open over the change
    (source / "package" / "code.py").write_text("x = 22\n")
    (source / "large").unlink()
    (source / "empty").unlink()
    (source / "empty").mkdir()
    (source / "empty" / "new").write_text("new")
    sent: list[str] = []
    pieces = mounting.read_pieces
    monkeypatch.setattr(mounting, "read_pieces", lambda root, names: pieces(root, [sent.append(n) or n for n in names]))
    mount.refresh(str(source))
    assert all(is_copy(source, copy) for copy in copies)
    assert sorted(sent) == ["empty/new", "package/code.py"]
    assert read.read() == "x = 1\n"
    read.close()
    mount.refresh()
    assert len(sent) == 2, "nothing has changed"
    mount.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]
    mount.open()
    assert is_copy(source, copies[1])
    mount.close()
    mount.close()


def test_existing_files_are_never_replaced_by_a_mount(hosts: HostMesh, source: Path, tmp_path: Path) -> None:
    target = tmp_path / "theirs"
    target.mkdir()
    (target / "precious").write_text("x")
    (tmp_path / "link").symlink_to(target)
    for point, text in ((target, "with files in it"), (tmp_path / "link", "is a link"), (target / "precious", "file")):
        with pytest.raises(ActorError, match=text):
            remotemount(hosts.slice(hosts=0), str(source), str(point)).open()
    assert (target / "precious").read_text() == "x"
    with pytest.raises(NotADirectoryError):
        remotemount(hosts, str(source / "link"), str(tmp_path / "m")).open()


KILLED = """
import os, signal, sys
from monarch.actor import this_host
from monarch.remotemount import remotemount
remotemount(this_host(), sys.argv[1], sys.argv[2]).open()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_mounts_left_by_a_killed_program_make_room(hosts: HostMesh, source: Path, tmp_path: Path) -> None:
    point = tmp_path / "point"
    subprocess.run([sys.executable, "-c", KILLED, str(source), str(point)], check=False)
    assert point.is_symlink()
    (source / "empty").write_text("now")
    with remotemount(this_host(), str(source), str(point)):
        assert is_copy(source, point)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


class Writer(Actor):
    @endpoint
    def write(self, folder: str, text: str) -> None:
        root = Path(folder, f"hosts_{current_rank()['hosts']}", "out")
        root.mkdir(parents=True, exist_ok=True)
        (root / "log.txt").write_text(f"{text} {current_rank().rank}")


def test_hosts_with_one_file_system_need_a_mount_point_each(hosts: HostMesh, source: Path, tmp_path: Path) -> None:
    with pytest.raises(ActorError, match=r"the same folder on several hosts: put \$SUBDIR into the mount point"):
        remotemount(hosts, str(source), str(tmp_path / "one")).open()
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_mount_point_mounted_again_belongs_to_the_later_mount(hosts: HostMesh, source: Path, tmp_path: Path) -> None:
    first, second = (remotemount(hosts.slice(hosts=0), str(source), str(tmp_path / "there")) for _ in range(2))
    first.open()
    with second:
        with pytest.raises(ActorError, match="is another mount by now"):
            first.refresh()
        first.close()
        assert is_copy(source, tmp_path / "there")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_mount_point_inside_of_its_source_is_not_copied_itself(hosts: HostMesh, source: Path) -> None:
    with remotemount(hosts.slice(hosts=0), str(source), str(source / "there")) as mount:
        mount.refresh()
        assert sorted(os.listdir(source / "there")) == ["empty", "large", "link", "package"]


def test_folders_of_hosts_are_gathered_and_followed(hosts: HostMesh, tmp_path: Path) -> None:
    local = tmp_path / "here"
    procs = hosts.spawn_procs()
    try:
        writer: Any = procs.spawn("writer", Writer)
        with gather_mount(hosts, str(tmp_path / "there" / "$SUBDIR"), str(local), interval=0.1):
            assert sorted(path.name for path in local.iterdir()) == ["hosts_0", "hosts_1"]
            for text in ("first", "second, longer"):
                writer.write.call(str(tmp_path / "there"), text).get(20)
                for rank in range(2):
                    log = local / f"hosts_{rank}" / "out" / "log.txt"
                    until(lambda log=log, line=f"{text} {rank}": log.exists() and log.read_text() == line, "it is here")  # type: ignore[misc]
            (local / "notes").touch()
        assert list(local.iterdir()) == [local / "notes"], "only the copies are removed"
    finally:
        procs.stop().get(20)
    with pytest.raises(FileExistsError):
        gather_mount(hosts, "/nowhere", str(local))
    assert "monarch-gather" not in {thread.name for thread in threading.enumerate()}


@pytest.fixture
def job() -> Iterator[ProcessJob]:
    job = ProcessJob({"trainers": 2, "readers": 1})
    yield job
    job.kill()


@pytest.mark.slow
def test_a_job_mounts_folders_on_its_meshes_and_gathers_others(job: ProcessJob, source: Path, tmp_path: Path) -> None:
    job.remote_mount(str(source), str(tmp_path / "on-$SUBDIR"), meshes=["trainers"], python_exe=None)
    job.gather_mount(str(tmp_path / "written"), str(tmp_path / "gathered"))
    trainers = job.state(None).trainers
    copies = [tmp_path / "on-hosts_0", tmp_path / "on-hosts_1"]
    assert all(is_copy(source, copy) for copy in copies)
    (source / "empty").write_text("new")
    (tmp_path / "written").mkdir()
    (tmp_path / "written" / "by-all").write_text("text")
    assert job.state(None).trainers.extent == trainers.extent
    assert all(is_copy(source, copy) for copy in copies)
    texts = {path.relative_to(tmp_path / "gathered") for path in (tmp_path / "gathered").rglob("by-all")}
    assert texts == {Path("trainers/hosts_0/by-all"), Path("trainers/hosts_1/by-all"), Path("readers/hosts_0/by-all")}
    job.kill()
    assert not any(copy.exists() for copy in copies)
    assert not list((tmp_path / "gathered").rglob("by-all"))


def test_the_mounts_of_a_job_are_saved_with_it(source: Path, tmp_path: Path) -> None:
    job = LocalJob()
    job.remote_mount(str(source), str(tmp_path / "point"), python_exe=None)
    loaded = job_loads(job.dumps())
    loaded.state(None)
    assert is_copy(source, tmp_path / "point")
    loaded.kill()


def test_processes_run_the_python_of_a_mounted_folder(source: Path, tmp_path: Path) -> None:
    job = LocalJob()
    with pytest.raises(ValueError, match="make that environment first"):
        job.remote_mount(str(source))
    python = source / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nMOUNTED=yes exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    with pytest.raises(ValueError, match=r"without \$SUBDIR"):
        job.remote_mount(str(source), str(tmp_path / "$SUBDIR"))
    job.remote_mount(str(source), str(tmp_path / "point"))
    hosts = job.state(None).hosts
    assert hosts.python == str(tmp_path / "point" / ".venv" / "bin" / "python")
    procs = hosts.spawn_procs()
    assert procs.run(os.getenv, "MOUNTED").get(30).item() == "yes"
    procs.stop().get(30)
    job.kill()


def test_a_mount_that_fails_names_the_folder_and_the_mesh(source: Path, tmp_path: Path) -> None:
    job = LocalJob()
    job.remote_mount(str(tmp_path / "nothing"), str(tmp_path / "point"), python_exe=None)
    with pytest.raises(RuntimeError, match=r"remote_mount of .*/nothing on 'hosts' failed: .* is not a folder"):
        job.state(None)
    (tmp_path / "nothing").mkdir()
    job.state(None)
    assert (tmp_path / "point").is_dir()
    job.remote_mount(str(source), meshes=["trainers"], python_exe=None)
    with pytest.raises(ValueError, match="the job has no mesh 'trainers', but 'hosts'"):
        job.state(None)
    job.kill()
