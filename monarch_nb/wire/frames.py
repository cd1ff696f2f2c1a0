"""Which frames of an error people are shown: theirs, and none of the engine's where it works as it should."""

import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ENGINE = f"{Path(__file__).parent.parent}/"
_LIBRARIES = tuple({f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")})


class At(NamedTuple):
    """A frame: its file, and the source line that it stands at."""

    file: str
    line: str


def is_users(file: str) -> bool:
    """Whether code is the user's: no part of Python, of an installed package, or of the engine."""
    return not file.startswith((*_LIBRARIES, ENGINE, "<frozen "))


def is_mistake(frames: Sequence[At], own: Sequence[str] = (ENGINE,)) -> bool:
    """Whether the engine raised on purpose, about what its caller did, or only called what raised: code of the user's.

    Frames are from the outside in, those of `own` folders are the engine's. Anything else that fails in the engine may
    be an error of its own, for which all frames are wanted.
    """
    folders = tuple(own)
    if not any(frame.file.startswith(folders) for frame in frames):
        return False
    last = frames[-1]
    if last.file.startswith(folders):
        return last.line.split(" ", 1)[0] == "raise"
    return is_users(last.file)


def without_engine(frames: Sequence[At], own: Sequence[str] = (ENGINE,), through: Sequence[str] = ()) -> list[int]:
    """The frames outside of the engine: up to its first one all, after that those of the user's code. Frames of
    `through` are left out everywhere."""
    folders = tuple(own)
    entered, left = False, []
    for place, frame in enumerate(frames):
        inside = frame.file.startswith(folders)
        entered = entered or inside
        if not inside and not frame.file.startswith(tuple(through)) and (not entered or is_users(frame.file)):
            left.append(place)
    return left
