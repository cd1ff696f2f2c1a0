"""The front ends as one ES module: hand-written modules, joined; nothing is fetched when they run."""

import re
from functools import cache
from pathlib import Path

STATIC = Path(__file__).parent / "static"
MODULES = (
    "cluster",
    "words",
    "front",
    "chart",
    "colours",
    "grid",
    "hosts",
    "details",
    "mesh",
    "autopsy",
    "failures",
    "logs",
    "metrics",
    "debugger",
    "widget",
)  # each may import from those before it
STYLES = ("style", "debugger")
LARGEST = 150_000  # bytes: it travels through the kernel with each widget

_IMPORT = re.compile(r'^import\s[^;]*?\sfrom\s+"\./\w+\.js";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?function|class|const|let)", re.MULTILINE)


@cache
def script() -> str:
    """The ES module. Modules share one scope, so their names must differ."""
    parts = []
    for name in MODULES:
        source = (STATIC / f"{name}.js").read_text(encoding="utf-8")
        parts.append(f"// -- {name}.js\n{_EXPORT.sub('', _IMPORT.sub('', source))}")
    return "\n".join(parts)


@cache
def style() -> str:
    """Its style sheet."""
    return "\n".join((STATIC / f"{name}.css").read_text(encoding="utf-8") for name in STYLES)
