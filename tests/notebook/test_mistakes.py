"""Errors that end at the user's line: what the engine raises for mistakes of its caller."""

import pytest

from tests.notebook.notebook import Notebook

pytestmark = pytest.mark.timeout(120)

INTERRUPTED = (
    "import _thread, threading, monarch.debug\nthreading.Timer(0.2, _thread.interrupt_main).start()\n"
    "monarch.debug.wait(1, timeout=60)"
)
MISTAKES = {
    "an unknown dimension": ("w.slice(gpu=1)", "DimensionError: mesh has no dimension 'gpu'"),
    "too large an index": ("w.slice(gpus=9)", "OutOfRangeError: index out of range: gpus=9"),
    "an unpicklable argument": ("import threading\na.work.call(threading.Lock()).get()", "`seconds` of a.work"),
    "wrong arguments": ("a.work.call(nothing=3).get()", "got an unexpected keyword argument 'nothing'"),
    "an unknown endpoint": ("a.wrok.call().get()", "has no endpoint 'wrok'"),
    "an awaited call": ("await a.work.call(1, 2, 3, 4, 5)", "too many positional arguments"),
    "no actor class": ("w.spawn('u', 3)", "3 cannot be spawned"),
    "an unknown setting": ("import monarch_nb.config as c\nc.configure(nonsense=3)", "invalid configuration key"),
    "an interrupt": (INTERRUPTED, "KeyboardInterrupt"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_ends_at_the_line_that_made_it(nb: Notebook, case: str) -> None:
    source, text = MISTAKES[case]
    cell = nb.run(source)
    assert cell.error is not None
    assert text in cell.traceback
    assert "---->" in cell.traceback, "the line is shown"
    assert "monarch_nb/" not in cell.traceback


def test_all_frames_are_to_be_had(nb: Notebook) -> None:
    nb.run("w.slice(gpu=1)")
    assert "monarch_nb/shape/" in nb.run("%tb").traceback
    try:
        assert "monarch_nb/shape/" in nb.run("%xmode Verbose\nw.slice(gpu=1)").traceback
    finally:
        nb.run("%xmode Context").ok()


def test_user_code_called_by_the_engine_is_shown_with_its_cause(nb: Notebook) -> None:
    cell = nb.run(
        "class Sour:\n    def __reduce__(self):\n        try:\n            {}['a']\n        except KeyError:\n"
        "            raise ValueError('sour')\na.work.call(Sour()).get()"
    )
    shown = cell.traceback
    assert shown.rstrip().endswith("ValueError: sour")
    assert "in Sour.__reduce__" in shown or "in __reduce__" in shown
    assert shown.count("KeyError: 'a'") == 1
    assert "monarch_nb/" not in shown


def test_errors_without_the_engine_are_as_ever(nb: Notebook) -> None:
    shown = nb.run("import json\njson.loads('{')").traceback
    assert "JSONDecodeError" in shown
    assert "json/decoder.py" in shown
    assert nb.run("1 +* 1").traceback.rstrip().endswith("SyntaxError: invalid syntax")
    assert "UsageError: " in nb.run("%mesh w gpuss").stderr


def test_a_mistake_of_an_endpoint_ends_at_its_line_too(nb: Notebook) -> None:
    shown = nb.run("%%on w gpus=0\nfrom monarch.actor import this_proc\nthis_proc().slice(nothing=1)").traceback
    assert "this_proc().slice(nothing=1)" in shown
    assert "mesh has no dimension 'nothing'" in shown
    assert "monarch_nb/" not in shown


def test_code_that_ranks_cannot_run_is_shown_with_the_reason(nb: Notebook) -> None:
    assert "ranks run Python alone, without magics" in nb.run("%%on w\n1\n!nvidia-smi").traceback
    assert "    return 3\n" in nb.run("%%on w\nreturn 3").traceback
    assert "asyncio/" not in nb.run("%%on w\nawait nothing").traceback


def test_input_on_a_rank_says_where_to_ask(nb: Notebook) -> None:
    cell = nb.run("%%on w gpus=0\ninput('how fast? ')")
    assert "input('how fast? ')" in cell.traceback
    assert "EOFError: input('how fast? ') has nobody to ask on a rank: ask in the notebook" in cell.traceback
    assert "how fast?" not in cell.stdout, "nobody is asked"
