"""Tensors and arrays in one line: shape, type and range. Neither torch nor numpy is imported for it."""

import sys
from typing import Any

FEW = 8  # so many elements are shown themselves
HASHED = 16 * 2**20  # bytes; larger arrays are equal only to themselves


def _kind(value: Any) -> str:
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(value, torch.Tensor):
        return "tensor"
    return "array" if numpy is not None and isinstance(value, numpy.ndarray) else ""


def array_text(value: Any) -> str | None:
    """What a tensor or array of more than a few elements is like; None for anything else."""
    kind = _kind(value)
    if not kind:
        return None
    count = value.numel() if kind == "tensor" else value.size
    if count <= FEW:
        return None
    device = getattr(value, "device", None) if kind == "tensor" else None
    where = f" {device}" if device is not None and device.type != "cpu" else ""
    heading = f"{kind} {tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}{where}"
    try:
        facts = _range(value, kind)
    except Exception:  # no numbers in it, or none that can be had here
        facts = ""
    return f"{heading}: {facts}" if facts else heading


def _range(value: Any, kind: str) -> str:
    if kind == "tensor":
        plain = value.detach().double()
        odd = int((~plain.isfinite()).sum())
        plain = plain[plain.isfinite()] if odd else plain
        size = plain.numel()
    else:
        plain = value.astype(float)
        finite = (plain - plain) == 0
        odd = int((~finite).sum())
        plain = plain[finite] if odd else plain
        size = plain.size
    parts = []
    if size:
        parts = [f"min {float(plain.min()):.4g}", f"max {float(plain.max()):.4g}", f"mean {float(plain.mean()):.4g}"]
    if odd:
        parts.append(f"{odd} not finite")
    return ", ".join(parts)


def content(value: Any) -> object:
    """Equal for arrays with equal elements; None for what is no array."""
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
