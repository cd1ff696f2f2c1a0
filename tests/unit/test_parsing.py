"""Syntax trees while garbage is collected."""

import ast
from pathlib import Path

import pytest

from monarch_nb._parsing import parsed


class Garbage:
    """Garbage whose collection parses something, as a report with a traceback does."""

    def __init__(self) -> None:
        self.cycle = self

    def __del__(self) -> None:
        ast.parse("x + 1")


def test_a_source_is_parsed_while_garbage_parses_another() -> None:
    source = Path(ast.__file__).read_text(encoding="utf-8")
    for _ in range(5):
        Garbage()
        assert isinstance(parsed(source).body[0], ast.Expr)


def test_errors_of_a_source_are_raised_as_they_are() -> None:
    with pytest.raises(SyntaxError) as caught:
        parsed("x =", "cell")
    assert caught.value.filename == "cell"
