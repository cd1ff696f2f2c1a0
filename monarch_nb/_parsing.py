"""Syntax trees of sources, also where Python's own parser is disturbed."""

import ast

_TIMES = 10


def parsed(source: str | bytes, filename: str = "<unknown>") -> ast.Module:
    """The syntax tree of a source, as `ast.parse` gives it.

    Python before 3.11.8 and 3.12.2 raises SystemError where a collection of garbage during the construction of a tree
    leads to the parsing of another one, as when a traceback is formatted (github.com/python/cpython/issues/106905). The
    source is then parsed again.
    """
    for _ in range(_TIMES - 1):
        try:
            return ast.parse(source, filename)
        except SystemError:
            continue
    return ast.parse(source, filename)
