"""Versions of Python, Monarch-NB, PyTorch and CUDA here and on a host, and those that must be the same."""

import json
import sys
from functools import cache
from typing import TYPE_CHECKING

from monarch_nb._package import __version__
from monarch_nb.host.protocol import HostState

if TYPE_CHECKING:
    from importlib.metadata import Distribution


def _distribution(name: str) -> "Distribution | None":
    from importlib.metadata import PackageNotFoundError, distribution  # an agent does not need it at its start

    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


def installed(name: str) -> str:
    """Returns the version of an installed package, or "". Imports nothing of it."""
    package = _distribution(name)
    return "" if package is None else package.version


@cache
def torch_version() -> str:
    """Returns the version of PyTorch, such as "2.6.0+cu124"."""
    return installed("torch")


@cache
def origin() -> str:
    """Returns the address that this Monarch-NB was installed from: a file or a repository; "" if from an index.

    PEP 610.
    """
    package = _distribution("monarch-nb")
    text = None if package is None else package.read_text("direct_url.json")
    if not text:
        return ""
    record = json.loads(text)
    commit = record.get("vcs_info", {}).get("commit_id", "")
    return f"git+{record['url']}@{commit}" if commit else str(record.get("url", ""))


def how_to_install() -> str:
    """Returns how another machine gets the Monarch-NB of this process."""
    if not origin():
        return f"pip install monarch-nb=={__version__}"
    if origin().startswith("git+"):
        return f"pip install {origin()}"
    return f"install Monarch-NB from a copy of {origin().removeprefix('file://')}, as here"


def differences(endpoint: str, state: HostState) -> tuple[str, bool]:
    """Returns how a host's versions differ from this process's, with remedies, and whether they exclude it.

    Python's minor version and ours must be the same; another PyTorch or CUDA is reported, and does not exclude a host.
    """
    python = sys.version.split()[0]
    comparisons = [
        ("Python", state.python, python, state.python.split(".")[:2] != python.split(".")[:2], True),
        ("monarch-nb", state.version, __version__, state.version != __version__, True),
    ]
    if state.torch and torch_version():  # a host may lack it on purpose
        comparisons.append(("PyTorch", state.torch, torch_version(), state.torch != torch_version(), False))
    mismatches = [(name, theirs, ours, stops) for name, theirs, ours, differs, stops in comparisons if differs]
    if not mismatches:
        return "", False
    runs = "; ".join(f"{name} {theirs or '(unknown)'}, this process {ours}" for name, theirs, ours, _ in mismatches)
    differ = {name: ours for name, _, ours, _ in mismatches}
    fixes = [how_to_install()] if "monarch-nb" in differ else []
    if "PyTorch" in differ:
        fixes.append(f"pip install torch=={differ['PyTorch'].partition('+')[0]}")
    if "Python" in differ:
        minor = ".".join(python.split(".")[:2])
        fixes.insert(0, f"start the agent with Python {minor}, as code travels only between the same minor versions")
    cuda = state.torch.partition("+")[2] != torch_version().partition("+")[2]
    if "PyTorch" in differ and cuda:
        fixes.append(f"take PyTorch's builds for {torch_version().partition('+')[2] or 'its default'} there as here")
    return f"{endpoint} runs {runs}. On that host: {'; '.join(fixes)}", any(stops for *_, stops in mismatches)
