"""Syntax trees of sources, also where a bug disturbs Python's own parser."""

import ast

_TIMES = 10


def parsed(source: str | bytes, filename: str = "<unknown>") -> ast.Module:
    """Returns the syntax tree of a source, as `ast.parse` does.

    Python before 3.11.8 and 3.12.2 raises SystemError where a garbage collection during the construction of a tree
    causes another source to be parsed, as when a traceback is formatted (github.com/python/cpython/issues/106905). The
    source is then parsed again.
    """
    for _ in range(_TIMES - 1):
        try:
            return ast.parse(source, filename)
        except SystemError:
            continue
    return ast.parse(source, filename)
