"""Trains all models in all ways, and writes docs/models.md: `python -m tests.models [MODEL ...]`.

With names of models it writes nothing, and prints what it finds.
"""

import copy
import sys
from dataclasses import asdict

import torch

from monarch_nb.actor import this_host
from monarch_nb.distributed import Mesh
from tests.models.page import PAGE, page
from tests.models.training import PARALLEL, Outcome, compared, course, module_and_batch
from tests.models.zoo import MODELS


def outcomes(names: list[str]) -> dict[str, dict[str, Outcome]]:
    mesh = Mesh.of(this_host().spawn_procs(per_host={"data": 2, "model": 2}, name="models"))
    found: dict[str, dict[str, Outcome]] = {}
    for name in names:
        model = MODELS[name]
        module, batch = module_and_batch(model)
        wanted = course(model, copy.deepcopy(module), batch)
        found[name] = {}
        for parallel in PARALLEL:
            found[name][parallel] = one = compared(model, mesh, parallel, wanted)
            print(f"{name:>14}  {parallel:<24} {'equal' if one.is_equal() else 'DIFFERS'}  {asdict(one)}", flush=True)
    mesh.stop().get(40)
    return found


if __name__ == "__main__":
    import transformers

    torch.set_num_threads(1)
    found = outcomes(sys.argv[1:] or [*MODELS])
    if not sys.argv[1:]:
        versions = f"PyTorch {torch.__version__.partition('+')[0]} and Transformers {transformers.__version__}"
        PAGE.write_text(page(found, versions))
    sys.exit(not all(one.is_equal() for by in found.values() for one in by.values()))
