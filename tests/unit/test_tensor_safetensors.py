"""Files of safetensors, read in parts, and other files, which are refused."""

import json
from pathlib import Path

import pytest
import torch

from monarch_nb.tensor.checkpoints.checkpoints import read_part, stored_in

pytestmark = pytest.mark.timeout(60)

HALF = torch.arange(12, dtype=torch.bfloat16).view(3, 4)


def write(path: Path, **tensors: torch.Tensor) -> Path:
    """A file as the format has it."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    values = b""
    names = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64"}
    for name, tensor in tensors.items():
        raw = bytes(tensor.contiguous().view(torch.uint8).flatten().tolist()) if tensor.numel() else b""
        offsets = [len(values), len(values) + len(raw)]
        entries[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        values += raw
    header = json.dumps(entries).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + values)
    return path


def test_any_part_of_a_tensor_is_read(tmp_path: Path) -> None:
    stored = stored_in(str(write(tmp_path / "a.safetensors", half=HALF, empty=torch.empty(0, 3))))
    assert torch.equal(read_part((slice(1, 3), slice(0, 2)), stored["half"]), HALF[1:3, :2])
    assert read_part((slice(0, 0), slice(0, 3)), stored["empty"]).shape == (0, 3)


def test_the_files_of_a_folder_are_one(tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors", one=torch.ones(2))
    write(tmp_path / "b.safetensors", two=torch.ones(3))
    assert {name: stored.shape for name, stored in stored_in(str(tmp_path)).items()} == {"one": (2,), "two": (3,)}


@pytest.mark.parametrize("keep", [0, 7, 9, 60, -1])
def test_a_file_that_is_cut_off_is_refused(tmp_path: Path, keep: int) -> None:
    path = write(tmp_path / "a.safetensors", half=HALF)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"a\.safetensors is no file of safetensors"):
        stored_in(str(path))


def test_a_folder_without_such_files_is_said(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no"):
        stored_in(str(tmp_path))
