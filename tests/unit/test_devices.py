"""Which GPU each process gets."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from monarch_nb.config import configured
from monarch_nb.host import gpus
from monarch_nb.lifecycle import proc_spawn


def _envs(per_host: dict[str, int], common: dict[str, str | None] | None = None) -> list[dict[str, str | None]]:
    """The environments in which a host starts the processes."""
    return [gpus.with_gpu(env, "h1") for env in proc_spawn.environments(per_host, common or {})]


def test_each_process_gets_the_gpu_of_its_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    envs = _envs({"gpus": 2, "lanes": 2}, {"X": "1"})
    assert [env["CUDA_VISIBLE_DEVICES"] for env in envs] == ["4", "4", "7", "7"]
    assert [env["LOCAL_RANK"] for env in envs] == ["0", "1", "2", "3"]
    assert all(env["X"] == "1" and env["LOCAL_WORLD_SIZE"] == "4" for env in envs)
    assert all(gpus.SLOT not in env for env in envs)


def test_a_host_gives_its_own_gpus_whatever_the_controller_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (env, _) = proc_spawn.environments({"gpus": 2}, {})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-5,MIG-6,MIG-7")
    assert gpus.with_gpu(env, "h2")["CUDA_VISIBLE_DEVICES"] == "MIG-5"


def test_a_process_that_chooses_its_devices_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert _envs({"gpus": 2}, {"CUDA_VISIBLE_DEVICES": "0"})[1]["CUDA_VISIBLE_DEVICES"] == "0"


def test_a_list_of_devices_ends_at_minus_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,-1,3")
    assert gpus.devices() == ["2"]


def test_a_container_without_the_drivers_folder_shows_its_devices(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpus, "_FOLDERS", (str(tmp_path / "nothing"), str(tmp_path)))
    assert gpus.devices() == []
    monkeypatch.setattr(gpus, "_FOLDERS", (str(tmp_path),))
    for name in ("0000:00:05.0", "0000:00:06.0"):
        (tmp_path / name).mkdir()
    assert gpus.devices() == ["0", "1"]


def test_without_gpus_it_is_a_dimension_and_that_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(proc_spawn, "_logged", set())
    with caplog.at_level("INFO"):
        first = _envs({"gpus": 3})
        _envs({"gpus": 3})
    assert len(first) == 3
    assert all("CUDA_VISIBLE_DEVICES" not in env for env in first)
    assert len([r for r in caplog.records if "no GPUs" in r.message]) == 1


def test_too_few_gpus_is_an_error_that_says_how_to_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(ValueError, match=r"gpus=2 on host h1, which has 1: spawn gpus=1, or .*share_gpus=True"):
        proc_spawn.check_own_host("h1", {"gpus": 2}, {})
    assert all("which has 1" in str(env[gpus.NO_GPU]) for env in _envs({"gpus": 2}))
    proc_spawn.check_own_host("h1", {"gpus": 2}, {"CUDA_VISIBLE_DEVICES": "0"})
    with configured(share_gpus=True):
        proc_spawn.check_own_host("h1", {"gpus": 2}, {})
        assert [env["CUDA_VISIBLE_DEVICES"] for env in _envs({"gpus": 3})] == ["0", "0", "0"]


def test_sharing_by_mps_asks_for_its_daemon_where_there_are_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("PATH", "/nowhere")
    assert not gpus.wants_mps(proc_spawn.environments({"gpus": 2}, {}))
    with configured(share_gpus="mps"):
        envs = proc_spawn.environments({"gpus": 2}, {})
        assert gpus.wants_mps(envs)
        assert not gpus.wants_mps(proc_spawn.environments({"lanes": 2}, {}))
        with pytest.raises(ValueError, match=r"host h1 cannot be shared by MPS: .* is not on PATH.*share_gpus=True"):
            proc_spawn.check_own_host("h1", {"gpus": 2}, {})
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        assert not gpus.wants_mps(envs)
        proc_spawn.check_own_host("h1", {"gpus": 2}, {})


@pytest.mark.parametrize(
    ("processes", "gpu_names", "percentage"), [(1, "0", "100"), (4, "0,1", "50"), (3, "0,1", "50")]
)
def test_equal_parts_are_those_of_the_processes_of_a_gpu(
    processes: int, gpu_names: str, percentage: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpu_names)
    daemon = gpus.MpsDaemon("h1", tmp_path, -1, lambda call: call())
    daemon.environment = {gpus.PIPES: "/pipes"}
    with configured(share_gpus="mps-equal"):
        specs = proc_spawn.environments({"gpus": processes}, {})
    envs = [gpus.with_gpu(env, "h1", daemon) for env in specs]
    assert {env[gpus.THREADS] for env in envs} == {percentage}
    assert {env[gpus.PIPES] for env in envs} == {"/pipes"}


def _mesh(name: str, env: Any, hosts: tuple[str, ...] = ("h1",)) -> SimpleNamespace:
    unused: Any = None
    spec = proc_spawn.ProcSpawnSpec(unused, unused, tuple(env), (), (), None, "")
    return SimpleNamespace(name=name, hosts=hosts, spawn_spec=spec)


def test_two_meshes_on_the_same_gpus_warn_with_both_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    env = proc_spawn.environments({"gpus": 2}, {})
    with pytest.warns(UserWarning, match=r"trainers and servers both use GPU 0, 1"):
        proc_spawn.warn_of_shared("trainers", ["h1"], env, [_mesh("servers", env)])


def test_meshes_that_use_other_gpus_or_share_them_do_not_warn(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    env = proc_spawn.environments({"gpus": 1}, {})
    proc_spawn.warn_of_shared("a", ["h1"], env, [_mesh("b", env, hosts=("h2",))])
    proc_spawn.warn_of_shared("a", ["h1"], env, [_mesh("b", [{"CUDA_VISIBLE_DEVICES": "1"}])])
    with configured(share_gpus=True):
        proc_spawn.warn_of_shared("a", ["h1"], env, [_mesh("b", env)])
    assert list(recwarn) == []
