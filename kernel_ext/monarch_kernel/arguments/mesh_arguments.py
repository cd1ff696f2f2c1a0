"""`%mesh NAME gpus=4 hosts=2 --fresh --no-dedup`, read into plain values."""

import difflib

from IPython.core.error import UsageError
from msgspec import Struct, field

from .words import read_dim, split_line

USUAL_DIMS = ("hosts", "gpus")  # what almost everybody means by a dimension of a similar name


class MeshArguments(Struct, frozen=True):
    """What a line asks %mesh for."""

    name: str
    dims: dict[str, int] = field(default_factory=dict)
    fresh: bool = False
    dedup: bool = True


def read_mesh(line: str) -> MeshArguments:
    """Reads the arguments of %mesh. Raises UsageError."""
    name, words, options = split_line("%mesh NAME gpus=4", line, {"--fresh", "--no-dedup"})
    dims: dict[str, int] = {}
    for word in words:
        label, size = read_dim(word, "gpus=4")
        usual = difflib.get_close_matches(label, USUAL_DIMS, n=1, cutoff=0.8)
        if usual and label not in USUAL_DIMS:
            raise UsageError(
                f"%mesh: the usual dimensions are called {' and '.join(USUAL_DIMS)}; did you mean {usual[0]}={size}?"
            )
        if not size.isdecimal() or int(size) < 1:
            raise UsageError(
                f"%mesh: {label}={size} is not a size: write a whole number of at least 1, as in {label}=4"
            )
        if label in dims:
            raise UsageError(f"%mesh: {label} is given twice")
        dims[label] = int(size)
    return MeshArguments(name, dims, "--fresh" in options, "--no-dedup" not in options)
