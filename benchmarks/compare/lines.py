"""How many lines of a program its author has to write: those that measure, imports of them, and words do not count."""

import ast

MEASURING = ("fact(", "facts import", "now()", "seconds = []", "seconds.append")


def lines_of(source: str) -> int:
    """Lines with code, without docstrings and comments. A line that only measures has one of MEASURING."""
    words: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            words |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return sum(
        1
        for number, line in enumerate(source.splitlines(), 1)
        if line.strip()
        and not line.strip().startswith("#")
        and number not in words
        and not any(part in line for part in MEASURING)
    )
