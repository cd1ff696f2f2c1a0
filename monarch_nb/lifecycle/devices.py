"""Devices of processes: `gpus=4` gives each process its own GPU. This process itself never touches CUDA."""

import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from monarch_nb.shape import Extent

logger = logging.getLogger(__name__)

DIMENSION = "gpus"
Environment = dict[str, str | None]
_said: set[str] = set()


def devices() -> list[str]:
    """Returns the GPUs this user may use, as CUDA_VISIBLE_DEVICES names them."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        names = [part.strip() for part in chosen.split(",")]
        return names[: names.index("-1")] if "-1" in names else [name for name in names if name]
    try:
        return [str(index) for index in range(len(os.listdir("/proc/driver/nvidia/gpus")))]
    except OSError:
        return []


def environments(per_host: Mapping[str, int], common: Mapping[str, str | None]) -> tuple[Environment, ...]:
    """Returns the environment of each process of a host, row-major: its local rank, and its device if there are any."""
    extent = Extent(tuple(per_host), tuple(per_host.values()))
    offered = devices() if DIMENSION in per_host else []
    if DIMENSION in per_host and not offered and "none" not in _said:
        _said.add("none")
        logger.info("this host has no GPUs: %s is a dimension like any other", DIMENSION)
    by_process = []
    for local in range(extent.nelements):
        own: Environment = {"LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(extent.nelements)}
        if offered:
            own["CUDA_VISIBLE_DEVICES"] = offered[extent.point(local)[DIMENSION] % len(offered)]
        by_process.append({**own, **common})
    return tuple(by_process)


def warn_of_shared(name: str, hosts: Sequence[str], envs: Sequence[Environment], others: Sequence[Any]) -> None:
    """Warns, with names, if processes of living meshes have the same devices as those of the mesh `name`.

    `others` are records of proc meshes.
    """
    wanted = [env["CUDA_VISIBLE_DEVICES"] for env in envs if "CUDA_VISIBLE_DEVICES" in env]
    twice = sorted({str(device) for device in wanted if wanted.count(device) > 1})
    if twice:
        warnings.warn(f"several processes of {name} share GPU {', '.join(twice)}", stacklevel=5)
    for other in others:
        taken = {env.get("CUDA_VISIBLE_DEVICES") for env in other.spawn_spec.env} - {None}
        shared = sorted(str(device) for device in taken & set(wanted))
        if shared and set(hosts) & set(other.hosts):
            warnings.warn(
                f"{name} and {other.name} both use GPU {', '.join(shared)}: stop one of them, or choose devices with "
                "CUDA_VISIBLE_DEVICES",
                stacklevel=5,
            )
