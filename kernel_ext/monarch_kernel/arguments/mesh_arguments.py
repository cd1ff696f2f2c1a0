"""`%mesh NAME gpus=4 hosts=2 --fresh --no-dedup --job slurm partition=gpu`, read into plain values."""

import ast
import difflib
import re
from typing import Any

from IPython.core.error import UsageError
from msgspec import Struct, field

from monarch_nb.job.named import arguments_of

from .words import read_dim, split_line

_JOB = re.compile(r"(?:^|\s)--job(?:\s*=\s*|\s+)(\S+)")
_CHANGE = re.compile(r"[+-][1-9]\d*")
USUAL_DIMS = ("hosts", "gpus")  # a dimension with a similar name is taken for a misspelt one


class MeshArguments(Struct, frozen=True):
    """Arguments of a %mesh line."""

    name: str
    dims: dict[str, int] = field(default_factory=dict)
    fresh: bool = False
    dedup: bool = True
    job: str = ""  # the kind of the job that has its hosts, or the name of one in monarch.toml
    arguments: dict[str, Any] = field(default_factory=dict)  # of that job
    change: tuple[str, int] | None = None  # a dimension of an existing mesh, and by how much it grows or shrinks


def read_mesh(line: str) -> MeshArguments:
    """Reads the arguments of %mesh. Raises UsageError."""
    job, parameters = "", frozenset[str]()
    if match := _JOB.search(line):
        job, line = match[1], f"{line[: match.start()]} {line[match.end() :]}"
        parameters = arguments_of(job)
    elif "--job" in line.split():
        raise UsageError("%mesh: which job? Write --job slurm, or --job and a name that monarch.toml has")
    name, words, options = split_line("%mesh NAME gpus=4", line, {"--fresh", "--no-dedup", "--job"})
    dims: dict[str, int] = {}
    arguments: dict[str, Any] = {}
    for word in words:
        label, size = read_dim(word, "gpus=4")
        if label in parameters and label not in USUAL_DIMS:
            arguments[label] = _value(size)
            continue
        usual = difflib.get_close_matches(label, USUAL_DIMS, n=1, cutoff=0.8)
        if usual and label not in USUAL_DIMS:
            raise UsageError(
                f"%mesh: the usual dimensions are called {' and '.join(USUAL_DIMS)}; did you mean {usual[0]}={size}?"
            )
        if _CHANGE.fullmatch(size) and len(words) == 1 and not job and not options:
            return MeshArguments(name, {}, change=(label, int(size)))
        if not size.isdecimal() or int(size) < 1:
            suggestions = difflib.get_close_matches(label, parameters - set(USUAL_DIMS), n=1, cutoff=0.7)
            if suggestions:
                raise UsageError(f"%mesh --job {job}: there is no {label}; did you mean {suggestions[0]}={size}?")
            raise UsageError(
                f"%mesh: {label}={size} is not a size: write a whole number of at least 1, as in {label}=4"
            )
        if label in dims:
            raise UsageError(f"%mesh: {label} is given twice")
        dims[label] = int(size)
    return MeshArguments(name, dims, "--fresh" in options, "--no-dedup" not in options, job, arguments)


def _value(text: str) -> object:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):  # 1:00:00, 64G, gpu
        return text
