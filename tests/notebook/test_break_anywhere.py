"""Breakpoints in what runs on processes, and cells that stop in the debugger where nobody can type."""

from collections.abc import Iterator

import pytest

from tests.notebook.notebook import Cell, Notebook

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def debugged(nb: Notebook) -> Iterator[Notebook]:
    yield nb
    nb.run("%break clear").ok()
    nb.run("import monarch.debug\nmonarch.debug.resume() if monarch.debug.sessions() else None")


def test_a_function_of_any_module_is_a_breakpoint_of_processes(debugged: Notebook) -> None:
    nb = debugged
    first = nb.run("%break").ok().text.count("breakpoint ")
    wrong = nb.run("%break wave.opan on w")
    assert "wave.opan is neither file:line, nor a function" in wrong.stderr
    assert "nowhere_at_all.run is neither" in nb.run("%break nowhere_at_all.run on w").stderr
    notice = nb.run("%break quopri.decodestring on w").ok().text
    number = notice.rpartition("breakpoint ")[2].split()[0]
    assert f"breakpoint {number} at quopri.decodestring on w" in notice
    assert first == 0 or int(number) > first
    stopped = nb.run("%%on w gpus=0-1\nimport quopri\nquopri.decodestring(b'a=20b')")
    assert "2 of 4  at quopri.py:" in stopped.traceback or "2  at quopri.py:" in stopped.traceback
    assert f"breakpoint {number}\n" in stopped.traceback, "the number that %break gave"
    out = stopped.traceback.rpartition("then Out[")[2].split("]")[0]
    nb.run("%%mdb w\nc all").ok()
    assert "gpus=0-1: b'a b'" in nb.run(f"Out[{out}].get()").ok().text


def test_a_breakpoint_of_processes_holds_in_their_actors_too(debugged: Notebook) -> None:
    nb = debugged
    nb.run("%break Worker.divide on w gpus=3").ok()
    stopped = nb.run("call = a.slice(gpus=3).divide.call_one(2)\ncall.get()")
    assert "in Worker.divide  a gpus=3" in stopped.traceback
    nb.run("%%mdb a\nc all").ok()
    assert nb.run("call.get()").ok().text == "0.5"


def test_a_cell_left_to_run_has_a_future_to_get(debugged: Notebook) -> None:
    nb = debugged
    request = nb.start("%%on w gpus=0\nimport os, time\nprint('begun')\ntime.sleep(0.5)\n6 * 7")
    nb.until(request, Cell(), "begun")
    nb.interrupt()
    traceback = nb.finish(request).traceback
    if "meanwhile" not in traceback:
        out = traceback.rpartition("Out[")[2].split("]")[0]
        assert nb.run(f"Out[{out}].get().item()").ok().text == "42"
