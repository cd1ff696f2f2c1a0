"""Text for the values of a mesh: few lines for any number of ranks, equal values once."""

import re
import sys
from collections.abc import Callable
from typing import Any

from monarch_nb.wire import error_line, repr_of

LINES = 11  # at most, without the heading
WIDTH = 120  # characters of one value
PLACES = 40  # characters of the places that have that value
COSTLY = 256  # values other than plain scalars whose repr is computed, at most
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]{6,}")
SCALARS = frozenset({int, bool, str, bytes, type(None)})  # cheap to compare, and equal ones read the same
FEW = 8  # the most elements that are shown themselves
HASHED = 16 * 2**20  # bytes; larger arrays are equal only to themselves


def describe(count: int, get: Callable[[int], object], locate: Callable[[list[int]], str], *, full: bool = True) -> str:
    """Returns the text after a value mesh's heading: further lines, or the rest of its line if no values are shown.

    `locate` names places, `full` says that there are no others in the mesh. Never raises errors of a value or of its
    decoding.
    """
    if not count:
        return "\n  (no values)"
    if nothing_in(count, get):
        return f" None on {_all_ranks(count) if full else locate(list(range(count)))}"
    groups, unseen = grouped(count, get)
    shown = groups if len(groups) + bool(unseen) <= LINES else groups[: LINES - 1]
    lines = [f"  {_prefix(ranks, count, locate, full)}{text}" for ranks, text in shown]
    hidden = sum(len(ranks) for ranks, _ in groups[len(shown) :]) + unseen
    if hidden:
        lines.append(f"  … and {hidden} more rank{'s' if hidden > 1 else ''}; see .items() or .get(rank)")
    return "".join(f"\n{line}" for line in lines)


def _all_ranks(count: int) -> str:
    return "its rank" if count == 1 else f"all {count} ranks"


def nothing_in(count: int, get: Callable[[int], object]) -> bool:
    """Returns whether all these values are None, as of calls that return nothing. Never raises errors of decoding."""
    try:
        return all(get(rank) is None for rank in range(count))
    except Exception:  # a value that cannot be decoded is not None
        return False


def grouped(count: int, get: Callable[[int], object]) -> tuple[list[tuple[list[int], str]], int]:
    """Returns ranks with equal values and their text, in order of first rank; and how many ranks were left out.

    Arrays of more than a few elements are summarized. Never raises errors of a value or of its decoding.
    """
    groups: dict[object, tuple[list[int], str]] = {}
    # Texts and keys by identity; holds the value so that its identity stays its own.
    cache: dict[int, tuple[object, str, object]] = {}
    for rank in range(count):
        try:
            value = get(rank)
        except (Exception, SystemExit) as error:  # a class that is missing here must not hide the other values
            value = _Unreadable(f"<cannot be decoded: {error_line(error)}>")
        key: object
        if type(value) in SCALARS:
            key = type(value), value
        elif issubclass(type(value), (float, _Unreadable)):
            key = type(value), repr_of(value)  # nan and -0.0 differ from how they compare
        elif id(value) in cache or len(cache) < COSTLY:
            entry = cache.get(id(value))
            if entry is None:
                text = _repr(value)
                entry = cache[id(value)] = value, text, (text, _content(value))
            key = entry[2]
        else:  # thousands of tensors take seconds to print
            return list(groups.values()), count - rank
        if key not in groups:
            groups[key] = [], _line(cache[id(value)][1] if id(value) in cache else _repr(value))
        groups[key][0].append(rank)
    return list(groups.values()), 0


class _Unreadable:
    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _repr(value: object) -> str:
    try:
        summary = _array_text(value)
    except Exception:  # an array without numbers
        summary = None
    if summary is not None:
        return summary
    # Only the start of a long text will be shown, and its repr can take seconds.
    if isinstance(value, str | bytes) and type(value) in (str, bytes):
        return repr(value[: 2 * WIDTH])
    return _ADDRESS.sub("", repr_of(value))  # the address of a copy means nothing


def _line(text: str) -> str:
    joined = " ".join(text.split()) if "\n" in text else text
    return joined if len(joined) <= WIDTH else joined[: WIDTH - 1] + "…"


def _prefix(ranks: list[int], count: int, locate: Callable[[list[int]], str], full: bool) -> str:
    if full and len(ranks) == count > 1:
        return f"all {count} ranks: "
    location = locate(ranks)
    if len(location) > PLACES:
        location = f"{location[:PLACES].rpartition(',')[0]},… ({len(ranks)} ranks)"
    return f"{location}: " if location else ""


def _kind(value: object) -> str:
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(value, torch.Tensor):
        return "tensor"
    return "array" if numpy is not None and isinstance(value, numpy.ndarray) else ""


def _array_text(value: Any) -> str | None:
    """Returns a summary of a tensor or array of more than a few elements; None for anything else."""
    kind = _kind(value)
    if not kind:
        return None
    count = value.numel() if kind == "tensor" else value.size
    if count <= FEW:
        return None
    device = getattr(value, "device", None) if kind == "tensor" else None
    suffix = f" {device}" if device is not None and device.type != "cpu" else ""
    heading = f"{kind} {tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}{suffix}"
    try:
        facts = _range(value, kind)
    except Exception:  # no numbers in it, or none that can be computed here
        facts = ""
    return f"{heading}: {facts}" if facts else heading


def _range(value: Any, kind: str) -> str:
    if kind == "tensor":
        data = value.detach().double()
        nonfinite = int((~data.isfinite()).sum())
        data = data[data.isfinite()] if nonfinite else data
        size = data.numel()
    else:
        data = value.astype(float)
        finite = (data - data) == 0
        nonfinite = int((~finite).sum())
        data = data[finite] if nonfinite else data
        size = data.size
    parts = []
    if size:
        parts = [f"min {float(data.min()):.4g}", f"max {float(data.max()):.4g}", f"mean {float(data.mean()):.4g}"]
    if nonfinite:
        parts.append(f"{nonfinite} not finite")
    return ", ".join(parts)


def _content(value: Any) -> object:
    """Returns a key that is equal for arrays with equal elements; None for other values."""
    kind = _kind(value)
    if not kind:
        return None
    try:
        plain = (
            value.detach().cpu().contiguous().view(sys.modules["torch"].uint8).numpy() if kind == "tensor" else value
        )
        return hash(plain.tobytes()) if plain.nbytes <= HASHED else id(value)
    except Exception:
        return id(value)
