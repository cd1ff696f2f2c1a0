"""Durations as text."""

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_nb.settings import DurationError, format_duration, parse_duration
from tests.effort import tries

pytestmark = pytest.mark.timeout(tries(60))
SECOND = 10**9


@pytest.mark.parametrize(
    ("text", "nanoseconds"),
    [
        ("30s", 30 * SECOND),
        ("1h 30m", 5400 * SECOND),
        ("1h30m", 5400 * SECOND),
        ("90 minutes", 5400 * SECOND),
        ("1.5s", 1_500_000_000),
        ("1500ms", 1_500_000_000),
        ("5µs", 5000),
        ("1 day", 86_400 * SECOND),
        ("1M", 2_630_016 * SECOND),
        ("0", 0),
        ("0s", 0),
        (" 1s ", SECOND),
        ("1h1h", 7200 * SECOND),
        (30, 30 * SECOND),
        (0.25, SECOND // 4),
        (timedelta(minutes=2), 120 * SECOND),
    ],
)
def test_a_duration_is_text_or_seconds_or_a_timedelta(text: object, nanoseconds: int) -> None:
    assert parse_duration(text) == nanoseconds


@pytest.mark.parametrize(
    "text",
    ["", " ", "30", "1.5", "s", "1H", "1x", "-1s", "1s,2s", "1..5s", "1000000000000000000y", "1" * 500 + "s", "٣s"],
)
def test_other_texts_are_refused_with_a_hint(text: str) -> None:
    with pytest.raises(DurationError, match=r"duration|unit|long"):
        parse_duration(text)


@pytest.mark.parametrize(
    "value", [None, True, [], b"1s", float("nan"), float("inf"), -1, timedelta(seconds=-1), 10**40]
)
def test_other_values_are_refused(value: object) -> None:
    with pytest.raises(TypeError):
        parse_duration(value)
    with pytest.raises(ValueError):
        parse_duration(value)


@pytest.mark.parametrize(
    ("nanoseconds", "text"),
    [
        (0, "0s"),
        (5400 * SECOND, "1h 30m"),
        (1_500_000_000, "1s 500ms"),
        (86_400 * SECOND, "1day"),
        (2 * 86_400 * SECOND, "2days"),
        (60 * SECOND, "1m"),
        (31_557_600 * SECOND, "1year"),
    ],
)
def test_a_duration_is_shown_in_the_usual_units(nanoseconds: int, text: str) -> None:
    assert format_duration(nanoseconds) == text


@given(st.integers(0, 2**63 - 1))
def test_a_shown_duration_reads_back_exactly(nanoseconds: int) -> None:
    assert parse_duration(format_duration(nanoseconds)) == nanoseconds


@pytest.mark.fuzz
@given(st.one_of(st.text(max_size=300), st.from_regex(r"[0-9.]{0,40} ?[a-zµ]{0,5}( [0-9]{1,3}[a-z]{1,3}){0,40}")))
def test_any_text_is_a_duration_or_refused(text: str) -> None:
    try:
        nanoseconds = parse_duration(text)
    except DurationError:
        return
    assert 0 <= nanoseconds < 2**63
