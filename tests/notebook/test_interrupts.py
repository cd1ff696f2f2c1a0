"""Ctrl-C in a waiting cell: once stops waiting, twice reaches the ranks, whatever the cell waits by."""

import re

import pytest

from tests.notebook.notebook import Cell, Notebook

pytestmark = pytest.mark.timeout(120)

AGAIN = "Interrupt again within 2 s to interrupt the ranks too."
WAITS = {
    "get": "a.work.call(60, 'begun').get()",
    "await": "await a.work.call(60, 'begun')",
    "gather": "import asyncio\nawait asyncio.gather(a.work.call(60, 'begun').as_asyncio(), a.pid.call().as_asyncio())",
    "loop": "for one in range(60):\n    a.work.call(one and 60, 'begun' if one else '').get()",
    "stream": "[future.get() for future in a.work.stream(60, 'begun')]",
}


@pytest.mark.parametrize("way", WAITS)
def test_a_second_interrupt_reaches_what_the_ranks_run(nb: Notebook, way: str) -> None:
    request = nb.start(WAITS[way])
    cell = Cell()
    nb.until(request, cell, "begun")
    nb.interrupt()
    nb.until(request, cell, AGAIN)
    assert "Stopped waiting for a.work() on a gpus=0-3." in cell.stderr
    nb.interrupt()
    done = nb.finish(request)
    assert done.error is not None
    assert done.error["ename"] in ("KeyboardInterrupt", "CancelledError")
    called = "(work|pid)" if way == "gather" else "work"  # either of two that are awaited together
    assert re.match(rf"KeyboardInterrupt: interrupted a\.{called}\(\) on a gpus=0-3", done.traceback)
    assert len(done.traceback.splitlines()) == 1
    assert nb.run("a.pid.call().get(10); 'free'").ok().text == "'free'"


def test_a_sleep_of_a_sync_endpoint_is_ended(nb: Notebook) -> None:
    request = nb.start("a.nap.call(600).get()")
    cell = Cell()
    nb.until(request, cell, "asleep")
    nb.interrupt()
    nb.until(request, cell, AGAIN)
    nb.interrupt()
    assert nb.finish(request).traceback == "KeyboardInterrupt: interrupted a.nap() on a gpus=0-3"


def test_a_call_in_c_that_nothing_wakes_is_told_with_what_ends_it(nb: Notebook) -> None:
    request = nb.start("left = a.slice(gpus=1).receive.call_one()\nleft.get()")
    cell = Cell()
    nb.until(request, cell, "waiting for a byte")
    nb.interrupt()
    nb.until(request, cell, AGAIN)
    nb.interrupt()
    nb.until(request, cell, "has not reacted within 1 s")
    assert "a gpus=1 has not reacted within 1 s: a.receive() waits in `mine.recv(1)` (Cell In[" in cell.stderr
    assert "%heal a gpus=1 --kill kills its process and starts it again" in cell.stderr
    nb.interrupt()  # enough
    assert "It goes on: %interrupt a ends it there" in nb.finish(request).traceback
    assert "a gpus=1 has not reacted within 1 s" in nb.run("%interrupt a").ok().stdout
    assert "healed 1" in nb.run("%heal a gpus=1 --kill").ok().stdout


@pytest.mark.slow
def test_a_later_wait_says_what_the_ranks_are_still_busy_with(nb: Notebook) -> None:
    request = nb.start("a.nap.call(600).get()")
    nb.until(request, Cell(), "asleep")
    nb.interrupt()
    left = nb.finish(request)
    assert "0 of 4 ranks have answered a.nap(). It goes on: %interrupt a ends it there" in left.traceback
    request = nb.start("a.pid.call().get()")
    cell = Cell()
    nb.until(request, cell, "gpus=0-3 busy")
    assert re.search(r"a gpus=0-3 busy with a.nap\(\) since \d\d:\d\d:\d\d \(\d+ s\); %interrupt a ends it", str(cell))
    nb.interrupt()
    nb.until(request, cell, AGAIN)
    nb.interrupt()
    told = nb.finish(request).traceback
    assert told == ("KeyboardInterrupt: interrupted a.nap() on a gpus=0-3; a.pid() had not begun, and does not")
    assert nb.run("%interrupt a").ok().stdout == "nothing runs on a gpus=0-3\n"


def test_interrupt_says_what_it_has_ended(nb: Notebook) -> None:
    request = nb.start("left = a.nap.call(600)\nleft.get()")
    nb.until(request, Cell(), "asleep")
    nb.interrupt()
    nb.finish(request)
    assert nb.run("%interrupt a").ok().stdout == "interrupted a.nap() on a gpus=0-3\n"
    assert "KeyboardInterrupt" in nb.run("left.get()").traceback
