"""Modules of others that are imported at their first use, since most programs start without them.

asyncio brings in ssl and subprocess, a seventh of the time of `import monarch.actor`. Annotations of functions that
name it are quoted, or they would be its first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio as asyncio
    import difflib as difflib
    import sysconfig as sysconfig
    import tempfile as tempfile
    from concurrent import futures as futures

    import zmq as zmq
else:

    class _Deferred:
        def __init__(self, name: str) -> None:
            self._name = name
            self._module: Any = None

        def __getattr__(self, attribute: str) -> Any:
            if self._module is None:
                # Waits for a thread that is importing it, while sys.modules has only a part of it.
                self._module = import_module(self._name)
            return getattr(self._module, attribute)

    asyncio = _Deferred("asyncio")
    difflib = _Deferred("difflib")
    # Its thread pools cannot be imported once the main thread has ended, though other threads of the program run on.
    futures = _Deferred("concurrent.futures")
    sysconfig = _Deferred("sysconfig")
    tempfile = _Deferred("tempfile")
    zmq = _Deferred("zmq")
