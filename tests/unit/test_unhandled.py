"""Failures that nobody handles end a script, but do not cut off its clean-up."""

import sys
import threading

import pytest

from monarch_nb.lifecycle import unhandled
from monarch_nb.runtime import unretrieved
from monarch_nb.supervision import Cause, MeshFailure

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


def no_thread(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


FAILURE = MeshFailure(mesh_name="workers", cause=Cause(kind="signal", text="it was killed"))


def test_a_failure_ends_a_script_that_has_no_thread_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(unhandled, "_statuses", [])
    monkeypatch.setattr(unhandled, "_exiting", [])
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    unhandled.prepare()
    with pytest.raises(SystemExit):
        unhandled.unhandled(FAILURE)
    assert "it was killed" in capsys.readouterr().err


def test_a_failure_is_shown_if_the_hook_gets_no_thread(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[MeshFailure] = []
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    monkeypatch.setattr(unhandled, "fault_hook", lambda _: print)
    unhandled.report(FAILURE, shown.append)
    assert shown == [FAILURE]
    assert "unhandled_fault_hook was not called" in capsys.readouterr().err
