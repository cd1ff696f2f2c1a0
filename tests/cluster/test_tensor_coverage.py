"""PyTorch's own samples on sharded tensors: never a wrong value."""

import pytest
import torch

from tests.cluster.opinfo_mesh import outcomes

# What plain DTensor gets wrong or refuses, and what all programs use.
SMOKE = ("nn.functional.conv2d", "nn.functional.cross_entropy", "nn.functional.linear", "polar", "quantile", "short")


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
