"""Values as they are sent: short texts, and summaries of tensors and arrays."""

import math
import reprlib
import sys
import time
from typing import Any

from monarch_nb.debug.records import Tensor, Value
from monarch_nb.wire import ThreadCutOff, full_name, number_of, repr_of, text_of, type_name

LONGEST = 2000  # characters of one value
INSIDE = 10  # texts in containers are cut at this fraction of the length
MOST = 1 << 20  # elements of a tensor that are inspected in lists of variables
_FEW = 12  # elements of a tensor that are shown themselves
_PATIENCE_S = 1.0  # for the work of a device; then its tensors are shown without numbers


class _Repr(reprlib.Repr):
    """A `Repr` that cuts containers before it formats them, so that huge ones cost nothing."""

    def __init__(self, much: bool) -> None:
        super().__init__()
        self.maxlevel = 8 if much else 4
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdeque = 200 if much else 20
        self.maxarray = self.maxdict = 200 if much else 20
        self.maxstring = self.maxlong = self.maxother = LONGEST * (8 if much else 1)

    def repr_instance(self, x: Any, level: int) -> str:
        """Returns the repr of values of other types; an error in it is described."""
        summary = tensor_of(x)
        if summary is not None:
            return describe(summary)
        text = repr_of(x)
        if len(text) > self.maxother:
            text = f"{text[: self.maxother]}… ({len(text)} characters)"
        return text

    def repr_str(self, x: str, level: int) -> str:
        """Long texts are cut at their end."""
        most = self._longest(level)
        return repr(x) if len(x) <= most else f"{x[:most]!r}… ({len(x)} characters)"

    def repr_bytes(self, x: bytes, level: int) -> str:
        """As texts are."""
        most = self._longest(level)
        return repr(x) if len(x) <= most else f"{x[:most]!r}… ({len(x)} bytes)"

    def _longest(self, level: int) -> int:
        return self.maxstring if level == self.maxlevel else self.maxstring // INSIDE


_short, _long = _Repr(much=False), _Repr(much=True)


def shorten(value: object, *, much: bool = False) -> str:
    """Returns a value as text of limited length. Raises no errors of the value's own code."""
    kind = _long if much else _short
    try:
        text = text_of(kind.repr(value))
    except ThreadCutOff:
        raise
    except BaseException:  # a container that cannot be iterated over
        text = repr_of(value)
    return text if len(text) <= 2 * kind.maxother else f"{text[: kind.maxother]}… ({len(text)} characters)"


def value_of(value: Any, *, much: bool = False) -> Value:
    """Returns a value as it is sent. May take as long as the value's own `repr`."""
    name = type_name(value)
    tensor = tensor_of(value, most=None if much else MOST)
    number: float | None = None
    shown = tensor is not None and not tensor.pending
    if issubclass(type(value), (int, float)) or (tensor is not None and shown and math.prod(tensor.shape) == 1):
        number = _item(value)
    text = describe(tensor) if tensor is not None else shorten(value, much=much)
    if tensor is not None and shown and 0 < math.prod(tensor.shape) <= _FEW:
        text = f"{_elements(value)}  {text}" if math.prod(tensor.shape) > 1 else f"{_elements(value)}"
    try:
        length = len(value) if issubclass(type(value), (str, bytes, list, tuple, dict, set)) else None
    except ThreadCutOff:
        raise
    except BaseException:
        length = None
    return Value(text, name, number, tensor, length)


def tensor_of(value: Any, most: int | None = MOST) -> Tensor | None:
    """Returns a summary of a torch tensor or a numpy array, of at most so many elements; None for everything else."""
    module = full_name(value).partition(".")[0]
    if module not in ("torch", "numpy") or not hasattr(value, "shape") or not hasattr(value, "dtype"):
        return None
    try:
        return _torch(value, most) if module == "torch" else _numpy(value, most)
    except Exception:  # a dtype without numbers, or a failed device
        try:
            return Tensor(tuple(int(n) for n in value.shape), str(value.dtype).removeprefix("torch."))
        except Exception:
            return None


def _some_of(array: Any, most: int | None) -> tuple[Any, int]:
    """Returns a view of at most so many evenly spread elements, and the step between them."""
    step = 1
    while most is not None and math.prod(array.shape) > most:
        longest = max(range(len(array.shape)), key=lambda dim: array.shape[dim])
        array = array[tuple(slice(None, None, 2 if dim == longest else 1) for dim in range(len(array.shape)))]
        step *= 2
    return array, step


