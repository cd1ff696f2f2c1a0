"""The GPU that a process gets, and facts about it."""

import os
import subprocess
import sys
import time
from typing import Any

import monarch_nb.top
from monarch_nb.actor import Actor, endpoint, this_host
from tests.gpu import DEVICE, NotTried, need_gpu

_ANSWER_S = 60.0


class Rank(Actor):
    """Reports its devices."""

    @endpoint
    def sees(self) -> tuple[str | None, int, str]:
        """Its CUDA_VISIBLE_DEVICES, the number of devices, and the name of the first."""
        import torch

        count = torch.cuda.device_count()
        return os.environ.get("CUDA_VISIBLE_DEVICES"), count, torch.cuda.get_device_name(0) if count else ""

    @endpoint
    def computes(self, seconds: float) -> int:
        """Keeps the device busy; gives the bytes in use on it."""
        import torch

        end = time.monotonic() + seconds
        matrix = torch.ones(16384, 16384, device="cuda")  # 1 GB
        while time.monotonic() < end:
            matrix @ matrix
            torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return total - free


def _visible(**options: Any) -> list[Any]:
    if DEVICE != "cuda":
        raise NotTried("it needs a GPU")
    need_gpu()
    procs = this_host().spawn_procs(**options)
    answers = list(procs.spawn("ranks", Rank).sees.call().get(_ANSWER_S).values())
    procs.stop().get(20)
    return answers


def a_rank_gets_its_gpu() -> str:
    """gpus=1 gives the rank the GPU, by CUDA_VISIBLE_DEVICES"""
    answers = _visible(per_host={"gpus": 1})
    assert answers[0][:2] == ("0", 1), answers
    return f"CUDA_VISIBLE_DEVICES={answers[0][0]}: {answers[0][2]}"


def a_host_with_too_few_is_an_error() -> str:
    """gpus=2 on a host with one is an error before anything starts, that says what to do"""
    try:
        answers = _visible(per_host={"gpus": 2})
    except ValueError as error:
        return str(error)[:300]
    raise AssertionError(f"it was spawned: {answers}")


def doctor() -> str:
    """monarch-nb doctor says which driver, which GPUs and which build of PyTorch there are"""
    need_gpu()
    done = subprocess.run(
        [sys.executable, "-m", "monarch_nb", "doctor"], capture_output=True, text=True, check=False, timeout=60
    )
    lines = [line.strip() for line in done.stdout.splitlines() if "GPU" in line or "CUDA" in line or "NCCL" in line]
    assert lines, done.stdout[-500:] + done.stderr[-500:]
    return " / ".join(lines)[:400]


def use_is_shown() -> str:
    """What is in use of a rank's GPU is shown while it computes, and found by `gpu>50%` and `gpu_memory>2gb`"""
    need_gpu()
    began = time.monotonic()
    connection = str(monarch_nb.top.serve())
    procs = this_host().spawn_procs(per_host={"gpus": 1})
    future = procs.spawn("ranks", Rank).computes.call_one(20.0)
    command = [sys.executable, "-m", "monarch_nb", "top", connection, "--once", "--find", "gpu>50% gpu_memory>2gb"]
    text = ""
    while "gpus=0" not in text and time.monotonic() < began + 18:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
        text = done.stdout + done.stderr
    nbytes = future.get(_ANSWER_S)
    procs.stop().get(20)
    assert "gpus=0" in text, text
    return f"{nbytes / 1e9:.1f} GB in use; " + " / ".join(text.splitlines()[-2:])[:200]
