"""What happens to meshes and processes, told to displays."""

import logging
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

Listener = Callable[[str, Any], None]


class MeshEvents:
    """Those of one process."""

    def __init__(self, *listeners: Listener) -> None:
        self.listeners = list(listeners)  # called on engine threads: they must not block

    def tell(self, kind: str, about: Any) -> None:
        """Something happened; a display that stumbles keeps nobody from hearing of it."""
        for listener in tuple(self.listeners):
            try:
                listener(kind, about)
            except Exception:
                logger.exception("a display failed on %s", kind)
