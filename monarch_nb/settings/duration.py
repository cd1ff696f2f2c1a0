"""Durations as text: "30s", "1h 30m", "1.5s". Exact to the nanosecond."""

import re
from datetime import timedelta
from decimal import Decimal, localcontext

_SECOND = 10**9
_NAMES = {
    1: ("ns", "nsec", "nanos", "nanosecond", "nanoseconds"),
    10**3: ("us", "µs", "μs", "usec", "micros", "microsecond", "microseconds"),
    10**6: ("ms", "msec", "millis", "millisecond", "milliseconds"),
    _SECOND: ("s", "sec", "secs", "second", "seconds"),
    60 * _SECOND: ("m", "min", "mins", "minute", "minutes"),
    3600 * _SECOND: ("h", "hr", "hrs", "hour", "hours"),
    86_400 * _SECOND: ("d", "day", "days"),
    604_800 * _SECOND: ("w", "wk", "wks", "week", "weeks"),
    2_630_016 * _SECOND: ("M", "month", "months"),  # 30.44 days
    31_557_600 * _SECOND: ("y", "yr", "yrs", "year", "years"),  # 365.25 days
}
_UNITS = {name: size for size, names in _NAMES.items() for name in names}
_SHOWN = (
    (31_557_600 * _SECOND, "year", "years"),
    (2_630_016 * _SECOND, "month", "months"),
    (86_400 * _SECOND, "day", "days"),
    (3600 * _SECOND, "h", "h"),
    (60 * _SECOND, "m", "m"),
    (_SECOND, "s", "s"),
    (10**6, "ms", "ms"),
    (10**3, "us", "us"),
    (1, "ns", "ns"),
)
_PART = re.compile(r"\s*([0-9]{1,30})(?:\.([0-9]{1,30}))?\s*([A-Za-zµμ]+)")
_LIKE = '"30s", "500ms" or "1h 30m"'
_LONGEST_TEXT = 200  # characters
_MOST = 2**63 - 1  # nanoseconds, 292 years


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
    if nanoseconds > _MOST:
        raise DurationError(f"{value!r} is too long: at most 292 years")
    return nanoseconds


def _from_seconds(value: float) -> int:
    try:
        if isinstance(value, int):
            return value * _SECOND
        return round(Decimal(repr(value)) * _SECOND)
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


def format_duration(nanoseconds: int) -> str:
    """Returns the shortest usual text: "1h 30m", "1s 500ms", "0s"."""
    parts = []
    for size, singular, plural in _SHOWN:
        count, nanoseconds = divmod(nanoseconds, size)
        if count:
            parts.append(f"{count}{singular if count == 1 else plural}")
    return " ".join(parts) or "0s"
