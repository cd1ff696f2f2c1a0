"""Source text that travels with code by value, so that tracebacks and debuggers elsewhere can show its lines."""

import linecache
import os
import re
import sys
from collections.abc import Iterable, Mapping

import cloudpickle.cloudpickle as cp

# Names that notebook kernels give to cells.
_CELL = re.compile(r"^<ipython-input-|[/\\](ipykernel|xpython)_\d+[/\\]")

# file name -> text that came in a message
_received: dict[str, str] = {}
# file name -> (linecache's list of lines, those joined): joined anew when linecache has read the file again
_joined: dict[str, tuple[list[str], str]] = {}


def gather_sources(files: Mapping[str, str | None]) -> dict[str, str]:
    """The texts to ship for by-value code: of those `files` (name -> module of the code) a receiver may not have."""
    texts = {}
    for name, module in files.items():
        text = _received.get(name)
        if text is None and _must_ship(name, module):
            text = _text(name)
        if text:
            texts[name] = text
    return texts


def register_sources(texts: Mapping[str, str]) -> None:
    """Make the lines of `texts` (file name -> text) known to this process's linecache."""
    for name, text in texts.items():
        if _received.get(name) != text or name not in linecache.cache:
            _received[name] = text
            # Without a time of modification checkcache() leaves the entry alone.
            linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)


def received_sources() -> Iterable[str]:
    """Names of the files whose text came from other processes."""
    return tuple(_received)


def _must_ship(name: str, module: str | None) -> bool:
    if module == "__main__" or _CELL.search(name):
        return True
    if module is not None and any(_is_within(module, listed) for listed in cp.list_registry_pickle_by_value()):
        return True
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    return name == main or not os.path.exists(name)


def _is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def _text(name: str) -> str:
    lines = linecache.getlines(name)
    known = _joined.get(name)
    if known is None or known[0] is not lines:
        known = _joined[name] = (lines, "".join(lines))
    return known[1]
