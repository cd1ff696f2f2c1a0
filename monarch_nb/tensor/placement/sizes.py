"""Texts of sizes."""

from collections.abc import Sequence

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def size_text(count: float) -> str:
    """Bytes in three digits: 512 B, 4.00 MB, 16.0 GB; 1 kB is 1024 B."""
    value, unit = float(count), 0
    while value >= 1000 and unit < len(_UNITS) - 1:
        value /= 1024
        unit += 1
    if unit == 0:
        return f"{value:.0f} B"
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f} {_UNITS[unit]}"


def shape_text(shape: Sequence[int]) -> str:
    """The sizes of a tensor: 1024×64; "scalar" without any."""
    return "×".join(map(str, shape)) or "scalar"
