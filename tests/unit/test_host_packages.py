"""A host that runs other versions than this process: all differences in one message, with the remedy."""

import sys

import pytest

from monarch_nb import __version__
from monarch_nb.host import packages
from monarch_nb.host.protocol import HostState

OURS = sys.version.split()[0]


@pytest.fixture(autouse=True)
def torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "torch_version", lambda: "2.6.0+cu124")
    monkeypatch.setattr(packages, "origin", lambda: "")


def differences(python: str = OURS, version: str = __version__, torch: str = "2.6.0+cu124") -> tuple[str, bool]:
    return packages.differences(
        "tcp://h:1", HostState(host="h", pid=1, procs=(), python=python, version=version, torch=torch)
    )


def test_a_host_that_runs_the_same_is_no_matter() -> None:
    assert differences() == ("", False)
    assert differences(torch="") == ("", False)


def test_all_differences_and_their_mending_are_one_message() -> None:
    text, stops = differences("3.99.1", "0.0.9", "2.4.0+cpu")
    assert stops
    assert (
        f"Python 3.99.1, this process {OURS}; monarch-nb 0.0.9, this process {__version__}; PyTorch 2.4.0+cpu" in text
    )
    assert f"pip install monarch-nb=={__version__}; pip install torch==2.6.0; " in text
    assert text.endswith("take PyTorch's builds for cu124 there as here")


@pytest.mark.parametrize(
    ("origin", "advice"),
    [
        ("file:///src/monarch-nb", "install Monarch-NB from a copy of /src/monarch-nb, as here"),
        ("git+https://x/y@0abc", "pip install git+https://x/y@0abc"),
    ],
)
def test_the_advice_names_where_this_one_was_installed_from(
    origin: str, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "origin", lambda: origin)
    assert differences(version="0.0.9")[0].endswith(f"On that host: {advice}")


def test_another_pytorch_is_told_and_stops_nobody() -> None:
    text, stops = differences(torch="2.6.0+cpu")
    assert not stops
    assert "PyTorch 2.6.0+cpu, this process 2.6.0+cu124" in text
