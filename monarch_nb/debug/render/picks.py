"""Selections of stopped ranks: `3`, `0,2`, `0:4`, `gpus=0:4`, `trainers[gpus=3]`, `trainers gpus=3`."""

import re
from collections.abc import Sequence

from monarch_nb.debug.errors import DebugError
from monarch_nb.debug.records import Stopped

_SLICE = re.compile(r"(-?\d*):(-?\d*)(?::(-?\d*))?")
_DIM = re.compile(r"([^\W\d]\w*)=(\S+)", re.ASCII)


def pick(records: Sequence[Stopped], text: str) -> list[Stopped]:
    """Returns the selected ranks. Raises DebugError for none, or for invalid text."""
    words = text.replace("[", " ").replace("]", " ").split()
    picked = list(records)
    for word in words:
        dim = _DIM.fullmatch(word.rstrip(","))
        if dim is not None:
            picked = _by_dim(picked, dim[1], dim[2])
        elif re.fullmatch(r"[-\d:,]+", word):
            ranks = _numbers(word, 1 + max((record.rank for record in picked), default=0))
            picked = [record for record in picked if record.rank in ranks]
        elif word != "all":
            picked = [record for record in picked if record.name == word]
    if not picked:
        names = ", ".join(dict.fromkeys(record.name for record in records)) or "nothing"
        raise DebugError(f"no stopped rank is {text}; stopped: {names}. Write a rank (3), or gpus=0:4, or all")
    return picked


def _by_dim(records: Sequence[Stopped], label: str, text: str) -> list[Stopped]:
    labels = list(dict.fromkeys(axis for record in records for axis in record.labels))
    if label not in labels:
        raise DebugError(f"there is no dimension {label}; there is: {', '.join(labels) or 'none'}")
    pairs = [(record, record.point[record.labels.index(label)]) for record in records if label in record.labels]
    numbers = _numbers(text, 1 + max((index for _, index in pairs), default=0))
    return [record for record, index in pairs if index in numbers]


def _numbers(text: str, size: int) -> set[int]:
    numbers: set[int] = set()
    for part in text.strip(",").split(","):
        piece = _SLICE.fullmatch(part)
        dash = re.fullmatch(r"(\d+)-(\d+)", part)
        if piece is not None:
            ends = [int(end) if end else None for end in piece.groups()]
            numbers |= set(range(*slice(*ends).indices(size)))
        elif dash is not None:
            numbers |= set(range(int(dash[1]), int(dash[2]) + 1))
        elif re.fullmatch(r"-?\d+", part):
            numbers.add(int(part) if int(part) >= 0 else size + int(part))
        else:
            raise DebugError(f"{part} is neither a rank nor a slice: write 3, 0:4, or 0,2,5")
    return numbers
