"""A key of the configuration, and the kinds of values that it can have: conversion from values of programs, from text,
and back. Durations are exact to the nanosecond.
"""

import contextlib
import importlib
import re
from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal, localcontext
from enum import Enum
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeAlias, TypeVar, overload

if TYPE_CHECKING:
    from monarch_nb.settings.store import Settings

T = TypeVar("T", covariant=True)
Kind = Literal["duration", "flag", "count", "ratio", "text", "encoding", "transport", "range", "sharing"]

SECOND = 10**9  # nanoseconds
_UNIT_NAMES = {  # by nanoseconds
    1: ("ns", "nsec", "nanos", "nanosecond", "nanoseconds"),
    10**3: ("us", "µs", "μs", "usec", "micros", "microsecond", "microseconds"),
    10**6: ("ms", "msec", "millis", "millisecond", "milliseconds"),
    SECOND: ("s", "sec", "secs", "second", "seconds"),
    60 * SECOND: ("m", "min", "mins", "minute", "minutes"),
    3600 * SECOND: ("h", "hr", "hrs", "hour", "hours"),
    86_400 * SECOND: ("d", "day", "days"),
    604_800 * SECOND: ("w", "wk", "wks", "week", "weeks"),
    2_630_016 * SECOND: ("M", "month", "months"),  # 30.44 days
    31_557_600 * SECOND: ("y", "yr", "yrs", "year", "years"),  # 365.25 days
}
_UNITS = {name: size for size, names in _UNIT_NAMES.items() for name in names}
_SHOWN = (  # units of durations as text, the largest first
    (31_557_600 * SECOND, "year", "years"),
    (2_630_016 * SECOND, "month", "months"),
    (86_400 * SECOND, "day", "days"),
    (3600 * SECOND, "h", "h"),
    (60 * SECOND, "m", "m"),
    (SECOND, "s", "s"),
    (10**6, "ms", "ms"),
    (10**3, "us", "us"),
    (1, "ns", "ns"),
)
_PART = re.compile(r"\s*([0-9]{1,30})(?:\.([0-9]{1,30}))?\s*([A-Za-zµμ]+)")
_LIKE = '"30s", "500ms" or "1h 30m"'
_LONGEST_TEXT = 200  # characters of a duration
_LONGEST = 2**63 - 1  # nanoseconds, 292 years
_MOST = 2**64 - 1  # of a count
_PORTS = range(65536)
_URL = re.compile(r"(tcp|ipc|inproc|tls|metatls)://\S+")
_FLAGS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


class Encoding(Enum):
    """Torchmonarch's formats of messages. Accepted without effect: messages have one format here."""

    Bincode = 0
    Json = 1
    Multipart = 2


class ChannelTransport(Enum):
    """Transports between processes of different hosts; within a host, a local socket is always used."""

    TcpWithLocalhost = "tcp(localhost)"
    TcpWithHostname = "tcp(hostname)"
    MetaTlsWithHostname = "metatls(hostname)"
    MetaTlsWithIpV6 = "metatls(ipv6)"
    Tls = "tls"
    Quic = "quic"
    MetaQuicWithHostname = "metaquic(hostname)"
    MetaQuicWithIpV6 = "metaquic(ipv6)"
    Local = "local"
    Unix = "unix"


# Of a key: durations in nanoseconds inside, as text outside.
Value: TypeAlias = bool | int | float | str | slice | Encoding | ChannelTransport | None


class Setting(Generic[T]):
    """A key: its kind, its default, and its meaning; "" for one that does nothing here.

    Durations are stored in nanoseconds and read in seconds.
    """

    def __init__(
        self,
        kind: Kind,
        default: Value,
        meaning: str = "",
        *,
        name: str = "",
        optional: bool = False,
        env: tuple[str, ...] = (),
        least: int = 0,
    ) -> None:
        self.kind = kind
        self.default = default
        self.meaning = meaning
        self.name = name
        self.optional = optional  # None may be set: it is the default
        self.env = env  # names of the environment besides those of all keys
        self.least = least  # minimum of a count

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: "Settings", owner: type) -> T: ...
    def __get__(self, instance: "Settings | None", owner: type) -> Any:
        if instance is None:
            return self
        value = instance.value_of(self)
        return value / SECOND if self.kind == "duration" and isinstance(value, int) else value

    def __repr__(self) -> str:
        return f"<setting {self.name}: {self.kind}>"


