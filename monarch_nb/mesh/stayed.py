"""Values of cells that stay on their ranks: what cannot be sent, and large objects that are shown as a line."""

from typing import Any

from monarch_nb.runtime import runtime
from monarch_nb.runtime.output.forms import may_be_rich
from monarch_nb.wire import Encoded, check_size, encode, error_line, repr_of, type_name

LARGE = 1 << 20  # bytes of an object with no more than a repr to show
LONGEST = 10_000  # characters of a repr
_CONTENTS = ("torch", "numpy", "pandas", "polars", "pyarrow")  # whose values are data, which a cell may want here


class StayedOnRank:
    """Stands for the value of a cell that stayed on its rank: shows its repr; `reason` is why it is not here."""

    text = kind = reason = ""

    def __init__(self, text: str, kind: str, reason: str) -> None:
        self.text, self.kind, self.reason = text, kind, reason

    def __repr__(self) -> str:
        return self.text

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"{name!r}: this {self.kind} stayed on its rank, since {self.reason}. Use it in another %%on cell; what "
            "an endpoint returns is brought here whole"
        )


def sendable(value: Any) -> Any:
    """The value of a cell as it is to be sent: itself, encoded already, or what stands for it."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    try:
        frames = encode(value, runtime())
        check_size(frames)
    except Exception as error:
        return _stand_in(value, f"it cannot be sent ({next(iter(error_line(error).splitlines()), '')})")
    size = sum(len(frame) if isinstance(frame, bytes | bytearray) else frame.nbytes for frame in frames)
    if size > LARGE and _is_object(value):
        return _stand_in(value, f"it has {size / 1e6:.1f} MB")
    return Encoded(frames)


def _is_object(value: Any) -> bool:
    """Whether it is no data and no container of data, and has no rich display: it would be shown by its repr."""
    if isinstance(value, (bytes, bytearray, memoryview, list, tuple, dict, set, frozenset)) or may_be_rich(value):
        return False
    library = type(value).__module__.partition(".")[0] in _CONTENTS
    return not (library and hasattr(value, "shape"))


def _stand_in(value: Any, reason: str) -> StayedOnRank:
    text = repr_of(value)
    text = text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
    return StayedOnRank(text, type_name(value), reason)
