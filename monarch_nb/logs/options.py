"""Display options of the output of each mesh, set by `ProcMesh.logging_option` and `--no-dedup`."""

import logging

from msgspec import Struct

from monarch_nb.logs.sources import mesh_of
from monarch_nb.settings import settings


class LogOption(Struct):
    """Options of one mesh."""

    stream: bool | None = None  # None: the default of this kind of process
    window: float | None = None  # seconds in which equal lines are gathered
    level: int = 0
    dedup: bool | None = None  # None: the setting log_dedup


class LogOptions:
    """Options of the meshes that this process has spawned."""

    def __init__(self) -> None:
        self._by_uid: dict[str, LogOption] = {}

    def of(self, address: str) -> LogOption | None:
        """Returns the options for the mesh of a process."""
        return self._by_uid.get(mesh_of(address)) if self._by_uid else None

    def set(self, uid: str, option: LogOption) -> None:
        """Sets the options of a mesh, except the merging of equal lines."""
        before = self._by_uid.get(uid)
        if before is not None:
            option.dedup = before.dedup
        self._by_uid[uid] = option

    def level(self, uid: str) -> int:
        """Returns the level from which processes of a mesh write records of `logging`; 0 if none is set."""
        option = self._by_uid.get(uid)
        return 0 if option is None else option.level

    def set_merging(self, uid: str, merges: bool | None) -> None:
        """Sets whether equal lines of several ranks of a mesh are shown once; None follows the setting log_dedup."""
        if merges is None and uid not in self._by_uid:
            return
        self._by_uid.setdefault(uid, LogOption()).dedup = merges

    def merges(self, address: str) -> bool:
        """Returns whether equal lines of the mesh of a process are shown once."""
        option = self.of(address)
        merges = option.dedup if option is not None else None
        return settings.log_dedup if merges is None else merges


def set_level(level: int) -> None:
    """Sets the level, in a process, from which records of `logging` are written."""
    root = logging.getLogger()
    if not root.handlers:
        logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    root.setLevel(level)
    for handler in root.handlers:  # loggers with their own level, such as those of actors, ignore the root's
        handler.setLevel(level)
