"""PyTorch's own samples on sharded tensors: never a wrong value."""

import pytest
import torch

from tests.cluster.opinfo_mesh import outcomes
from tests.cluster.opinfo_page import PAGE, page, read, sorted_out

# What plain DTensor gets wrong or refuses, and what all programs use.
SMOKE = (
    "nn.functional.conv2d",
    "nn.functional.cross_entropy",
    "nn.functional.linear",
    "norm.inf",
    "polar",
    "quantile",
    "short",
)


def test_the_page_lists_every_operation_once_and_most_of_them_as_right() -> None:
    listed = read(PAGE.read_text())
    assert len(listed.right) >= 640
    assert not listed.right & listed.refused
    assert not (listed.right | listed.refused) & listed.untried
    assert set(SMOKE) <= listed.right


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.filterwarnings("ignore")  # PyTorch's samples warn of what they try
def test_what_plain_dtensor_gets_wrong_is_right_for_uneven_shards() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = outcomes(SMOKE, ("uneven",))
    finally:
        torch.set_num_threads(threads)
    assert {name: by for name, by in found.items() if set(by.values()) != {"ok"}} == {}
    assert found.keys() == set(SMOKE)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore")
def test_no_operation_gives_a_wrong_value_and_the_page_is_what_was_found() -> None:
    found = outcomes()
    wrong = {
        (name, case): told
        for name, by in found.items()
        for case, told in by.items()
        if "WRONG" in told or told == "HUNG"
    }
    assert wrong == {}
    assert sorted_out(found) == read(PAGE.read_text()), page(found)
