"""Modules of the standard library that are imported at their first use, since most programs start without them.

asyncio brings in ssl, subprocess and concurrent.futures, a fifth of the time of `import monarch.actor`. Annotations of
functions that name it are quoted, or they would be its first use.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio as asyncio
else:

    class _Deferred:
        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, attribute: str) -> Any:
            return getattr(sys.modules.get(self._name) or import_module(self._name), attribute)

    asyncio = _Deferred("asyncio")
