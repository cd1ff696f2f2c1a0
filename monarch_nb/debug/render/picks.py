"""Which of the stopped ranks somebody means: `3`, `0,2`, `0:4`, `gpus=0:4`, `trainers[gpus=3]`, `trainers gpus=3`."""

import re
from collections.abc import Sequence

from monarch_nb.debug.errors import DebugError
from monarch_nb.debug.records import Stopped

_SLICE = re.compile(r"(-?\d*):(-?\d*)(?::(-?\d*))?")
_DIM = re.compile(r"([^\W\d]\w*)=(\S+)", re.ASCII)


def pick(records: Sequence[Stopped], text: str) -> list[Stopped]:
    """Those that are meant. Raises DebugError where none is, or the text means nothing."""
    words = text.replace("[", " ").replace("]", " ").split()
    found = list(records)
    for word in words:
        dim = _DIM.fullmatch(word.rstrip(","))
        if dim is not None:
            found = _by_dim(found, dim[1], dim[2])
        elif re.fullmatch(r"[-\d:,]+", word):
            wanted = _numbers(word, 1 + max((one.rank for one in found), default=0))
            found = [one for one in found if one.rank in wanted]
        elif word != "all":
            found = [one for one in found if one.name == word]
    if not found:
        known = ", ".join(dict.fromkeys(one.name for one in records)) or "nothing"
        raise DebugError(f"no stopped rank is {text}; stopped: {known}. Write a rank (3), or gpus=0:4, or all")
    return found


def _by_dim(records: Sequence[Stopped], label: str, text: str) -> list[Stopped]:
    labels = list(dict.fromkeys(each for one in records for each in one.labels))
    if label not in labels:
        raise DebugError(f"there is no dimension {label}; there is: {', '.join(labels) or 'none'}")
    places = [(one, one.point[one.labels.index(label)]) for one in records if label in one.labels]
    wanted = _numbers(text, 1 + max((place for _, place in places), default=0))
    return [one for one, place in places if place in wanted]


def _numbers(text: str, size: int) -> set[int]:
    found: set[int] = set()
    for part in text.strip(",").split(","):
        piece = _SLICE.fullmatch(part)
        dash = re.fullmatch(r"(\d+)-(\d+)", part)
        if piece is not None:
            ends = [int(end) if end else None for end in piece.groups()]
            found |= set(range(*slice(*ends).indices(size)))
        elif dash is not None:
            found |= set(range(int(dash[1]), int(dash[2]) + 1))
        elif re.fullmatch(r"-?\d+", part):
            found.add(int(part) if int(part) >= 0 else size + int(part))
        else:
            raise DebugError(f"{part} is neither a rank nor a slice: write 3, 0:4, or 0,2,5")
    return found
