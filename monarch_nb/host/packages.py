"""Versions of Python, Monarch-NB, PyTorch and CUDA here and on a host, and which of them must be the same."""

import sys
from functools import cache

from monarch_nb._about import __version__
from monarch_nb.host.protocol import HostState


def installed(name: str) -> str:
    """Returns the version of an installed package, or "". Imports nothing of it."""
    from importlib.metadata import PackageNotFoundError, version  # an agent does not need it at its start

    try:
        return version(name)
    except PackageNotFoundError:
        return ""


@cache
def torch_version() -> str:
    """Returns that of PyTorch, such as "2.6.0+cu124"."""
    return installed("torch")


def differences(endpoint: str, state: HostState) -> tuple[str, bool]:
    """Returns how a host's versions differ from this process's, with remedies, and whether they exclude it.

    Python's minor version and ours must be the same; another PyTorch or CUDA is reported, and does not exclude a host.
    """
    here = sys.version.split()[0]
    wrong = [
        ("Python", state.python, here, state.python.split(".")[:2] != here.split(".")[:2], True),
        ("monarch-nb", state.version, __version__, state.version != __version__, True),
    ]
    if state.torch and torch_version():  # a host may lack it on purpose
        wrong.append(("PyTorch", state.torch, torch_version(), state.torch != torch_version(), False))
    found = [(name, there, mine, stops) for name, there, mine, differs, stops in wrong if differs]
    if not found:
        return "", False
    runs = "; ".join(f"{name} {there or '(unknown)'}, this process {mine}" for name, there, mine, _ in found)
    packages = [
        f"{'torch' if name == 'PyTorch' else name}=={mine.partition('+')[0]}"
        for name, _, mine, _ in found
        if name != "Python"
    ]
    fixes = [f"pip install {' '.join(packages)}"] if packages else []
    if any(name == "Python" for name, *_ in found):
        minor = ".".join(here.split(".")[:2])
        fixes.insert(0, f"start the agent with Python {minor}, as code travels only between the same minor versions")
    cuda = state.torch.partition("+")[2] != torch_version().partition("+")[2]
    if any(name == "PyTorch" for name, *_ in found) and cuda:
        fixes.append(f"take PyTorch's builds for {torch_version().partition('+')[2] or 'its default'} there as here")
    return f"{endpoint} runs {runs}. On that host: {'; '.join(fixes)}", any(stops for *_, stops in found)
