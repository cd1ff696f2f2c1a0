"""PyTorch's own samples on sharded tensors: never a wrong value."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.opinfo_page import PAGE, Results, page, read, results_of, sorted_out

# Operations that plain DTensor gets wrong or refuses, that were wrong here, or that all programs use.
SMOKE = (
    "_segment_reduce.offsets",
    "gather",
    "index_put",
    "nn.functional.avg_pool1d",
    "nn.functional.cross_entropy",
    "nn.functional.instance_norm",
    "nn.functional.linear",
    "polar",
    "quantile",
    "scatter_reduce.mean",
)


def results(path: Path, *arguments: str) -> Results:
    """In a process of its own, since ranks are threads of it: a sample may end it."""
    subprocess.run([sys.executable, "-m", "tests.cluster.opinfo_all", str(path), *arguments], check=True)
    return results_of([str(path)])


def wrong(outcomes: Results) -> dict[tuple[str, str], list[str]]:
    return {
        (name, case): result["wrong"]
        for name, outcome in outcomes.items()
        for case, result in outcome["cases"].items()
        if result["wrong"]
    }


def test_the_page_lists_every_operation_once_and_most_as_right() -> None:
    listed = read(PAGE.read_text())
    assert len(listed.right) >= 640
    assert not listed.right & listed.refused
    assert not (listed.right | listed.refused) & listed.untried


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_results_that_plain_dtensor_gets_wrong_are_right_for_uneven_shards(tmp_path: Path) -> None:
    outcomes = results(tmp_path / "results", ",".join(SMOKE), "2", "uneven")
    assert outcomes.keys() == set(SMOKE)
    assert wrong(outcomes) == {}
    assert sorted_out(outcomes).refused <= {"index_put"}  # with a mask, the gradient of its values depends on values
    assert all(any(case["right"] for case in outcome["cases"].values()) for outcome in outcomes.values())


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_operation_gives_a_wrong_value_or_refuses_what_docs_promise(tmp_path: Path) -> None:
    outcomes = results(tmp_path / "results", "", "1", "uneven")
    assert wrong(outcomes) == {}
    assert sorted_out(outcomes).refused <= read(PAGE.read_text()).refused, page(outcomes)
