"""Printed lines of ranks, and the display of a wait."""

import re
from pathlib import Path

import pytest

from tests.notebook.notebook import Cell, Notebook

pytestmark = pytest.mark.timeout(120)


def ranks(text: str, line: str, rest: str = "") -> list[int]:
    """The ranks for which a line is shown, or one that begins so and matches the pattern."""
    numbers: list[int] = []
    for spans in re.findall(rf"\[(?:w )?gpus=([\d,-]+)\] {re.escape(line)}{rest}$", text, re.MULTILINE):
        for span in spans.split(","):
            first, _, last = span.partition("-")
            numbers += range(int(first), int(last or first) + 1)
    return sorted(numbers)


def test_equal_lines_are_shown_once_with_their_ranks(nb: Notebook) -> None:
    cell = nb.run("%%on w\nprint('same')\nprint('rank', rank)").ok()
    assert ranks(cell.stdout, "same") == [0, 1, 2, 3]
    assert cell.stdout.count("same") < 4
    assert [ranks(cell.stdout, f"rank {rank}") for rank in range(4)] == [[0], [1], [2], [3]]


def test_lines_of_an_endpoint_come_before_later_prints_of_the_cell(nb: Notebook) -> None:
    for _ in range(5):
        cell = nb.run("a.work.call(0, 'from the rank').get()\nprint('from the cell')").ok()
        assert ranks(cell.stdout, "from the rank") == [0, 1, 2, 3]
        assert cell.stdout.splitlines()[-1] == "from the cell"


def test_lines_of_a_finished_call_come_before_its_wait_returns(nb: Notebook) -> None:
    for wait in ("future.get()", "await future"):
        begin = "import time\nfuture = a.work.call(0, 'from the rank')\n"
        ready = "while not future.done(): time.sleep(0.001)\n"  # lines are shown a moment after they came
        cell = nb.run(f"{begin}{ready}{wait};\nprint('from the cell')").ok()
        assert ranks(cell.stdout, "from the rank") == [0, 1, 2, 3]
        assert cell.stdout.splitlines()[-1] == "from the cell"


def test_lines_do_not_land_in_the_next_cell(nb: Notebook) -> None:
    for number in range(5):
        first = nb.run(f"future = a.work.call(0, 'number {number}')\nfuture.get();").ok()
        second = nb.run("print('next')").ok()
        assert ranks(first.stdout, f"number {number}") == [0, 1, 2, 3]
        assert second.stdout == "next\n"


def test_lines_stream_while_a_cell_runs(nb: Notebook, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    wait = f"while not os.path.exists({str(gate)!r}):\n    time.sleep(0.01)\n"
    request = nb.start(f"%%on w gpus=0\nimport os, time\nprint('early')\n{wait}print('late')")
    cell = nb.until(request, Cell(), "early")
    assert "late" not in cell.stdout
    gate.touch()
    assert "late" in nb.finish(request).ok().stdout


def test_progress_appears_after_two_seconds_names_who_is_missing_and_goes(nb: Notebook, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    wait = f"while rank == 2 and not os.path.exists({str(gate)!r}):\n    time.sleep(0.01)\n"
    request = nb.start(f"%%on w\nimport os, time\n{wait}rank")
    shown = nb.until(request, Cell(), "3 of 4 ranks have answered")
    gate.touch()
    cell = nb.finish(request).ok()
    assert len(shown.displays) == 1
    assert cell.displays == []
    assert "missing: gpus=2" in (shown.displays + shown.updates)[-1]["text/plain"]
    assert cell.updates[-1] == {"text/plain": "", "text/html": ""}


def test_short_waits_show_no_progress(nb: Notebook) -> None:
    cell = nb.run("a.work.call(0.5).get()").ok()
    assert cell.displays == cell.updates == []


def test_await_and_get_give_the_same_without_warnings(nb: Notebook) -> None:
    awaited = nb.run("(await a.work.call()).values()").ok()
    waited = nb.run("a.work.call().get().values()").ok()
    assert awaited.text == waited.text == "[0, 1, 2, 3]"
    assert awaited.stderr == waited.stderr == ""


def test_a_class_redefined_in_a_cell_is_used_for_new_actors(nb: Notebook) -> None:
    source = (
        "from monarch.actor import *\nclass Greeter(Actor):\n    @endpoint\n    def greet(self):\n        return '{}'\n"
    )
    spawn = "w.spawn('greeters', Greeter).greet.call().get().get(0)"
    assert nb.run(source.format("hello") + spawn).ok().text == "'hello'"
    assert nb.run(source.format("welcome") + spawn).ok().text == "'welcome'"


def test_displays_are_html_tables_and_plain_text(nb: Notebook) -> None:
    shown = nb.run("a").ok()
    assert "Worker mesh 'a'" in shown.text
    assert shown.html.count('class="mnb-idle"') == 4
    values = nb.run("a.work.call().get()").ok()
    assert values.html.count("<tr>") == 5
    assert "gpus=0-3" in nb.run("a.divide.call(2).get()").ok().html
    assert "pending" in nb.run("a.work.call(3)").ok().html
    arrays = nb.run("import numpy\nw.run(lambda: numpy.ones((100, 3))).get()").ok()
    assert "array (100, 3) float64: min 1, max 1, mean 1" in arrays.html
    assert arrays.html.count("array (100, 3)") == 1
    assert "<script" not in shown.html


def test_output_of_a_mesh_can_be_switched_off_and_gathered(nb: Notebook) -> None:
    nb.run("%mesh quiet gpus=2").ok()
    nb.run("await quiet.logging_option(stream_to_client=False)").ok()
    assert nb.run("%%on quiet\nprint('unheard')").ok().stdout == ""
    nb.run("await quiet.logging_option(stream_to_client=True, aggregate_window_sec=60)").ok()
    cell = nb.run("for i in range(3):\n    quiet.run(print, 'again').get()").ok()
    assert cell.stdout == "[quiet gpus=0-1] again (6 times)\n"
    nb.run("%stop quiet").ok()


def test_the_last_words_of_a_mesh_appear_in_the_stopping_cell(nb: Notebook) -> None:
    source = "from monarch.actor import *\nclass Last(Actor):\n"
    source += "    def __cleanup__(self, error):\n        print('last words')\n"
    nb.run(
        source + "gone = this_host().spawn_procs(name='gone')\nlast = gone.spawn('last', Last)\nlast.initialized.get()"
    ).ok()
    assert "last words" in nb.run("gone.stop().get()").ok().stdout
