"""The cluster in a terminal: `monarch-nb top` shows what a running controller's displays show, and changes nothing.

A notebook's kernel serves it once the extension is loaded; a program calls `serve()`.
"""

from typing import TYPE_CHECKING

from monarch_nb._package import lazy_names

if TYPE_CHECKING:
    from monarch_nb.top.connection import ConnectionFile, connections
    from monarch_nb.top.server import StoreServer, serve, stop

__all__ = ["ConnectionFile", "StoreServer", "connections", "serve", "stop"]

_HOMES = {"connection": ("ConnectionFile", "connections"), "server": ("StoreServer", "serve", "stop")}
__getattr__ = lazy_names(__name__, _HOMES)