def seconds(default: float, meaning: str, *, optional: bool = False) -> Setting[float]:
    """Declares a duration."""
    return Setting("duration", round(default * SECOND), meaning, optional=optional)


def flag(default: bool, meaning: str) -> Setting[bool]:
    """Declares a flag."""
    return Setting("flag", default, meaning)


def count(default: int, meaning: str, *, least: int = 0) -> Setting[int]:
    """Declares a whole number."""
    return Setting("count", default, meaning, least=least)


def text(default: str, meaning: str) -> Setting[str]:
    """Declares a text."""
    return Setting("text", default, meaning)


class DurationError(ValueError, TypeError):
    """A value is not a duration. Both a ValueError and a TypeError, as callers may expect either."""


def parse_duration(value: object) -> int:
    """Returns a duration in nanoseconds, from text such as "1h 30m", a number of seconds, or a timedelta.

    Raises DurationError for anything else, for negative durations and for those above 292 years.
    """
    if isinstance(value, str):
        nanoseconds = _parse_text(value)
    elif isinstance(value, timedelta):
        nanoseconds = (value // timedelta(microseconds=1)) * 1000
    elif isinstance(value, int | float) and not isinstance(value, bool):
        nanoseconds = _from_seconds(value)
    else:
        raise DurationError(f'{value!r} is not a duration: write "30s" or "1h 30m", or give a number of seconds')
    if nanoseconds < 0:
        raise DurationError(f"{value!r} is not a duration: it is negative")
    if nanoseconds > _LONGEST:
        raise DurationError(f"{value!r} is too long: at most 292 years")
    return nanoseconds


def _from_seconds(value: float) -> int:
    try:
        if isinstance(value, int):
            return value * SECOND
        return round(Decimal(repr(value)) * SECOND)
    except (ArithmeticError, ValueError):  # infinite, or not a number
        raise DurationError(f"{value!r} is not a duration: it is not finite") from None


def _parse_text(text: str) -> int:
    if len(text) > _LONGEST_TEXT:
        raise DurationError(f"Invalid duration format: a text of {len(text)} characters is not a duration")
    if text.strip() == "0":
        return 0
    total, position = 0, 0
    while position < len(text.rstrip()):
        part = _PART.match(text, position)
        if part is None:
            rest = text[position:].strip()
            hint = " (a unit is missing, such as in 30s or 30ms)" if re.fullmatch(r"[0-9.]+", rest) else ""
            raise DurationError(f"Invalid duration format: {text!r} is not a duration{hint}: write it like {_LIKE}")
        integer, fraction, unit = part.groups()
        size = _UNITS.get(unit)
        if size is None:
            raise DurationError(
                f"Invalid duration format: {text!r}: {unit!r} is not a unit of time; use ns, us, ms, s, m, h, d, w, "
                "month or year"
            )
        with localcontext(prec=80):
            total += int(Decimal(f"{integer}.{fraction or 0}") * size)
        position = part.end()
    if position == 0:
        raise DurationError(f"Invalid duration format: an empty text is not a duration: write it like {_LIKE}")
    return total


def positive_seconds(text: str) -> float:
    """Returns the number of seconds of an option on a command line. Raises ArgumentTypeError unless above 0, finite."""
    with contextlib.suppress(ValueError):
        if 0 < (seconds := float(text)) < float("inf"):
            return seconds
    argparse = importlib.import_module("argparse")  # not at each import of this package
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")


def format_duration(nanoseconds: int) -> str:
    """Returns the shortest usual text: "1h 30m", "1s 500ms", "0s"."""
    parts = []
    for size, singular, plural in _SHOWN:
        count, nanoseconds = divmod(nanoseconds, size)
        if count:
            parts.append(f"{count}{singular if count == 1 else plural}")
    return " ".join(parts) or "0s"


class RangeError(ValueError, TypeError):
    """A value of the right type that is out of range; torchmonarch calls both a TypeError."""


SHORT_TRANSPORTS = {
    "tcp": ChannelTransport.TcpWithHostname,
    "ipc": ChannelTransport.Unix,
    "unix": ChannelTransport.Unix,
    "tls": ChannelTransport.Tls,
    "metatls": ChannelTransport.MetaTlsWithIpV6,
    "metatls-hostname": ChannelTransport.MetaTlsWithHostname,
}


def transport(value: object) -> "ChannelTransport | str":
    """Returns a member of the enum, a short word ("tcp"…), or an address. Raises ValueError, TypeError for non-text."""
    if isinstance(value, ChannelTransport):
        return value
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is neither a ChannelTransport nor text")
    short = SHORT_TRANSPORTS.get(value)
    if short is not None:
        return short
    for member in ChannelTransport:
        if member.value == value:
            return member
    if _URL.fullmatch(value):
        return value
    words = ", ".join(SHORT_TRANSPORTS)
    raise ValueError(f"{value!r} is not a transport: use one of {words}, or an address such as tcp://127.0.0.1:8080")


def _flag(value: object) -> bool:
    if isinstance(value, bool):
        return value
    raise TypeError("a bool is expected")


def _integer(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError("a whole number is expected")
    return value


def _ratio(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError("a number is expected")
    return float(value)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("text is expected")
    return value


def _encoding(value: object) -> Encoding:
    if not isinstance(value, Encoding):
        raise TypeError("one of Encoding is expected")
    return value


def _ports(value: object) -> slice:
    if not isinstance(value, slice):
        raise TypeError("a slice of port numbers is expected")
    ends = [end for end in (value.start, value.stop) if end is not None]
    if not all(isinstance(end, int) for end in ends):
        raise TypeError("a slice of port numbers is expected")
    if value.step is not None or not all(end in _PORTS for end in ends):
        raise RangeError("port numbers are 0 to 65535, one after the other")
    return value


def _sharing(value: object) -> bool | str:
    """Checks how GPUs are shared."""
    if not isinstance(value, bool | str):
        raise TypeError("a bool, 'mps' or 'mps-equal' is expected")
    if isinstance(value, str) and value not in ("mps", "mps-equal"):
        raise ValueError("True, False, 'mps' or 'mps-equal' is expected")
    return value


_CHECKS: dict[str, Callable[[object], Value]] = {
    "duration": parse_duration,
    "flag": _flag,
    "count": _integer,
    "ratio": _ratio,
    "text": _text,
    "encoding": _encoding,
    "transport": transport,
    "range": _ports,
    "sharing": _sharing,
}


def checked(key: Setting[object], value: object) -> Value:
    """Returns the form that is stored. Raises TypeError for a wrong type, ValueError for a value out of range."""
    if value is None and key.optional:
        return key.default
    try:
        result = _CHECKS[key.kind](value)
    except DurationError as error:
        raise DurationError(f"{key.name}: {error}") from None
    except (TypeError, ValueError) as error:
        raise type(error)(f"{key.name}={value!r}: {error}") from None
    if key.kind == "count" and isinstance(result, int):
        if result < key.least:
            raise RangeError(f"{key.name}={value!r}: at least {key.least}")
        if result > _MOST:
            raise RangeError(f"{key.name}={value!r}: at most {_MOST}")
    return result


def public_value(key: Setting[object], value: Value) -> Value:
    """Returns a stored value as programs read it: durations as text."""
    return format_duration(value) if key.kind == "duration" and isinstance(value, int) else value


def from_text(key: Setting[object], text: str) -> Value:
    """Returns the value of an environment variable's text. Raises TypeError or ValueError like `checked`."""
    text = text.strip()
    if key.optional and text.lower() in ("", "none"):
        return key.default
    value: object = text
    if key.kind in ("flag", "sharing"):
        value = _FLAGS.get(text.lower(), text)
    elif key.kind == "count":
        value = int(text) if re.fullmatch(r"[0-9][0-9_]{0,18}", text) and not text.endswith("_") else text
    elif key.kind == "ratio":
        value = float(text) if re.fullmatch(r"[0-9]*\.?[0-9]+([eE][-+]?[0-9]{1,3})?", text) else text
    elif key.kind == "encoding":
        value = {encoding.name.lower(): encoding for encoding in Encoding}.get(text.lower(), text)
    elif key.kind == "range":
        ends = re.fullmatch(r"([0-9]{1,5})(?:\.\.|:|-)([0-9]{1,5})", text)
        value = slice(int(ends[1]), int(ends[2])) if ends else text
    return checked(key, value)


def to_text(key: Setting[object], value: Value) -> str:
    """Returns the text that `from_text` parses."""
    if value is None:
        return "none"
    if key.kind == "duration" and isinstance(value, int):
        return format_duration(value)
    if isinstance(value, slice):
        return f"{value.start or 0}:{value.stop or 0}"
    if isinstance(value, Encoding):
        return value.name
    if isinstance(value, ChannelTransport):
        return str(value.value)
    return str(value)
