"""Warnings about operations that work at a cost, once for each operation, with the line of the program."""

import warnings

from monarch_nb.settings import settings
from monarch_nb.tensor.origin import CallSite, origin_of
from monarch_nb.tensor.propagation import NoRuleError, OperationPlan, PlanNotice, user_line
from monarch_nb.tensor.stream import Stream

CHOICES = ("warn", "allow", "refuse")
FORMER = "tell"  # the name of "warn" in 0.1.0


class GatherWarning(UserWarning):
    """An operation on sharded tensors gathered them on every process. Its results are correct.

    Issued once for each operation of a mesh. `configure(tensor_gather="allow")` silences it, "refuse" raises.
    """


def is_refused() -> bool:
    """Returns whether the setting `tensor_gather` refuses gathering. Raises ValueError for an unknown value."""
    if settings.tensor_gather not in (*CHOICES, FORMER):
        raise ValueError(f"tensor_gather={settings.tensor_gather!r}: one of {', '.join(map(repr, CHOICES))}")
    return settings.tensor_gather == "refuse"


def check_notices(stream: Stream, plan: OperationPlan, where: CallSite | None) -> None:
    """Issues the warnings of a plan. Raises NoRuleError if gathering is refused."""
    if is_refused():
        notice = plan.notices[0]
        raise NoRuleError(
            notice.operation,
            notice.text.partition(": ")[2],
            'Redistribute its inputs yourself, or allow it: monarch.config.configure(tensor_gather="warn")',
            user_line(),
        )
    for notice in plan.notices:
        warn_once(stream, notice, where)


def warn_once(stream: Stream, notice: PlanNotice, where: CallSite | None) -> None:
    """Warns at the user's line, once for each operation of a mesh."""
    if notice.operation in stream.noticed or settings.tensor_gather == "allow":
        return
    stream.noticed.add(notice.operation)
    origin = origin_of(where)
    if origin is None:
        warnings.warn(notice.text, GatherWarning, stacklevel=2)
    else:
        warnings.warn_explicit(notice.text, GatherWarning, origin.file, origin.line)
