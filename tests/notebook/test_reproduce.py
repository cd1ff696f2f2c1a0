"""`%reproduce` runs a failed call of a rank again in the kernel, where `%debug` and IPython's debugger look into it."""

import os
import signal
from collections.abc import Iterator

import pytest

from tests.notebook.debug_tools import Debugged
from tests.notebook.notebook import ANSI, Cell

pytestmark = pytest.mark.timeout(180)

ACTORS = """
import os, time
import monarch.debug
from monarch.actor import Actor, current_rank, endpoint
class Divider(Actor):
    def __init__(self, kernel):
        self.kernel, self.shift, self.names = kernel, 1, (name for name in "ab")
    @endpoint
    def divide(self, x):
        scaled = x * 2
        return scaled / (current_rank().rank - self.shift)
    @endpoint
    def elsewhere(self):
        if os.getpid() != self.kernel:
            raise OSError("not in the kernel")
        return "fine"
    @endpoint
    def pid(self):
        return os.getpid()
    @endpoint
    def sleep(self):
        time.sleep(60)
class Fetcher(Actor):
    @endpoint
    async def fetch(self, name):
        wanted = name.upper()
        raise LookupError(wanted)
%mesh w gpus=2
dividers = w.spawn("dividers", Divider, os.getpid())
fetchers = w.spawn("fetchers", Fetcher)
pids = dividers.pid.call().get().values()
"""


@pytest.fixture(scope="module")
def nb() -> Iterator[Debugged]:
    notebook = Debugged()
    try:
        notebook.run(ACTORS).ok()
        yield notebook
    finally:
        notebook.close()


@pytest.mark.slow
def test_error_is_raised_in_the_kernel_and_opened_by_debug(nb: Debugged) -> None:
    assert nb.run("dividers.divide.call(3).get()").error is not None
    cell = nb.run("%reproduce")
    assert cell.error is not None
    assert cell.error["ename"] == "ZeroDivisionError"
    assert "This is divide() of gpus=1 of dividers, run again here." in cell.traceback
    assert "self.names, a builtins.generator" in cell.traceback
    talk = nb.talk("%debug", "p (scaled, self.shift + 0)", "p self.shift", "q")
    assert talk.prompts[0] == "ipdb> "
    assert "(6, 1)\n1\n" in talk.cell.stdout
    assert nb.run("%mpm").ok().text, "the frames of the rank are there as well"
    nb.run("monarch.debug.resume()").ok()


def test_step_stops_at_the_first_line_of_the_method(nb: Debugged) -> None:
    nb.run("try: dividers.divide.call(4).get()\nexcept Exception as e: error = e").ok()
    talk = nb.talk("%reproduce error --step", "p x", "n", "p scaled", "c")
    assert talk.cell.error is not None
    assert talk.cell.error["ename"] == "ZeroDivisionError"
    assert "scaled = x * 2" in ANSI.sub("", talk.cell.stdout)
    assert talk.cell.stdout.endswith("8\n")
    assert nb.talk("%reproduce error --step", "q").cell.error is None
    assert "there is no prompt here" in nb.run("%reproduce error --step").stderr


def test_async_method_is_run_and_stepped_into(nb: Debugged) -> None:
    nb.run("try: fetchers.fetch.call('a').get()\nexcept Exception as e: error = e").ok()
    cell = nb.run("%reproduce error")
    assert cell.error is not None
    assert cell.error["ename"] == "LookupError"
    talk = nb.talk("%reproduce error --step", "p name", "n", "p wanted", "c")
    assert "'A'" in talk.cell.stdout
    assert talk.cell.error is not None


def test_failure_that_does_not_happen_again_says_what_differs(nb: Debugged) -> None:
    nb.run("try: dividers.elsewhere.call().get()\nexcept Exception as e: error = e").ok()
    cell = nb.run("%reproduce error --rank 1").ok()
    assert cell.text == "'fine'"
    assert "elsewhere() of gpus=1 of dividers did not fail again here. What differs: " in cell.stderr


def test_interrupt_ends_the_wait_for_a_busy_rank(nb: Debugged) -> None:
    nb.run("future = dividers.sleep.call()").ok()
    request = nb.start("print('begun')\n%reproduce error")
    nb.until(request, Cell(), "begun")
    nb.interrupt()
    cell = nb.finish(request)
    assert cell.error is not None
    assert cell.error["ename"] == "KeyboardInterrupt"
    nb.run("%interrupt dividers").ok()
    assert nb.run("future.get()").error is not None
    assert "did not fail again here" in nb.run("%reproduce error").ok().stderr


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("%reproduce pids", "pids is a list, and no ActorError"),
        ("%reproduce error other", "takes the name of one error, or none"),
        ("%reproduce error --limit much", "%reproduce --limit much: write a number of bytes, such as 512M or 2G"),
        ("%reproduce error --limit 1K", "more than 1,024 bytes"),
        ("%reproduce error --rank 7", "rank 7 has not raised in this call; these have: 0-1"),
        ("%reproduce --fast", "%reproduce knows no option --fast"),
    ],
)
def test_mistyped_lines_are_explained(nb: Debugged, line: str, text: str) -> None:
    assert text in nb.run(line).stderr


def test_completion_offers_errors_and_options(nb: Debugged) -> None:
    matches = set(nb.complete("%reproduce "))
    assert {"error", "--step", "--rank", "--limit"} <= matches
    assert "pids" not in matches


@pytest.mark.last
def test_dead_rank_is_named(nb: Debugged) -> None:
    nb.run("try: dividers.divide.call(3).get()\nexcept Exception as e: error = e").ok()
    os.kill(int(nb.run("pids[1]").text), signal.SIGKILL)
    assert "gpus=1 of dividers has failed since: its state, and the arguments" in nb.run("%reproduce error").stderr