class _Devices:
    """Waits for the work of the calling thread on devices, for a limited time.

    Reading a tensor waits for all earlier work. If that includes a collective that another rank has not joined, perhaps
    since it is stopped in the debugger too, the wait would not end.
    """

    def __init__(self) -> None:
        self._busy_at = -math.inf

    def settled(self, device: Any) -> bool:
        """Waits a second at most, and not at all after a recent timeout. Raises errors of the device."""
        cuda: Any = sys.modules["torch.cuda"]
        done = cuda.Event()
        done.record(cuda.current_stream(device))
        end = time.monotonic() + (_PATIENCE_S if time.monotonic() - self._busy_at > _PATIENCE_S else 0.0)
        while not done.query():
            if time.monotonic() >= end:
                self._busy_at = time.monotonic()
                return False
            time.sleep(0.001)
        return True


_DEVICES = _Devices()


def _torch(value: Any, most: int | None) -> Tensor:
    import torch

    plain = value.detach()
    shape, dtype = tuple(plain.shape), str(plain.dtype).removeprefix("torch.")
    device = str(plain.device) if plain.device.type != "cpu" else ""
    if plain.numel() == 0 or plain.is_complex() or plain.device.type == "meta":
        return Tensor(shape, dtype, device)
    if plain.device.type == "cuda" and not _DEVICES.settled(plain.device):
        return Tensor(shape, dtype, device, pending=True)
    plain, step = _some_of(plain, most)
    plain = plain.contiguous() if step > 1 else plain
    nan = inf = 0
    low, high = plain.aminmax() if plain.dtype != torch.bool else (plain.min(), plain.max())
    if plain.is_floating_point() and not (math.isfinite(low) and math.isfinite(high)):  # NaN is passed on, too
        finite = torch.isfinite(plain)
        nan = int(torch.isnan(plain).sum())
        inf = plain.numel() - int(finite.sum()) - nan
        plain = plain[finite]
        if plain.numel() == 0:
            return Tensor(shape, dtype, device, nan=nan, inf=inf, step=step)
        low, high = plain.aminmax()
    mean = float(plain.mean(dtype=torch.float64))
    return Tensor(shape, dtype, device, float(low), float(high), mean, nan, inf, step)


def _numpy(value: Any, most: int | None) -> Tensor | None:
    import numpy as np

    if not isinstance(value, (np.ndarray, np.generic)):
        return None
    shape, dtype = tuple(value.shape), str(value.dtype)
    if value.size == 0 or value.dtype.kind not in "biuf":
        return Tensor(shape, dtype)
    plain, step = _some_of(np.asarray(value), most)
    nan = inf = 0
    if plain.dtype.kind == "f" and not (np.isfinite(plain.min()) and np.isfinite(plain.max())):
        finite = np.isfinite(plain)
        nan = int(np.isnan(plain).sum())
        inf = int(plain.size - finite.sum()) - nan
        plain = plain[finite]
        if plain.size == 0:
            return Tensor(shape, dtype, nan=nan, inf=inf, step=step)
    mean = float(plain.mean(dtype=float))
    return Tensor(shape, dtype, "", float(plain.min()), float(plain.max()), mean, nan, inf, step)


def _item(value: Any) -> float | None:
    try:
        return number_of(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
    except ThreadCutOff:
        raise
    except BaseException:
        return None


def _elements(value: Any) -> str:
    plain = value.detach().tolist() if hasattr(value, "detach") else value.tolist()
    return shorten(_rounded(plain))


def _rounded(plain: Any) -> Any:
    if isinstance(plain, list):
        return [_rounded(number) for number in plain]
    return float(f"{plain:.6g}") if isinstance(plain, float) and math.isfinite(plain) else plain


def describe(tensor: Tensor) -> str:
    """Returns a summary in one line."""
    sizes = "×".join(map(str, tensor.shape)) or "scalar"
    words = [f"{tensor.dtype}[{sizes}]" + (f" on {tensor.device}" if tensor.device else "")]
    if tensor.pending:
        words.append("(not computed yet: its device is busy, or waits in a collective)")
    if tensor.least is not None and tensor.most is not None and tensor.mean is not None:
        words.append(f"min {tensor.least:.4g}  max {tensor.most:.4g}  mean {tensor.mean:.4g}")
    if tensor.nan:
        words.append(f"{tensor.nan} NaN")
    if tensor.inf:
        words.append(f"{tensor.inf} Inf")
    if tensor.step > 1:
        words.append(f"(of every {tensor.step}th element)")
    return "  ".join(words)
