"""The GPUs of this host, and which of them a process gets. Never touches CUDA."""

import os
from collections.abc import Mapping

__all__ = ["SHARED", "SLOT", "TOO_FEW", "VISIBLE", "devices", "too_few", "with_gpu"]

SLOT = "MONARCH_NB_GPU_SLOT"  # of a process that is to be started: its number and how many there are, as "1/4"
SHARED = "shared"  # behind them: processes may have a GPU together
TOO_FEW = "MONARCH_NB_TOO_FEW_GPUS"
VISIBLE = "CUDA_VISIBLE_DEVICES"
_FOLDERS = ("/proc/driver/nvidia/gpus", "/dev")  # containers may lack the first
_DEVICE = "nvidia"


def devices() -> list[str]:
    """The GPUs this user may use, as CUDA_VISIBLE_DEVICES names them."""
    chosen = os.environ.get(VISIBLE)
    if chosen is not None:
        names = [part.strip() for part in chosen.split(",")]
        return names[: names.index("-1")] if "-1" in names else [name for name in names if name]
    for folder in _FOLDERS:
        try:
            names = os.listdir(folder)
        except OSError:
            continue
        found = [name for name in names if folder != "/dev" or name.removeprefix(_DEVICE).isdigit()]
        if found:
            return [str(index) for index in range(len(found))]
    return []


def with_gpu(env: Mapping[str, str | None], host: str) -> dict[str, str | None]:
    """The environment of a process, with its GPU in place of its slot.

    Where there are GPUs, but fewer than slots, and they are not to be shared, `TOO_FEW` says so: the process ends with
    that text, which its failure shows.
    """
    own = dict(env)
    slot = own.pop(SLOT, None)
    offered = devices()
    if slot is None or not offered:
        return own
    numbers, _, shared = slot.partition(" ")
    number, _, count = numbers.partition("/")
    if int(count) > len(offered) and shared != SHARED:
        return {**own, TOO_FEW: too_few(host, len(offered), int(count))}
    own[VISIBLE] = offered[int(number) % len(offered)]
    return own


def too_few(host: str, has: int, wanted: int) -> str:
    """What is said where a host has fewer GPUs than processes are to have."""
    return (
        f"gpus={wanted} on host {host}, which has {has}: spawn gpus={has}, or let processes share a GPU with "
        "monarch.config.configure(share_gpus=True)"
    )
