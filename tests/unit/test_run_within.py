"""Magics that run a cell within a context, and show what that has found."""

import signal
from contextlib import nullcontext

import pytest
from IPython.core.interactiveshell import InteractiveShell

from monarch_kernel.diagnosis import run_within


class Found:
    """A report; a press of stop comes while it is formatted."""

    def __repr__(self) -> str:
        signal.raise_signal(signal.SIGINT)
        return "what was found"


def test_another_press_of_stop_loses_no_report(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt):
        run_within(InteractiveShell(), "raise KeyboardInterrupt", nullcontext(Found()), "")
    assert "what was found" in capsys.readouterr().out
