"""Ctrl-C in a waiting cell: once ends the cell, twice reaches the ranks, for all ways of waiting."""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen
from typing import Any

import pytest

from tests.notebook.notebook import PYTHON, Cell, Notebook

pytestmark = pytest.mark.timeout(120)

AGAIN = "Press stop (Ctrl-C) again by "
BUTTON = "monarch-nb:interrupt"
WAITS = {
    "get": "a.work.call(60, 'begun').get()",
    "await": "await a.work.call(60, 'begun')",
    "gather": "import asyncio\nawait asyncio.gather(a.work.call(60, 'begun').as_asyncio(), a.pid.call().as_asyncio())",
    "loop": "for one in range(60):\n    a.work.call(one and 60, 'begun' if one else '').get()",
    "stream": "[future.get() for future in a.work.stream(60, 'begun')]",
}


def stopped(nb: Notebook, source: str, begun: str = "begun") -> tuple[str, Cell]:
    """Stops a waiting cell once; its request, and its output once it has ended."""
    request, cell = nb.start(source), Cell()
    nb.until(request, cell, begun)
    nb.interrupt()
    return request, nb.finish(request)


def offered(cell: Cell) -> dict[str, Any]:
    """The offer of a second press in the cell."""
    (display,) = (display for display in cell.displays if AGAIN in display["text/plain"])
    return display


def last(nb: Notebook, request: str, part: str) -> str:
    """The last lines of the notice, once the offer is over."""
    return nb.shows(request, part).partition("\n")[2]


def last_line(text: str) -> str:
    return text.splitlines()[-1]


@pytest.mark.parametrize("way", WAITS)
def test_a_second_interrupt_reaches_what_the_ranks_run(nb: Notebook, way: str) -> None:
    request, cell = stopped(nb, WAITS[way])
    assert cell.error is not None
    assert cell.error["ename"] in ("KeyboardInterrupt", "CancelledError")
    assert re.match(r"KeyboardInterrupt: stopped waiting; .*It goes on: %interrupt a ends it there", cell.traceback)
    assert len(cell.traceback.splitlines()) == 1
    assert offered(cell)["text/plain"].startswith("Stopped waiting for a.work() on a gpus=")
    assert BUTTON in offered(cell)["text/html"]
    nb.interrupt()
    called = "(work|pid)" if way == "gather" else "work"  # one of two that are awaited together
    assert re.match(rf"Interrupted a\.{called}\(\) on a gpus=0-3\.", last(nb, request, "Interrupted"))
    assert nb.run("a.pid.call().get(10); 'free'").ok().text == "'free'"


@pytest.mark.parametrize("way", ["press", "magic"])
def test_a_cell_on_the_ranks_is_ended_by_press_or_magic(nb: Notebook, way: str) -> None:
    request, cell = stopped(nb, "%%on w\nimport time\nprint('begun')\ntime.sleep(60)")
    assert "%interrupt w ends it there" in cell.traceback
    if way == "press":
        nb.interrupt()
        assert last(nb, request, "Interrupted") == "Interrupted the cell on w gpus=0-3."
    else:
        nb.run("%interrupt w").ok()
    assert nb.run("%%on w\nrank").ok().text.startswith("ValueMesh")


@pytest.mark.parametrize("way", ["get", "await"])
def test_a_second_interrupt_may_come_before_the_cell_has_ended(nb: Notebook, way: str) -> None:
    request, cell = nb.start(WAITS[way]), Cell()
    nb.until(request, cell, "begun")
    nb.interrupt()
    nb.until(request, cell, AGAIN)
    nb.interrupt()
    cell = nb.finish(request)
    assert "stopped waiting" in cell.traceback
    if "Interrupted a" not in str(cell.updates):  # it may be over before the cell is
        nb.shows(request, "Interrupted a.work() on a gpus=0-3.")
    nb.interrupt()  # once too often: there is nothing to interrupt
    assert nb.run("a.pid.call().get(10); 'free'").ok().text == "'free'"


def test_a_sleep_of_a_sync_endpoint_is_ended(nb: Notebook) -> None:
    request, _ = stopped(nb, "a.nap.call(600).get()", "asleep")
    nb.interrupt()
    assert last(nb, request, "Interrupted") == "Interrupted a.nap() on a gpus=0-3."


