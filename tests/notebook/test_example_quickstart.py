"""examples/quickstart.ipynb, executed where nobody can type: it loses a process, goes on, and reaches its accuracy."""

import re

import pytest

from tests.notebook.examples import Example
from tests.notebook.notebook import Notebook

pytestmark = [pytest.mark.long, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def example(blank: Notebook) -> Example:
    return Example("quickstart.ipynb").run(blank)


def test_the_quickstart_ends_above_95_percent_of_test_accuracy(example: Example) -> None:
    text = example.text("result")
    match = re.search(r"test accuracy +([\d.]+)%", text)
    assert match is not None, text
    assert float(match[1]) > 95
    assert re.search(r"kill to healed +[1-9]\d* ms", text), text


def test_the_failure_names_mesh_rank_host_signal_and_the_way_out(example: Example) -> None:
    assert {name: cell.error["ename"] for name, cell in example.shown.items() if cell.error} == {
        "kill": "SupervisionError"
    }
    text = example.shown["kill"].traceback
    assert re.search(r"mesh +trainers, gpus=2", text)
    assert re.search(r"host +\w+, pid \d+", text)
    assert "signal 9 (SIGKILL)" in text
    assert "heal_mesh(trainers)" in text
    assert "monarch_nb" not in text  # without the engine's own frames
    assert text.count("SIGKILL") <= 3, "told once"


def test_one_process_is_new_after_the_heal_and_three_remain(example: Example) -> None:
    before, after = (
        [int(pid) for pid in re.findall(r": (\d+)$", example.shown[cell].text, re.MULTILINE)]
        for cell in ("spawn", "heal")
    )
    assert len(before) == len(after) == 4
    assert [rank for rank in range(4) if before[rank] != after[rank]] == [2]


def test_nothing_is_written_to_the_stream_of_errors(example: Example) -> None:
    assert [cell.stderr for cell in example.shown.values() if cell.stderr] == []
