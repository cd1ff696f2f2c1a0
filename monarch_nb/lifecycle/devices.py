"""GPUs of processes: `gpus=4` gives each its own, by its slot on its host. This process itself never touches CUDA."""

import logging
import warnings
from collections.abc import Mapping, Sequence

from monarch_nb.host.gpus import SHARED, SLOT, VISIBLE, devices, too_few
from monarch_nb.runtime import ProcState
from monarch_nb.settings import settings
from monarch_nb.shape import Extent

logger = logging.getLogger(__name__)

DIMENSION = "gpus"
Environment = dict[str, str | None]
_said: set[str] = set()


def environments(per_host: Mapping[str, int], common: Mapping[str, str | None]) -> tuple[Environment, ...]:
    """The environment of each process of a host, row-major: its local rank, and the slot of its GPU.

    Its host gives the slot a GPU, if it has any (`host.gpus.with_gpu`); where `common` chooses devices, there is none.
    """
    extent = Extent(tuple(per_host), tuple(per_host.values()))
    wanted = DIMENSION in per_host and VISIBLE not in common
    if wanted and not devices() and "none" not in _said:
        _said.add("none")
        logger.info("this host has no GPUs: %s is a dimension like any other", DIMENSION)
    by_process = []
    for local in range(extent.nelements):
        own: Environment = {"LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(extent.nelements)}
        if wanted:
            shared = f" {SHARED}" if settings.share_gpus else ""
            own[SLOT] = f"{extent.point(local)[DIMENSION]}/{per_host[DIMENSION]}{shared}"
        by_process.append({**own, **common})
    return tuple(by_process)


def check_own_host(host: str, per_host: Mapping[str, int], common: Mapping[str, str | None]) -> None:
    """Raises ValueError where this machine, whose name is `host`, has GPUs, but fewer than are asked for."""
    wanted, has = per_host.get(DIMENSION, 0), len(devices())
    if 0 < has < wanted and VISIBLE not in common and not settings.share_gpus:
        raise ValueError(too_few(host, has, wanted))


def _gpu_of(env: Mapping[str, str | None]) -> str | None:
    """What names the GPU of a process: its own choice, or the number of its slot."""
    slot = env.get(SLOT)
    return slot.partition("/")[0] if slot is not None else env.get(VISIBLE)


def warn_of_shared(name: str, hosts: Sequence[str], envs: Sequence[Environment], others: Sequence[ProcState]) -> None:
    """Warns, with names, if processes of living meshes have the same GPUs as those of the mesh `name`.

    `others` are records of proc meshes. Nothing is said where GPUs are to be shared, or here are none.
    """
    if settings.share_gpus or not devices():
        return
    wanted = {gpu for env in envs if (gpu := _gpu_of(env)) is not None}
    for other in others:
        spawned = () if other.spawn_spec is None else other.spawn_spec.env
        shared = sorted(wanted & {gpu for env in spawned if (gpu := _gpu_of(env)) is not None})
        if shared and set(hosts) & set(other.hosts):
            warnings.warn(
                f"{name} and {other.name} both use GPU {', '.join(shared)}: stop one of them, choose devices with "
                "CUDA_VISIBLE_DEVICES, or say that they share them with monarch.config.configure(share_gpus=True)",
                stacklevel=5,
            )
