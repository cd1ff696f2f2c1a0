"""Trains all models in all ways, and writes docs/models.md: `python -m tests.models [MODEL ...]`.

With names of models it writes nothing, and prints the results.
"""

import copy
import sys
from dataclasses import asdict

import torch

from monarch_nb.actor import this_host
from monarch_nb.distributed import Mesh
from tests.models.page import PAGE, page
from tests.models.training import PARALLEL, Outcome, compare, course, module_and_batch
from tests.models.zoo import MODELS


def outcomes(names: list[str]) -> dict[str, dict[str, Outcome]]:
    mesh = Mesh.of(this_host().spawn_procs(per_host={"data": 2, "model": 2}, name="models"))
    results: dict[str, dict[str, Outcome]] = {}
    for name in names:
        model = MODELS[name]
        module, batch = module_and_batch(model)
        local = course(model, copy.deepcopy(module), batch)
        results[name] = {}
        for parallel in PARALLEL:
            results[name][parallel] = run = compare(model, mesh, parallel, local)
            print(f"{name:>14}  {parallel:<24} {'equal' if run.is_equal() else 'DIFFERS'}  {asdict(run)}", flush=True)
    mesh.stop().get(40)
    return results


if __name__ == "__main__":
    import transformers

    torch.set_num_threads(1)
    results = outcomes(sys.argv[1:] or [*MODELS])
    if not sys.argv[1:]:
        versions = f"PyTorch {torch.__version__.partition('+')[0]} and Transformers {transformers.__version__}"
        PAGE.write_text(page(results, versions))
    sys.exit(not all(outcome.is_equal() for ways in results.values() for outcome in ways.values()))