def test_an_uninterruptible_c_call_is_named_with_what_ends_it(nb: Notebook) -> None:
    nb.run("from monarch_kernel import interrupted_calls; interrupted_calls.GIVE_UP_SECONDS = 2.0").ok()
    request, _ = stopped(nb, "left = a.slice(gpus=1).receive.call_one()\nleft.get()", "waiting for a byte")
    nb.interrupt()
    notice = nb.shows(request, "has not reacted within 1 s")
    nb.interrupt()  # once is enough
    assert "a gpus=1 has not reacted within 1 s: a.receive() waits in `mine.recv(1)` (Cell In[" in notice
    assert "%heal a gpus=1 --kill kills its process and starts it again" in notice
    assert "a.receive() on a gpus=1 has not stopped within 2 s" in nb.shows(request, "has not stopped")
    nb.run("interrupted_calls.GIVE_UP_SECONDS = 5.0").ok()
    assert "a gpus=1 has not reacted within 1 s" in nb.run("%interrupt a").ok().stdout
    assert "healed 1" in nb.run("%heal a gpus=1 --kill").ok().stdout


@pytest.mark.slow
def test_a_later_wait_says_what_the_ranks_are_still_busy_with(nb: Notebook) -> None:
    _, ended = stopped(nb, "a.nap.call(600).get()", "asleep")
    assert "0 of 4 ranks have answered a.nap(). It goes on: %interrupt a ends it there" in ended.traceback
    request = nb.start("a.pid.call().get()")
    cell = Cell()
    nb.until(request, cell, "gpus=0-3 busy")
    assert re.search(r"a gpus=0-3 busy with a.nap\(\) since \d\d:\d\d:\d\d \(\d+ s\); %interrupt a ends it", str(cell))
    nb.interrupt()
    nb.finish(request)
    nb.interrupt()
    notice = last(nb, request, "Interrupted")
    assert notice == "Interrupted a.nap() on a gpus=0-3.\na.pid() had not begun, and does not."
    assert nb.run("%interrupt a").ok().stdout == "nothing runs on a gpus=0-3\n"


def test_interrupt_says_what_it_has_ended(nb: Notebook) -> None:
    request, _ = stopped(nb, "left = a.nap.call(600)\nleft.get()", "asleep")
    assert nb.run("%interrupt a").ok().stdout == "interrupted a.nap() on a gpus=0-3\n"
    assert last(nb, request, "Meanwhile") == "Meanwhile a.nap() on a gpus=0-3 was interrupted."
    assert "KeyboardInterrupt" in nb.run("left.get()").traceback


def test_two_calls_that_a_cell_waits_for_are_interrupted_together(nb: Notebook) -> None:
    nb.run("b = w.spawn('b', Worker)").ok()
    source = """
try:
    a.nap.call(600).get()
finally:
    b.slice(gpus=0).work.call_one(60, 'tidying').get()"""
    request, cell = nb.start(source), Cell()
    nb.until(request, cell, "asleep")
    nb.interrupt()
    nb.until(request, cell, "tidying")
    nb.interrupt()  # the cell waits again: this stops that wait
    cell = nb.finish(request)
    assert "b.work() has not answered yet" in cell.traceback.splitlines()[-1]
    both = cell.displays[-1]
    assert re.fullmatch(
        r"Stopped waiting for a\.nap\(\) on a gpus=0-3 and b\.work\(\) on b gpus=0\.\n"
        # It stays as it is where the kernel is restarted now: all of it is still true, also without the buttons.
        r"Press stop \(Ctrl-C\) again by \d\d:\d\d:\d\d to interrupt the ranks too; "
        r"%interrupt a b does it at any time\.",
        both["text/plain"],
    )
    assert "Interrupt the ranks of a<" in both["text/html"]
    assert "Interrupt the ranks of b<" in both["text/html"]
    nb.interrupt()
    notice = last(nb, request, "Interrupted")
    assert notice.splitlines() == ["Interrupted a.nap() on a gpus=0-3.", "Interrupted b.work() on b gpus=0."]
    nb.run("b.stop().get()").ok()


def test_stop_means_the_newest_cell_and_no_earlier_ranks(nb: Notebook) -> None:
    request, _ = stopped(nb, "left = a.work.call(60, 'begun')\nleft.get()")
    second, cell = nb.start("print('looping')\nwhile True: time.sleep(0.01)"), Cell()
    nb.until(second, cell, "looping")
    notice = nb.shows(request, "Stop means")
    assert last_line(notice) == "It goes on: %interrupt a ends it there. Stop means the cell that has begun since."
    nb.interrupt()
    assert nb.finish(second).traceback.splitlines()[-1].startswith("KeyboardInterrupt")
    nb.interrupt()  # the kernel is idle: it means nothing
    assert nb.run("left.done()").ok().text == "False"
    assert nb.run("%interrupt a").ok().stdout == "interrupted a.work() on a gpus=0-3\n"


