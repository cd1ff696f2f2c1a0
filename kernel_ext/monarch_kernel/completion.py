"""Completion on the magics' lines: names of meshes, dimensions, options."""

from collections.abc import Callable
from typing import Any

from monarch_nb.mesh.modules import local_modules

from .log_magics import OPTIONS
from .session import Session

_COMMON_DIMS = ("gpus=", "hosts=")


class LineCompletion:
    """Completers of some magics' lines, for IPython's `complete_command` hook, which all versions have."""

    magics: tuple[str, ...] = ()

    def __init__(self, shell: Any, session: Session) -> None:
        self._shell = shell
        self._session = session

    def install(self) -> None:
        """Registers them."""
        for magic in self.magics:
            self._shell.set_hook("complete_command", self._completer(magic), str_key=magic)

    def _completer(self, magic: str) -> Callable[[Any, Any], list[str]]:
        def complete(_shell: Any, event: Any) -> list[str]:
            words = event.text_until_cursor.split()
            current = event.symbol
            before = words[1:-1] if current and words and words[-1].endswith(current) else words[1:]
            return [word for word in self.candidates(magic, before) if word.startswith(current)]

        return complete

    def candidates(self, magic: str, before: list[str]) -> list[str]:
        """What can follow the words `before` on the line of a magic."""
        raise NotImplementedError

    def _labels(self, name: str) -> tuple[str, ...]:
        try:
            return tuple(self._session.find(name).extent.labels)
        except Exception:
            return ()


class Completion(LineCompletion):
    """On the lines of the magics of meshes, actors and logs."""

    magics = ("%mesh", "%%mesh", "%%on", "%%actor", "%reload", "%heal", "%stop", "%interrupt", "%logs")

    def candidates(self, magic: str, before: list[str]) -> list[str]:
        """What can follow the words `before` on the line of a magic."""
        names = self._session.names()
        given = {word.partition("=")[0] for word in before[1:]}
        if magic in ("%heal", "%interrupt"):
            return [] if before else names
        if magic == "%stop":
            options = [] if before else ["--all", "--unused"]
            return [name for name in names if name not in before] + options
        if magic == "%%actor":
            return self._actor(before)
        if magic == "%reload":
            return [name for name in (*self._session.names("actors"), *local_modules()) if name not in before]
        if not before:
            return names
        if magic == "%logs":
            return [f"{label}=" for label in self._labels(before[0]) if label not in given] + list(OPTIONS)
        if magic == "%%on":
            return [f"{label}=" for label in self._labels(before[0]) if label not in given]
        own = tuple(f"{label}=" for label in self._labels(before[0]))
        dims = dict.fromkeys((*own, *_COMMON_DIMS))
        return [dim for dim in dims if dim[:-1] not in given] + ["--fresh", "--no-dedup"]

    def _actor(self, before: list[str]) -> list[str]:
        if not before:
            return self._session.names("actors")
        if len(before) == 1:
            return ["on"]
        if len(before) == 2:
            return self._session.names("procs")
        return [option for option in ("class=", "--fresh") if option not in before]
