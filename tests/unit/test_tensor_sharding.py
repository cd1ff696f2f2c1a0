"""The meaning of a sharding spec, and the line that is named as the origin of an operation."""

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from monarch_nb.tensor.errors import call_site, origin_of
from monarch_nb.tensor.propagation import MeshLayout
from monarch_nb.tensor.sharding import placements_of

pytestmark = pytest.mark.timeout(60)

GRID = MeshLayout((4, 2), ("data", "model"))


@pytest.mark.parametrize(
    ("spec", "placements"),
    [
        (None, (Replicate(), Replicate())),
        ([None, None], (Replicate(), Replicate())),
        (["data", None], (Shard(0), Replicate())),
        ([None, "data"], (Shard(1), Replicate())),
        (["model", "data"], (Shard(1), Shard(0))),
        ([("data", "model"), None], (Shard(0), Shard(0))),
        ([Shard(-1), Replicate()], (Shard(1), Replicate())),
        ([Replicate(), Partial()], (Replicate(), Partial())),
    ],
)
def test_a_spec_names_the_mesh_dimension_of_each_cut_dimension(spec: object, placements: object) -> None:
    assert placements_of(spec, GRID, 2) == placements


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (["data"], "1 entry, but the tensor has 2"),
        (["rows", None], "no dimension 'rows'; it has 'data', 'model'"),
        (["data", "data"], "'data' shards two dimensions"),
        ([("model", "data"), None], "the outer one is cut first"),
        ([Shard(0)], "1 placements for a mesh of 2 dimensions"),
        ([Shard(2), Replicate()], "dimension 2 of a tensor that has 2"),
    ],
)
def test_a_spec_that_does_not_fit_says_why(spec: object, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        placements_of(spec, GRID, 2)


def test_a_spec_of_something_else_is_refused() -> None:
    with pytest.raises(TypeError, match="neither a mesh dimension"):
        placements_of([3, None], GRID, 2)


def test_the_origin_is_the_innermost_line_outside_of_libraries() -> None:
    def line_of(x: object) -> object:
        return call_site()

    origin = origin_of(torch.utils._pytree.tree_map(line_of, 1))
    assert origin is not None
    assert origin.source == "return call_site()"
    assert origin.file == __file__
    assert str(origin).splitlines()[1].strip() == "return call_site()"
