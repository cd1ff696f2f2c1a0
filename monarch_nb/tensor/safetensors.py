"""Reads tensors, or parts of them, from safetensors files.

The format is eight bytes with the length of the header, the header in JSON, and the values, row-major.
"""

import json
import math
import mmap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from monarch_nb.tensor.handle import MeshTensor
from monarch_nb.tensor.mesh import Mesh
from monarch_nb.tensor.sharding import ShardingSpec

_TYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
_LONGEST = 100 << 20  # bytes of a header, the limit of the format


class Stored(NamedTuple):
    """A tensor in a file; `begin` is the offset of its values in bytes."""

    file: str
    begin: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def stored_in(path: str) -> dict[str, Stored]:
    """Returns the tensors in a file, or in all such files of a folder, by name. Reads the headers only.

    Raises FileNotFoundError, and ValueError for a file of another format.
    """
    location = Path(path)
    files = sorted(location.glob("*.safetensors")) if location.is_dir() else [location]
    if not files:
        raise FileNotFoundError(f"there is no *.safetensors in {path}")
    tensors: dict[str, Stored] = {}
    for file in files:
        tensors.update(_header(file))
    return tensors


def _header(file: Path) -> dict[str, Stored]:
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if not 2 <= length <= min(_LONGEST, size - 8):
            raise ValueError(f"{file} is no file of safetensors, or its end is missing")
        try:
            entries = json.loads(opened.read(length))
            return {
                name: _entry(file, entry, 8 + length, size) for name, entry in entries.items() if name != "__metadata__"
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{file} is no file of safetensors: {error}") from None


def _entry(file: Path, entry: dict[str, Any], values: int, size: int) -> Stored:
    begin, end = (int(offset) for offset in entry["data_offsets"])
    shape = tuple(int(length) for length in entry["shape"])
    dtype = _TYPES[str(entry["dtype"])]
    if not 0 <= begin <= end <= size - values or end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError("a tensor in it has another size than its header says")
    return Stored(str(file), values + begin, dtype, shape)


def read_part(part: Sequence[slice], stored: Stored) -> torch.Tensor:
    """Reads a part of a tensor in a file, and only the pages of that part."""
    count = math.prod(stored.shape)
    if not count:
        return torch.empty(stored.shape, dtype=stored.dtype)[tuple(part)]
    with open(stored.file, "rb") as opened:
        mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
    tensor = torch.frombuffer(mapped, dtype=stored.dtype, count=count, offset=stored.begin)
    return tensor.view(stored.shape)[tuple(part)].clone(memory_format=torch.contiguous_format)


def load_safetensors(
    path: str,
    mesh: Mesh,
    sharding_spec: Mapping[str, ShardingSpec] | Callable[[str, tuple[int, ...]], ShardingSpec] | None = None,
) -> dict[str, MeshTensor]:
    """Returns the tensors in a file of safetensors, or in all such files of a folder, sharded over a mesh.

    `sharding_spec` is as for `monarch.distribute`: a mapping of names to specs, or a function of name and
    shape; tensors without one are replicated. The path must lead to the same files on each host. Blocks
    until the headers are read; the values are read while the program continues.
    Raises TensorError if a file cannot be read, ValueError for a name that is in none.
    """
    first, *peers = mesh.execute(stored_in, str(path)).values()
    if any(peer.keys() != first.keys() for peer in peers):
        raise ValueError(f"{path}: the processes of the mesh see different files there")
    if isinstance(sharding_spec, Mapping):
        unknown = sorted(set(sharding_spec) - set(first))
        if unknown:
            raise ValueError(f"{path} has no tensor {', '.join(map(repr, unknown[:5]))}")
    loaded = {}
    for name, stored in first.items():
        spec = sharding_spec(name, stored.shape) if callable(sharding_spec) else (sharding_spec or {}).get(name)
        loaded[name] = mesh.from_parts(read_part, stored, size=stored.shape, dtype=stored.dtype, sharding_spec=spec)
    return loaded