def test_code_that_a_front_end_runs_unseen_takes_no_offer_back(nb: Notebook) -> None:
    request, _ = stopped(nb, "a.work.call(60, 'begun').get()")
    nb.aside("len(dir())")
    nb.interrupt()
    assert last(nb, request, "Interrupted") == "Interrupted a.work() on a gpus=0-3."


def test_cells_that_survive_their_stop_end_at_the_third_press(nb: Notebook) -> None:
    source = """
try:
    a.work.call(60, 'begun').get()
except KeyboardInterrupt:
    print('going on')
while True: time.sleep(0.01)"""
    request, cell = nb.start(source), Cell()
    nb.until(request, cell, "begun")
    nb.interrupt()
    nb.until(request, cell, "going on")
    nb.interrupt()
    nb.until(request, cell, "Interrupted a.work() on a gpus=0-3.")
    nb.interrupt()
    assert nb.finish(request).traceback.splitlines()[-1].startswith("KeyboardInterrupt")


@pytest.mark.parametrize("wait", ["left.get()", "await left"])
def test_a_call_that_ends_meanwhile_takes_the_offer_back(nb: Notebook, tmp_path: Path, wait: str) -> None:
    gate = tmp_path / "gate"
    request, cell = stopped(nb, f"left = a.work.call(0, 'begun', {str(gate)!r})\n{wait}")
    assert "0 of 4 ranks have answered a.work()" in cell.traceback
    gate.touch()
    assert last(nb, request, "Meanwhile") == "Meanwhile a.work() on a gpus=0-3 has ended."
    nb.interrupt()
    assert nb.run("left.get().values()").ok().text == "[0, 1, 2, 3]"


@pytest.fixture
def soon_over(nb: Notebook) -> Iterator[None]:
    nb.run("from monarch_kernel import stopping; stopping.OFFER_SECONDS = 0.2").ok()
    yield
    nb.run("stopping.OFFER_SECONDS = 10.0").ok()


def test_after_the_offer_stop_means_nothing_to_an_idle_kernel(nb: Notebook, soon_over: None) -> None:
    source = "import signal; before = get_ipython().kernel.saved_sigint_handler\n"
    request, cell = stopped(nb, f"{source}left = a.work.call(60, 'begun')\nleft.get()")
    over = "It goes on: %interrupt a ends it there."
    if over not in str(cell.updates):  # the offer may be over before the cell is
        assert last(nb, request, "It goes on") == over
    nb.interrupt()
    assert nb.run("left.done(), get_ipython().kernel.saved_sigint_handler == before").ok().text == "(False, True)"
    nb.run("%interrupt a").ok()


@pytest.mark.parametrize("way", ["get", "await"])
def test_cells_wait_two_seconds_where_idle_kernels_take_no_press(nb: Notebook, way: str) -> None:
    nb.run("from monarch_kernel.front import Front; kept, Front.idle_handler = Front.idle_handler, None").ok()
    request, cell = nb.start(WAITS[way]), Cell()
    nb.until(request, cell, "begun")
    nb.interrupt()
    nb.until(request, cell, "Interrupt again within 2 s to interrupt the ranks too.")
    nb.interrupt()
    assert nb.finish(request).traceback == "KeyboardInterrupt: interrupted a.work() on a gpus=0-3"
    nb.run("Front.idle_handler = kept").ok()


def test_an_await_in_a_terminal_ends_as_in_a_notebook(tmp_path: Path) -> None:
    ask = [PYTHON, "-m", "IPython", "--simple-prompt", "--no-banner", "--colors=NoColor"]
    env = {**os.environ, "IPYTHONDIR": str(tmp_path)}
    with Popen(ask, env=env, stdin=PIPE, stdout=PIPE, stderr=STDOUT, text=True, bufsize=1) as terminal:
        assert terminal.stdin
        assert terminal.stdout
        terminal.stdin.write("%load_ext monarch\n%mesh w gpus=1\nfrom monarch.actor import run_on\n")
        busy = "import time; print('beg' + 'un', flush=True)\\nwhile True: time.sleep(0.02)"
        terminal.stdin.write(f'await run_on(w, "{busy}")\n')
        next(line for line in terminal.stdout if "begun" in line)
        terminal.send_signal(signal.SIGINT)
        ends = next(line for line in terminal.stdout if "KeyboardInterrupt" in line)
        assert "stopped waiting; w.cell() has not answered yet" in ends
        terminal.stdin.write("%interrupt w\nexit\n")
        assert "interrupted the cell on w gpus=0" in terminal.stdout.read()
