"""pip on the hosts of a mesh: once in each environment, with the hosts of each run."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from monarch_nb.actor import ProcMesh, context
from monarch_nb.code import PipError, packages, run_pip
from monarch_nb.testing import Cluster

pytestmark = [pytest.mark.timeout(60)]
HOSTS = 3
runs: list[tuple[str, tuple[str, ...]]] = []


def host() -> str:
    return context().actor_instance.proc_id.partition("/")[0]


def pip(words: Sequence[str]) -> tuple[int, dict[str, tuple[str, str]]]:
    runs.append((host(), tuple(words)))
    if words[-1] == f"fails-on-{host()}":
        return 1, {}
    return 0, {"toy": ("1.0", "2.0")} if "--upgrade" in words else {"toy": ("", "1.0")}


def look(names: Sequence[str]) -> list[str]:
    return list(names) if host() == "m2" else []


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Hosts m0 and m1 have the same packages, m2 has others."""
    for name in ("ours", "other"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(packages, "_packages", lambda: tmp_path / ("other" if host() == "m2" else "ours"))
    monkeypatch.setattr(packages, "_pip", pip)
    monkeypatch.setattr(packages, "_loaded_packages", look)
    runs.clear()
    return tmp_path


@pytest.fixture
def procs(simulated: Cluster) -> Iterator[ProcMesh]:
    mesh = simulated.hosts().spawn_procs({"gpus": 2}, name="trainers")
    yield mesh
    mesh.stop().get(20)


def test_pip_runs_once_per_environment_and_leaves_no_mark(procs: ProcMesh, shared: Path) -> None:
    result = run_pip(procs, ["install", "toy"])
    assert sorted(runs) == [("m0", ("install", "toy")), ("m2", ("install", "toy"))]
    first, second = repr(result).splitlines()
    assert first.startswith("trainers hosts=0-1 (")
    assert second.startswith("trainers hosts=2 (")
    assert first.endswith("): toy 1.0")
    assert [path for path in shared.rglob("*") if path.is_file()] == []


def test_packages_that_ranks_loaded_before_they_changed_are_named(procs: ProcMesh, shared: Path) -> None:
    lines = repr(run_pip(procs, ["install", "--upgrade", "toy"])).splitlines()
    assert lines[0].endswith(": toy 1.0 → 2.0")
    assert lines[2].startswith(
        "toy is loaded on hosts=2 as it was before: %heal trainers --kill starts the processes anew"
    )


def test_a_partial_failure_is_reported_with_the_results_elsewhere(procs: ProcMesh, shared: Path) -> None:
    with pytest.raises(
        PipError, match=r"hosts=0-1 .*: toy 1.0\n.*hosts=2 \(.*\): pip has failed, with status 1"
    ) as caught:
        run_pip(procs, ["install", "fails-on-m2"])
    assert [run.status for run in caught.value.installed.done] == [0, 1]
    with pytest.raises(ValueError, match="pip needs words"):
        run_pip(procs, [])


def test_an_unwritable_folder_is_reported_by_machine(
    procs: ProcMesh, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "_packages", lambda: Path("/proc/nowhere"))
    part: Any = procs.slice(hosts=slice(1, 3))
    assert [run.where for run in run_pip(part, ["install", "toy"]).done] == ["hosts=0-1"]
    assert runs == [("m1", ("install", "toy"))]
