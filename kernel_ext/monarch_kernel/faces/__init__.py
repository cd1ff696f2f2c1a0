"""Live faces of the cluster: widgets in cells and whatever else opens a comm; docs/protocol.md is what they speak."""

import logging
from typing import Any

from monarch_nb.debug.groups import short
from monarch_nb.runtime import Runtime
from monarch_nb.store import store_of

from ..files import cell_name, with_cells
from ..session import Session
from .channel import TARGET, Channel, Inbox
from .face import Face
from .requests import Requests

logger = logging.getLogger(__name__)


class Faces:
    """All faces of one kernel."""

    def __init__(self, shell: Any, session: Session) -> None:
        self._kernel = getattr(shell, "kernel", None)
        self._shell = shell
        self._requests = Requests(session, lambda file: cell_name(shell, file) or short(file))
        self._inbox = Inbox()
        self._faces: list[Face] = []
        self._engine: Runtime | None = None

    def install(self) -> None:
        """Takes comms from now on; without a kernel there are none."""
        manager = getattr(self._kernel, "comm_manager", None)
        if manager is not None:
            manager.register_target(TARGET, self._opened)

    def uninstall(self) -> None:
        """Closes all of them."""
        manager = getattr(self._kernel, "comm_manager", None)
        if manager is not None and TARGET in manager.targets:
            manager.unregister_target(TARGET, manager.targets[TARGET])
        faces, self._faces = self._faces, []
        for face in faces:
            face.close()
        self._inbox.close()

    def attach(self, engine: Runtime | None) -> None:
        """Shows this engine from now on; its store listens, so that what fails before anybody looks is known too."""
        self._engine = engine
        if engine is not None:
            collector = store_of(engine).collector
            if collector is not None:
                collector.readable = lambda text: with_cells(self._shell, text)
        for face in tuple(self._faces):
            self._inbox.put(lambda face=face: face.attach(engine))  # type: ignore[misc]

    def connect(self, comm: Any, *, custom: bool = False) -> Face:
        """A face behind a comm; `custom` for the comm of a widget."""
        face = Face(Channel(self._kernel, comm, custom=custom).send, self._requests)
        self._faces.append(face)
        self._inbox.put(lambda: face.attach(self._engine))
        return face

    def receive(self, face: Face, message: Any) -> None:
        """What a front end sent, on any thread."""
        if isinstance(message, dict):
            self._inbox.put(lambda: face.receive(message))

    def disconnect(self, face: Face) -> None:
        """A front end is gone."""
        if face in self._faces:
            self._faces.remove(face)
        self._inbox.put(face.close)

    def _opened(self, comm: Any, message: Any) -> None:
        face = self.connect(comm)
        comm.on_msg(lambda message: self.receive(face, message["content"]["data"]))
        comm.on_close(lambda message: self.disconnect(face))


__all__ = ["Faces"]
