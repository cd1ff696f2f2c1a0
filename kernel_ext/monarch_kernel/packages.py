"""%pip --mesh: packages where the ranks of a mesh run."""

import shlex
import sys
from collections.abc import Callable

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import line_magic, magics_class

from monarch_nb.code import PipError, run_pip
from monarch_nb.mesh import ProcMesh

from .jupyter import line_magic_of
from .session import Session, SessionMagics

_OPTION = "--mesh"


@magics_class
class PackageMagics(SessionMagics):
    """%pip, for meshes too."""

    def __init__(self, shell: InteractiveShell, session: Session) -> None:
        super().__init__(shell, session)
        magic = line_magic_of(shell, "pip")
        owner = getattr(magic, "__self__", None)  # this class, where the extension is loaded a second time
        self.usual: Callable[[str], object] = owner.usual if isinstance(owner, PackageMagics) else magic

    @line_magic
    def pip(self, line: str) -> None:
        """Run pip: for this kernel, or where the ranks of a mesh run.

        %pip install einops                     # as IPython has it
        %pip install einops --mesh trainers     # on the hosts of this mesh, for the interpreter of its processes

        It runs once in each environment: hosts that share one, as on a network file system, have one of them run it.
        What it writes is shown as that rank's output, then for each environment what has changed. Ranks can import what
        is new at once; modules they have loaded stay as they are, and are listed.
        From Python: monarch_nb.code.run_pip(trainers, ["install", "einops"]).
        """
        parts = _split(line)
        if parts is None:
            self.usual(line)
            return
        name, words = parts
        mesh = self._session.find(name)
        if not isinstance(mesh, ProcMesh):
            raise UsageError(f"%pip: {name} is no mesh of processes: name the one that its actors are on")
        try:
            sys.stdout.write(f"{run_pip(mesh, words)}\n")
        except PipError as error:
            raise UsageError(f"%pip: {error}") from None
        except ValueError as error:
            raise UsageError(f"%pip: {error} {_OPTION} {name}") from None


def _split(line: str) -> tuple[str, list[str]] | None:
    """Returns the mesh and the other words; None for a line without a mesh. Raises UsageError."""
    if _OPTION not in line:
        return None
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise UsageError(f"%pip: {error}") from None
    words = [part for word in words for part in (word.split("=", 1) if word.startswith(f"{_OPTION}=") else [word])]
    if _OPTION not in words:
        return None
    index = words.index(_OPTION)
    if len(words) == index + 1:
        raise UsageError(f"%pip: which mesh? Write %pip install einops {_OPTION} trainers")
    return words[index + 1], words[:index] + words[index + 2 :]
