"""Failures that nobody handles end a script, but do not cut off its clean-up."""

import sys
import threading

import pytest

from monarch_nb.lifecycle import unhandled
from monarch_nb.runtime import unretrieved

pytestmark = pytest.mark.timeout(20)


@pytest.mark.parametrize("cleans_up", [False, True])
def test_a_failure_ends_a_script_unless_it_cleans_up(cleans_up: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unhandled, "_statuses", [])
    monkeypatch.setattr(unhandled, "_exiting", [])
    monkeypatch.setattr(unretrieved, "leaving", cleans_up)
    unhandled.prepare()

    def fail() -> None:
        assert unhandled.end_program(3)

    if cleans_up:
        fail()
    else:
        with pytest.raises(SystemExit) as exited:
            fail()
        assert exited.value.code == 3


class Ends:
    def __del__(self) -> None:
        assert unhandled.end_program(3)


def test_a_failure_during_a_finalizer_ends_a_script_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unhandled, "_statuses", [])
    monkeypatch.setattr(unhandled, "_exiting", [])
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    unhandled.prepare()

    def run() -> None:
        Ends()
        threading.Event().wait(10)

    with pytest.raises(SystemExit):
        run()
