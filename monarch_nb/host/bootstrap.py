"""Command lines of Monarch's own processes, which find the package wherever this process found it."""

import shutil
import sys
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[2])

# The package decides where its submodules are; nothing else must come from its folder before the standard library.
_OWN_PATH = f"sys.path.insert(0, {ROOT!r}); import monarch_nb; sys.path.append(sys.path.pop(0))"
_OTHER_PATH = f"sys.path.append({ROOT!r})"


def command(module: str, *arguments: object, python: str | None = None) -> list[str]:
    """Returns the command line that runs `main(argv)` of a module, without the current folder on the path.

    This interpreter runs the same package as this process; another one prefers its own.
    """
    find = _OWN_PATH if python in (None, sys.executable) else _OTHER_PATH
    code = f"import sys; {find}; from {module} import main; sys.exit(main(sys.argv[1:]))"
    return [python or sys.executable, "-P", "-c", code, *map(str, arguments)]


def untraced(command: list[str]) -> list[str]:
    """Returns a command line for the same program that a debugger of this process does not take over.

    pydevd, the base of debugpy, JupyterLab's debugger and PyCharm, replaces the arguments of each Python that a traced
    process starts: it then waits for a front end to attach to it, and JupyterLab never does. It recognizes a Python by
    the name of the program, and `env` has another one.
    """
    env = shutil.which("env") if "pydevd" in sys.modules else None
    return command if env is None else [env, *command]
