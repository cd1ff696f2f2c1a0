"""examples/pipeline.ipynb, executed where nobody can type: queues are full before slow trainers, and then empty."""

import re

import pytest

from tests.notebook.examples import Example
from tests.notebook.notebook import Notebook

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(300)]


def shares(text: str) -> dict[str, int]:
    return {name: int(share) for name, share in re.findall(r"^(\w+) +(\d+)%", text, re.MULTILINE)}


def test_whoever_is_slow_makes_the_others_wait(fresh: Notebook) -> None:
    pytest.importorskip("duckdb", reason="NOT TESTED HERE: the example asks DuckDB")
    example = Example("pipeline.ipynb").run(fresh)
    slow, fast = shares(example.text("slow")), shares(example.text("fast"))
    assert slow["queues"] > 50 > fast["queues"], (slow, fast)
    assert slow["makers"] < slow["trainers"], slow
    assert fast["trainers"] < fast["makers"], fast
    learnt = re.search(r"error of a guess: (\d+) rides, then (\d+)", example.text("fast"))
    assert learnt is not None, example.text("fast")
    assert int(learnt[2]) < int(learnt[1]) / 2
