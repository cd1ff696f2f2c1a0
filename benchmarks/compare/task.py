"""What all systems compute: plain functions, which know nothing of the system."""

import os
import time
from typing import Any

import numpy as np

Array = Any  # of numpy

RANKS = 4

# -- evaluation ------------------------------------------------------------------------------------------------------

POINTS = list(range(400))


def objective(point: int) -> float:
    """A value that takes between one and five milliseconds to find."""
    end, total = time.perf_counter() + 0.001 * (1 + point % 5), 0.0
    while time.perf_counter() < end:
        total += sum(range(50))
    return float(point) ** 0.5


# -- training --------------------------------------------------------------------------------------------------------

STEPS = 60
KILLED_AT = 30
KILLED_RANK = 2
RATE = 0.4
FEATURES = 64


def shard(rank: int) -> tuple[Array, Array]:
    """The rows of one rank: features, and targets."""
    random = np.random.default_rng(rank)
    rows = random.normal(size=(2000, FEATURES))
    return rows, rows @ np.arange(FEATURES) / FEATURES + random.normal(size=2000) * 0.1


def start_weights() -> Array:
    return np.zeros(FEATURES)


def gradient(weights: Array, rows: tuple[Array, Array]) -> Array:
    """The gradient of the mean squared error, for the rows of one rank."""
    features, targets = rows
    return features.T @ (features @ weights - targets) / len(targets)


def loss(weights: Array) -> float:
    """Over the rows of all ranks."""
    return float(np.mean([np.mean((x @ weights - y) ** 2) for x, y in map(shard, range(RANKS))]))


# -- parameters ------------------------------------------------------------------------------------------------------

PARAMETERS = 64 << 20  # bytes
VERSIONS = 5


def parameters(version: int) -> Array:
    return np.full(PARAMETERS, version, np.uint8)


def check(array: Array, version: int) -> int:
    """Reads each page; raises where it is not of that version."""
    assert int(array[::4096].min()) == int(array[::4096].max()) == version
    return version


# -- a broken rank ---------------------------------------------------------------------------------------------------

MANY = 8
BROKEN = 5


def train_step(rank: int) -> float:
    """One rank of eight has a bad value among its own, and fails on it further down."""
    batch = np.arange(1.0, 9.0) + rank
    scale = -1.0 if rank == BROKEN else 1.0
    return normalised(batch, scale)


def normalised(batch: Array, scale: float) -> float:
    spread = float(batch.std() * scale)
    if spread <= 0:
        raise ValueError(f"the spread is {spread:.3f}")
    return spread


# -- elastic ---------------------------------------------------------------------------------------------------------

FEW, MORE = 2, 4
ROUNDS = 6


def job(number: int) -> int:
    """Work of one round; the same on every worker."""
    time.sleep(0.02)
    return number * number


def process() -> int:
    return os.getpid()
