"""examples/data_loading.ipynb, executed where nobody can type: a query's rows train a model on two ranks."""

import re

import pytest

from tests.notebook.examples import Example
from tests.notebook.notebook import Notebook

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(180)]


def test_a_query_trains_a_model_and_an_interrupted_run_resumes(fresh: Notebook) -> None:
    pytest.importorskip("duckdb", reason="NOT TESTED HERE: the example asks DuckDB")
    example = Example("data_loading.ipynb").run(fresh)
    text = example.text("found")
    match = re.search(r"takes (\d\.\d) minutes, (\d\.\d) for each km, and (\d\.\d) for each mm", text)
    assert match is not None, text
    assert all(abs(float(got) - true) < 0.4 for got, true in zip(match.groups(), (2, 4, 1.5), strict=True)), match[0]
    assert "<Feed, step" in example.text("pass")
    assert example.text("half").startswith("({'rows': 9000}, ")
    assert example.text("half").endswith(", True)")
