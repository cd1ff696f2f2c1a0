"""PyTorch's samples through sharded tensors as users have them: one controller, a mesh of two processes.

`python -m tests.cluster.opinfo_mesh RESULTS [NAME,NAME…] [SAMPLES]` runs all operations ("" for the names), or these,
each with one sample or as many: a line of JSON for each. It takes ten minutes, and 3 GB of memory.
"""

import json
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import Replicate

import monarch_nb
from monarch_nb.actor import this_host
from monarch_nb.distributed import Mesh, MeshTensor
from tests.cluster import opinfo_cases as cases

PATIENCE = 40  # seconds for one case


class Hung(BaseException):
    """A case did not end."""


def engine_of(mesh: Mesh) -> cases.Engine:
    def place(tensor: torch.Tensor, placement: Any) -> torch.Tensor:
        if placement.is_partial():
            return monarch_nb.distribute(tensor, mesh, [Replicate()]).redistribute([placement])
        return monarch_nb.distribute(tensor, mesh, [placement])

    return cases.Engine(
        place,
        lambda tensor: tensor.full_tensor() if isinstance(tensor, MeshTensor) else tensor,
    )


def outcomes(
    names: Iterable[str] = (),
    kinds: Iterable[str] = tuple(cases.SIZES),
    count: int = 1,
    told_of: Callable[[str, dict[str, str]], object] | None = None,
) -> dict[str, dict[str, str]]:
    """Outcome by operation and case, of all operations or of these. A case that hangs costs a new mesh."""

    def expired(*_: Any) -> None:
        raise Hung

    wanted = set(names)
    previous = signal.signal(signal.SIGALRM, expired)
    procs = mesh = engine = None
    found: dict[str, dict[str, str]] = {}
    try:
        for op in cases.operations():
            name = cases.name_of(op)
            if wanted and name not in wanted:
                continue
            for kind in kinds:
                try:
                    samples = cases.samples_of(op, kind, count)
                except Exception as error:
                    samples = []
                    print(name, kind, error, file=sys.stderr)
                for word, placement in cases.PLACEMENTS.items():
                    if mesh is None:
                        procs = this_host().spawn_procs(per_host={"gpus": 2}, name="coverage")
                        mesh = Mesh.of(procs, ("data",))
                        engine = engine_of(mesh)
                    assert engine is not None
                    signal.alarm(PATIENCE + count)
                    told = "" if samples else "no sample"
                    try:
                        for sample in samples:
                            each = cases.outcome(op, sample, placement, engine)
                            told = each if told in ("", "ok") or ("WRONG" in each and "WRONG" not in told) else told
                    except Hung:
                        told = "HUNG"
                        assert procs is not None
                        procs.stop().get(30)
                        mesh = None
                    finally:
                        signal.alarm(0)
                    found.setdefault(name, {})[f"{kind} {word}"] = told
            if told_of is not None:
                told_of(name, found[name])
    finally:
        signal.signal(signal.SIGALRM, previous)
        if mesh is not None and procs is not None:
            procs.stop().get(30)
    return found


if __name__ == "__main__":
    begun = time.time()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with Path(sys.argv[1]).open("w", buffering=1) as file:
        results = outcomes(
            sys.argv[2].split(",") if sys.argv[2:] and sys.argv[2] else (),
            count=int(sys.argv[3]) if sys.argv[3:] else 1,
            told_of=lambda name, by: file.write(json.dumps([name, by]) + "\n"),
        )
    right = [name for name, by in results.items() if all(told == "ok" for told in by.values())]
    wrong = [name for name, by in results.items() if any("WRONG" in told for told in by.values())]
    print(f"{len(right)} of {len(results)} right; wrong: {wrong}; {time.time() - begun:.0f} s", file=sys.stderr)
