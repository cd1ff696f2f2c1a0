"""Wrong or ambiguous records of meshes are reported by name, and left unchanged."""

from pathlib import Path

import pytest

from monarch_nb._package import __version__
from monarch_nb.connect import AttachError, attach_mesh, end_mesh
from monarch_nb.host import mesh_files
from monarch_nb.host.mesh_files import MeshFile
from monarch_nb.lifecycle.proc_spawn import python_version

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def note(uid: str, name: str = "twins", **changes: object) -> Path:
    path = mesh_files.path_of(uid, name)
    fields = {"ways": (), "version": __version__, "python": python_version(), "machine": "here", **changes}
    mesh_files.write(path, MeshFile(uid=uid, name=name, secret="s", ranks=2, shape="gpus=2", **fields))  # type: ignore[arg-type]
    return path


def test_meshes_of_the_same_name_are_attached_by_id() -> None:
    paths = [note("p1", left_at=1.0), note("p2", actors=("counter",), left_at=2.0)]
    for ask in (attach_mesh, end_mesh):
        with pytest.raises(AttachError, match=r"several meshes called twins: .* p[12] \(gpus=2, left at .* p[12] \("):
            ask("twins")
    with pytest.raises(AttachError, match="there is no mesh 'others' to attach; there are: twins"):
        attach_mesh("others")
    assert all(path.exists() for path in paths)


def test_a_mesh_of_another_version_is_refused_naming_both_versions() -> None:
    note("p1")
    note("p2", python="2.7")
    with pytest.raises(AttachError, match=rf"twins runs monarch-nb \S+ on Python 2.7, .* {python_version()}"):
        attach_mesh("p2")


def test_a_file_of_a_mesh_that_is_garbage_is_passed_by() -> None:
    note("p1").write_bytes(b"\x00 no mesh")
    with pytest.raises(AttachError, match="there is no mesh 'twins' to attach; there are: none"):
        attach_mesh("twins")
