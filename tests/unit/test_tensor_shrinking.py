"""The slice that remains of a mesh that has lost ranks."""

import pytest

from monarch_nb.tensor.mesh import largest_slice

pytestmark = pytest.mark.timeout(20)


@pytest.mark.parametrize(
    ("sizes", "lost", "expected"),
    [
        ({"dp": 4, "tp": 2}, [{"dp": 3, "tp": 1}], {"dp": range(3), "tp": range(2)}),
        ({"dp": 2, "tp": 2}, [{"dp": 0, "tp": 1}], {"dp": range(1, 2), "tp": range(2)}),  # the outermost gives way
        ({"dp": 2, "tp": 4}, [{"dp": 1, "tp": 0}], {"dp": range(2), "tp": range(1, 4)}),
        ({"dp": 6}, [{"dp": 1}, {"dp": 3}], {"dp": range(0, 6, 2)}),  # every second is more than any run
        ({"dp": 4, "tp": 4}, [{"dp": 3, "tp": 0}, {"dp": 0, "tp": 3}], {"dp": range(3), "tp": range(3)}),
        ({"dp": 8, "tp": 2}, [{"dp": n, "tp": 1} for n in range(8)], {"dp": range(8), "tp": range(1)}),
    ],
)
def test_the_largest_slice_without_the_lost_ranks_is_kept(
    sizes: dict[str, int], lost: list[dict[str, int]], expected: dict[str, range]
) -> None:
    assert {label: list(indices) for label, indices in largest_slice(sizes, lost).items()} == {
        label: list(indices) for label, indices in expected.items()
    }


def test_nothing_is_left_of_a_mesh_all_of_which_is_lost() -> None:
    with pytest.raises(ValueError, match="nothing is left"):
        largest_slice({"dp": 1, "tp": 2}, [{"dp": 0, "tp": 0}, {"dp": 0, "tp": 1}])
