"""Which device each process is given."""

from types import SimpleNamespace

import pytest

from monarch_nb.lifecycle import devices


def test_each_process_gets_the_device_of_its_place(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    found = devices.environments({"gpus": 2, "lanes": 2}, {"X": "1"})
    assert [env["CUDA_VISIBLE_DEVICES"] for env in found] == ["4", "4", "7", "7"]
    assert [env["LOCAL_RANK"] for env in found] == ["0", "1", "2", "3"]
    assert all(env["X"] == "1" and env["LOCAL_WORLD_SIZE"] == "4" for env in found)


def test_a_list_of_devices_ends_at_minus_one(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,-1,3")
    assert devices.devices() == ["2"]


def test_without_devices_gpus_is_a_dimension_and_that_is_said_once(monkeypatch, caplog):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(devices, "_said", set())
    with caplog.at_level("INFO"):
        first = devices.environments({"gpus": 3}, {})
        devices.environments({"gpus": 3}, {})
    assert len(first) == 3
    assert all("CUDA_VISIBLE_DEVICES" not in env for env in first)
    assert len([r for r in caplog.records if "no GPUs" in r.message]) == 1


def _mesh(name, env, hosts=("h1",)):
    return SimpleNamespace(name=name, hosts=tuple(hosts), spawn_spec=SimpleNamespace(env=tuple(env)))


def test_two_meshes_on_the_same_device_warn_with_both_names(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    env = devices.environments({"gpus": 2}, {})
    with pytest.warns(UserWarning, match=r"trainers and servers both use GPU 0, 1"):
        devices.warn_of_shared("trainers", ["h1"], env, [_mesh("servers", env)])


def test_meshes_on_other_hosts_or_devices_do_not_warn(monkeypatch, recwarn):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    env = devices.environments({"gpus": 1}, {})
    devices.warn_of_shared("a", ["h1"], env, [_mesh("b", env, hosts=("h2",))])
    devices.warn_of_shared("a", ["h1"], env, [_mesh("b", [{"CUDA_VISIBLE_DEVICES": "1"}])])
    assert list(recwarn) == []


def test_more_processes_than_devices_warns(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.warns(UserWarning, match="several processes of a share GPU 0"):
        devices.warn_of_shared("a", ["h1"], devices.environments({"gpus": 2}, {}), [])
