"""Kinds of values that a key can have: conversion from values of programs, from text, and back."""

import re
from collections.abc import Callable

from monarch_nb.settings.duration import DurationError, format_duration, parse_duration
from monarch_nb.settings.setting import ChannelTransport, Encoding, Setting, Value

_MOST = 2**64 - 1  # of a count
_PORTS = range(65536)
_URL = re.compile(r"(tcp|ipc|inproc|tls|metatls)://\S+")


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


_WORDS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def from_text(key: Setting[object], text: str) -> Value:
    """Returns the value of an environment variable's text. Raises TypeError or ValueError like `checked`."""
    text = text.strip()
    if key.optional and text.lower() in ("", "none"):
        return key.default
    value: object = text
    if key.kind in ("flag", "sharing"):
        value = _WORDS.get(text.lower(), text)
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
