"""What a GPU shows: facts, each a function that finds one out. `python -m tests.gpu` makes the report of them.

A fact returns its evidence in a line, raises where what its docstring says does not hold, and raises NotTried where
this machine cannot show it. MONARCH_NB_REPORT_DEVICE=cpu runs those that make sense without a GPU.
"""

import os
from collections.abc import Callable
from typing import TypeVar

__all__ = ["DEVICE", "NotTried", "fact", "has_gpu", "need_gpu"]

DEVICE = os.environ.get("MONARCH_NB_REPORT_DEVICE", "cuda")
LIMIT_S = 90.0  # of a fact
F = TypeVar("F", bound=Callable[[], str])


class NotTried(Exception):  # an outcome, not an error
    """This machine cannot show the fact; the text says why."""


def fact(*, limit_s: float = LIMIT_S, alone: bool = False) -> Callable[[F], F]:
    """Marks a fact: how long it may take, and whether nothing else may run meanwhile, since it measures speed."""

    def mark(function: F) -> F:
        function.__dict__.update(limit_s=limit_s, alone=alone)
        return function

    return mark


def has_gpu() -> bool:
    """Whether PyTorch finds a GPU here."""
    import torch

    return bool(torch.cuda.is_available())


def need_gpu() -> None:
    """Raises NotTried where PyTorch finds no GPU, or where the report runs without one."""
    if DEVICE != "cuda":
        raise NotTried("it needs a GPU, and the report runs on the CPU")
    if not has_gpu():
        raise NotTried("PyTorch finds no GPU here")
