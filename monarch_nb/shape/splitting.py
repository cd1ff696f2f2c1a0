"""Works out which sizes the parts of split dimensions get."""

import math
import operator
from collections.abc import Mapping, Sequence
from typing import SupportsIndex, TypeAlias

from .errors import known_dims

# The dimensions that one dimension becomes, outermost first: name and size.
Parts: TypeAlias = list[tuple[str, int]]


def split_sizes(extent: Mapping[str, int], splits: Mapping[str, Sequence[str] | SupportsIndex]) -> list[Parts]:
    """The parts each dimension of `extent` becomes, from the keywords of `split`. ValueError if they do not fit."""
    names, sizes = _sorted_out(extent, splits)
    unused = set(sizes)
    taken: set[str] = set()
    result = []
    for label, total in extent.items():
        parts = names.get(label, (label,))
        for part in parts:
            if part in taken:
                raise ValueError(f"Duplicate dimension name {part!r}: a split must give every dimension its own name")
            taken.add(part)
        unused -= set(parts)
        result.append(_parts(label, total, parts, sizes))
    if unused:
        raise ValueError(
            f"unused size constraints: {', '.join(map(repr, sorted(unused)))}; no split makes dimensions of these "
            f"names, write for example split(old=({sorted(unused)[0]!r}, 'rest'), ...), where old is a dimension: "
            f"{known_dims(tuple(extent))}"
        )
    return result


def _sorted_out(
    extent: Mapping[str, int], splits: Mapping[str, Sequence[str] | SupportsIndex]
) -> tuple[dict[str, tuple[str, ...]], dict[str, int]]:
    """Takes the keywords apart: an existing dimension is what to split, any other name is the size of a new one."""
    names: dict[str, tuple[str, ...]] = {}
    sizes: dict[str, int] = {}
    for key, value in splits.items():
        if key in extent:
            if isinstance(value, str) or not isinstance(value, Sequence):
                raise ValueError(
                    f"expected a sequence of dimension names to split {key!r} into, got {value!r}; "
                    f"write for example split({key}=('outer', 'inner'), inner=2)"
                )
            names[key] = tuple(value)
        elif isinstance(value, SupportsIndex):
            sizes[key] = operator.index(value)
            if sizes[key] < 1:
                raise ValueError(f"dimension {key!r} cannot have size {sizes[key]}; sizes in a split are 1 or more")
        else:
            raise ValueError(
                f"{key!r} is not an existing dimension, so its value must be the integer size of a new one, "
                f"got {value!r}; {known_dims(tuple(extent))}"
            )
    return names, sizes


def _parts(label: str, total: int, parts: tuple[str, ...], sizes: Mapping[str, int]) -> Parts:
    unknown = [part for part in parts if part not in sizes]
    if len(unknown) > 1:
        raise ValueError(
            f"Cannot infer size of {' and '.join(map(repr, unknown))}, into which {label!r} of size {total} is split: "
            f"only one may be left out; give the others as arguments, for example {unknown[-1]}=2"
        )
    known = math.prod(sizes[part] for part in parts if part in sizes)
    inferred, left = divmod(total, known)
    if left or (not unknown and inferred != 1):
        wanted = ", ".join(f"{part}={sizes.get(part, '?')}" for part in parts)
        raise ValueError(
            f"Dimension {label!r} of size {total} is not evenly divided by ({wanted}); "
            f"their sizes must multiply to {total}"
        )
    return [(part, sizes.get(part, inferred)) for part in parts]
