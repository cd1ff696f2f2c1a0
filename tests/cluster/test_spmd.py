"""torch.distributed on a proc mesh, also after a process was lost."""

import asyncio
import importlib.util
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_nb.actor import Actor, ActorError, Channel, SupervisionError, endpoint, heal_mesh
from monarch_nb.config import configured
from monarch_nb.job import ProcessJob
from monarch_nb.spmd import AddrType, SPMDActor, setup_torch_elastic_env, setup_torch_elastic_env_async
from monarch_nb.supervision import HealError
from tests.cluster.fault_tools import SOON, spawned

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(120),
    pytest.mark.usefixtures("host"),
    pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="torch is not installed"),
]


@pytest.fixture(scope="module", autouse=True)
def born_with_torch() -> Iterator[None]:
    """As procs of users are; importing torch dominates these tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MONARCH_NB_PRELOAD", raising=False)
        yield


class Trainer(Actor):
    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def environment(self, *names: str) -> list[str]:
        return [os.environ[name] for name in names]

    @endpoint
    def begin(self) -> None:
        import torch.distributed

        torch.distributed.init_process_group("gloo")

    @endpoint
    def total(self, value: float, port: Any = None) -> float:
        import torch

        tensor = torch.tensor([value + torch.distributed.get_rank()])
        if port is not None:
            port.send(1)
        torch.distributed.all_reduce(tensor)
        return tensor.item()

    @endpoint
    def end(self) -> None:
        import torch.distributed

        torch.distributed.destroy_process_group()


def test_ranks_have_what_torchrun_would_give_them(host: Any) -> None:
    with spawned(host, 2) as procs:
        setup_torch_elastic_env(procs, "trainer-0", 29500)
        trainer: Any = procs.spawn("trainer", Trainer)
        names = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
        values = trainer.environment.call(*names).get(SOON).values()
        assert values == [["trainer-0", "29500", rank, "2", rank, "2", "0"] for rank in "01"]


NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR")


def test_processes_are_born_with_what_torchrun_would_give_them(host: Any) -> None:
    with spawned(host, 2, env={"MASTER_PORT": "29511"}) as procs:
        trainer: Any = procs.spawn("trainer", Trainer)
        values = trainer.environment.call(*NAMES, "MASTER_PORT").get(SOON).values()
        assert values == [[rank, "2", rank, "2", "0", "localhost", "29511"] for rank in "01"]
        setup_torch_elastic_env(procs)
        ports = [port for (port,) in trainer.environment.call("MASTER_PORT").get(SOON).values()]
        assert ports[0] == ports[1] != "29511"


def test_torchruns_environment_can_be_switched_off(host: Any) -> None:
    with configured(torchrun_environment=False), spawned(host, 1) as procs:
        trainer: Any = procs.spawn("trainer", Trainer)
        with pytest.raises(ActorError, match="KeyError: 'RANK'"):
            trainer.environment.call("RANK").get(SOON)


def test_half_a_master_is_refused(host: Any) -> None:
    with spawned(host, 1) as procs, pytest.raises(ValueError, match="both master_addr and master_port"):
        setup_torch_elastic_env(procs, master_port=29500)


@pytest.mark.slow
def test_groups_are_rebuilt_on_survivors_after_a_heal(host: Any, shown: list[Any]) -> None:
    with spawned(host, 3) as procs:
        setup_torch_elastic_env(procs)
        trainer: Any = procs.spawn("trainer", Trainer)
        trainer.begin.call().get(SOON)
        assert trainer.total.call(10.0).get(SOON).values() == [33.0] * 3
        pids = trainer.pid.call().get(SOON).values()
        port, receiver = Channel[int].open()
        under_way = trainer.slice(gpus=slice(0, 2)).total.call(1.0, port)
        for _ in range(2):
            receiver.recv().get(SOON)
        os.kill(pids[2], signal.SIGKILL)
        with pytest.raises(SupervisionError):
            trainer.slice(gpus=2).pid.call_one().get(SOON)
        heal_mesh(trainer, timeout=SOON)
        setup_torch_elastic_env(procs)  # frees the groups in which two ranks wait for the dead one
        with pytest.raises(ActorError):
            under_way.get(SOON)
        trainer.begin.call().get(SOON)
        assert trainer.total.call(20.0).get(SOON).values() == [63.0] * 3
        new_pids = trainer.pid.call().get(SOON).values()
        assert new_pids[:2] == pids[:2]
        assert new_pids[2] != pids[2]
        trainer.end.call().get(SOON)


def test_scripts_run_with_their_arguments(host: Any, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os, sys\nopen(sys.argv[1] + os.environ['RANK'], 'w').write(__name__)\nsys.exit(0)\n")
    with spawned(host, 2) as procs:
        asyncio.run(setup_torch_elastic_env_async(procs, use_ipaddr=AddrType.IPv4))
        actors: Any = procs.spawn("spmd", SPMDActor)
        name, port = actors.slice(gpus=0).get_host_port.call_one(AddrType.IPv4).get(SOON)
        assert name.count(".") == 3
        assert actors.main.call(name, port, [str(script), f"{tmp_path}/out"]).get(SOON).values() == [True, True]
        assert (tmp_path / "out1").read_text() == "__main__"
        for arguments, message in (([], "neither a script"), (["-m", "no_such_module_xyz"], "no_such_module_xyz")):
            with pytest.raises(ActorError, match=message):
                actors.main.call(name, port, arguments).get(SOON)


class Picky(Actor):
    def __init__(self) -> None:
        if os.environ["RANK"] == "2":
            raise ValueError("not here")


@pytest.mark.slow
def test_the_environment_follows_the_size_of_the_mesh() -> None:
    names = ("RANK", "WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_RANK")
    job = ProcessJob({"trainers": 1}, env={"MONARCH_NB_PRELOAD": ""})
    try:
        procs = job.state(cached_path=None).trainers.spawn_procs(name="trainers")
        trainers: Any = procs.spawn("trainers", Trainer)
        procs.grow(hosts=1)
        assert trainers.environment.call(*names).get(SOON).values() == [
            ["0", "2", "0", "2", "0"], ["1", "2", "1", "2", "0"],
        ]  # fmt: skip
        procs.spawn("picky", Picky).initialized.get(SOON)
        with pytest.raises(HealError, match="has not grown"):
            procs.grow(hosts=1)
        assert [values[1] for values in trainers.environment.call(*names).get(SOON).values()] == ["2", "2"]
        ports = trainers.environment.call("MASTER_PORT").get(SOON).values()
        procs.shrink(hosts=[0])
        assert trainers.environment.call(*names).get(SOON).values() == [["0", "1", "0", "1", "0"]]
        assert trainers.environment.call("MASTER_PORT").get(SOON).values() != ports[1:]
    finally:
        job.kill()
