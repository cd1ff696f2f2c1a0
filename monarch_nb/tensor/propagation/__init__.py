"""Propagation of shapes and placements through operations on sharded tensors, without data.

propagator = Propagator(MeshLayout((2,), ("data",)))
plan, tensors, scalars = propagator.plan(torch.ops.aten.mm.default, (a.meta, b.meta))
Runner(plan.program, mesh)(local_tensors, scalars)     # on every rank
"""

from typing import TYPE_CHECKING

from monarch_nb._package import lazy_names
from monarch_nb.tensor.propagation.plan import (
    DataDependentShapeError,
    NoRuleError,
    PropagationError,
    ViewWriteError,
    user_line,
)

from .execute import Redistributor, Runner, grouped_steps, has_slot, leaves, overload, split_exchanges
from .meta import OWN_VALUE, MeshLayout, Meta, OwnValue, Placements, carrier, dtensor, own_values, replicated, spec_of
from .placing import (
    GATHER,
    Measured,
    exchanging,
    finisher,
    laid_out,
    mover,
    moving,
    one_piece_each,
    placed_otherwise,
    unmeasured,
    whole,
)
from .plan import (
    Call,
    Collective,
    Finish,
    LocalStep,
    OperationPlan,
    PlanNotice,
    Redistribute,
    ResultSlot,
    Scalar,
    Slot,
    StepProgram,
    Write,
)

if TYPE_CHECKING:
    from .propagator import Propagator
else:  # workers do not need it, and planning imports half of PyTorch's compiler
    __getattr__ = lazy_names(__name__, {"propagator": ("Propagator",)})

__all__ = [
    "GATHER",
    "OWN_VALUE",
    "Call",
    "Collective",
    "DataDependentShapeError",
    "Finish",
    "LocalStep",
    "Measured",
    "MeshLayout",
    "Meta",
    "NoRuleError",
    "OperationPlan",
    "OwnValue",
    "Placements",
    "PlanNotice",
    "PropagationError",
    "Propagator",
    "Redistribute",
    "Redistributor",
    "ResultSlot",
    "Runner",
    "Scalar",
    "Slot",
    "StepProgram",
    "ViewWriteError",
    "Write",
    "carrier",
    "dtensor",
    "exchanging",
    "finisher",
    "grouped_steps",
    "has_slot",
    "laid_out",
    "leaves",
    "mover",
    "moving",
    "one_piece_each",
    "overload",
    "own_values",
    "placed_otherwise",
    "replicated",
    "spec_of",
    "split_exchanges",
    "unmeasured",
    "user_line",
    "whole",
]
