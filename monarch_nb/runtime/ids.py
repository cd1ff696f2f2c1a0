"""Ids in torchmonarch's form, for programs that make or read some. The engine itself uses addresses."""

import re
import secrets
from typing import Self

_ALPHABET = "123456789abcdefghijkmnopqrstuvwxyzABCDEFGHJKLMNPQRSTUVWXYZ"  # base 58, lowercase first
_LABEL = re.compile(r"[a-z](?:[a-z0-9_-]*[a-z0-9])?")
_TEXT = re.compile(r"([^<>@\s]*)<([^<>]+)>")
_MOST = 2**64 - 1
_LONGEST = 11  # digits of the largest value


def _encoded(value: int) -> str:
    digits = ""
    while value:
        value, digit = divmod(value, 58)
        digits = _ALPHABET[digit] + digits
    return digits or _ALPHABET[0]


def _decoded(text: str) -> int:
    if len(text) > _LONGEST or any(letter not in _ALPHABET for letter in text):
        raise ValueError(f"invalid uid: {text!r} is not a base58 number")
    value = 0
    for letter in text:
        value = value * 58 + _ALPHABET.index(letter)
    if value > _MOST:
        raise ValueError(f"invalid uid: {text!r} has more than 64 bits")
    return value


def _checked(label: str) -> str:
    if not _LABEL.fullmatch(label):
        raise ValueError(
            f"invalid uid label {label!r}: it starts with a lowercase letter, ends with a letter or digit, and has "
            "lowercase letters, digits, _ and - in between"
        )
    return label


class Uid:
    """A unique id: a singleton, known by its name, or an instance, known by its number, with or without a label."""

    __slots__ = ("_label", "_value")
    _label: str | None
    _value: int | None

    def __init__(self) -> None:
        raise TypeError("use Uid.instance(), Uid.anonymous() or Uid.from_string()")

    @classmethod
    def _make(cls, value: int | None, label: str | None) -> Self:
        self = cls.__new__(cls)
        self._value, self._label = value, label
        return self

    @classmethod
    def anonymous(cls) -> Self:
        """Makes a new instance without a label."""
        return cls._make(secrets.randbits(64), None)

    @classmethod
    def instance(cls, label: str | None = None) -> Self:
        """Makes a new instance. Raises ValueError for a label that cannot be written."""
        return cls._make(secrets.randbits(64), None if label is None else _checked(label))

    @classmethod
    def instance_from_value(cls, value: int, label: str | None = None) -> Self:
        """Makes an instance with a given number. Raises OverflowError unless that has at most 64 bits and no sign."""
        if not 0 <= value <= _MOST:
            raise OverflowError(f"{value} does not fit 64 bits without a sign")
        return cls._make(value, None if label is None else _checked(label))

    @classmethod
    def from_string(cls, uid: str) -> Self:
        """Parses the text of `str`: "name", "<number>" or "label<number>". Raises ValueError."""
        match = _TEXT.fullmatch(uid)
        if match is None:
            return cls._make(None, _checked(uid))
        label, number = match.groups()
        return cls._make(_decoded(number), _checked(label) if label else None)

    @property
    def label(self) -> str | None:
        """The name, or the label of an instance."""
        return self._label

    @property
    def is_instance(self) -> bool:
        """True if a number makes it unique."""
        return self._value is not None

    @property
    def is_singleton(self) -> bool:
        """True if its name makes it unique."""
        return self._value is None

    @property
    def instance_value(self) -> int | None:
        """The number of an instance."""
        return self._value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Uid) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[int | None, str | None]:
        return (self._value, self._label if self._value is None else None)

    def __str__(self) -> str:
        return str(self._label) if self._value is None else f"{self._label or ''}<{_encoded(self._value)}>"

    def __repr__(self) -> str:
        return f"Uid({str(self)!r})"


class ProcId:
    """The id of a process."""

    __slots__ = ("_uid",)

    def __init__(self, uid: Uid) -> None:
        if not isinstance(uid, Uid):
            raise TypeError(f"ProcId wants a Uid, not {uid!r}")
        self._uid = uid

    @classmethod
    def from_string(cls, proc_id: str) -> Self:
        """Parses the text of `str`. Raises ValueError."""
        return cls(Uid.from_string(proc_id))

    @property
    def uid(self) -> Uid:
        """The part that makes it unique."""
        return self._uid

    @property
    def label(self) -> str | None:
        """The name."""
        return self._uid.label

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ProcId) and self._uid == other._uid

    def __hash__(self) -> int:
        return hash(self._uid)

    def __str__(self) -> str:
        return str(self._uid)

    def __repr__(self) -> str:
        return f"ProcId({str(self)!r})"
