"""docs/models.md, from what trainings of the models gave."""

import re
from collections.abc import Mapping
from pathlib import Path

from tests.models.training import PARALLEL, STEPS, Outcome
from tests.models.zoo import MODELS

PAGE = Path(__file__).parents[2] / "docs" / "models.md"

HEAD = f"""# Models that were trained on a mesh

Each of these models is trained for {STEPS} steps by one process, and for {STEPS} steps on a mesh of 2×2 processes, from
the same weights and on the same batch: the loss, its gradients, `clip_grad_norm_`, AdamW. The losses and the norms of
all gradients of each step are compared, and all parameters after the last step. The models are built by their
libraries, small and with random weights; those of Transformers are built from a configuration. No model is changed for
the mesh.

"""

TABLE = """
*Data* replicates the parameters and shards the batch in four; *fully sharded* also shards the parameters in four.
*Tensor* applies the plan of the second column over two processes; *data + tensor* also shards the batch in two, and
*fully sharded + tensor* the parameters in two as well. The numbers are the largest relative difference of a loss.

"""

GATHERED = """
## Gathered operations

If PyTorch cannot compute an operation on shards, or if a model needs whole tensors, the operation runs on whole
tensors: the result is correct, and a `GatherWarning` at the line says so.

| model | operations |
|---|---|
"""

END = """
`make models` writes this page. `make test-slow` trains all of these models and compares the results with
this page; `make test` trains a few. It also compares PyTorch's own modules on a mesh with themselves, on PyTorch's own
samples: forward and backward, in training and evaluation mode, replicated and sharded.
"""


def page(outcomes: Mapping[str, Mapping[str, Outcome]], versions: str) -> str:
    """The text of the page."""
    trainings = [outcome for ways in outcomes.values() for outcome in ways.values()]
    equal = sum(outcome.is_equal() for outcome in trainings)
    verdict = "**All of them are equal**" if equal == len(trainings) else f"**{equal} of {len(trainings)} are equal**"
    text = HEAD + f"{verdict}, up to float32 rounding, with {versions}.\n" + TABLE
    text += "| model | plan | " + " | ".join(PARALLEL) + " |\n|---|---|" + "---|" * len(PARALLEL) + "\n"
    for name, ways in outcomes.items():
        cells = (
            f"equal ({ways[way].loss:.0e})" if ways[way].is_equal() else f"**differs** ({ways[way].loss:.0e})"
            for way in PARALLEL
        )
        text += f"| {name} | {_plan(name)} | {' | '.join(cells)} |\n"
    rows = ""
    for name, ways in outcomes.items():
        gathered = sorted({operation for outcome in ways.values() for operation in outcome.gathered})
        if gathered:
            rows += f"| {name} | {', '.join(f'`{operation}`' for operation in gathered)} |\n"
    return text + (GATHERED + rows if rows else "") + END


def _plan(name: str) -> str:
    plan = MODELS[name].plan
    if isinstance(plan, str):
        return f'`"{plan}"`'
    return "<br>".join(f"`{pattern}`: `{style}`".replace("'", '"') for pattern, style in plan.items())


def read(text: str) -> dict[str, list[bool]]:
    """The content of a page: by model, whether each way of training it is equal."""
    rows = re.findall(r"^\| ([\w ]+) \| `.*?\| ((?:equal|\*\*differs).*) \|$", text, re.MULTILINE)
    return {name: [cell.strip().startswith("equal") for cell in cells.split("|")] for name, cells in rows}
