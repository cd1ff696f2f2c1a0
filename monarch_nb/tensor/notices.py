"""What a user hears of operations that work, but at a cost: once for each, with the line."""

import warnings

from monarch_nb.settings import settings
from monarch_nb.tensor.origin import Place, origin_of
from monarch_nb.tensor.propagation import NoRuleError, Notice, Plan, user_line
from monarch_nb.tensor.stream import Stream

__all__ = ["GatherWarning", "heed", "is_refused", "tell"]

CHOICES = ("tell", "allow", "refuse")


class GatherWarning(UserWarning):
    """An operation on sharded tensors ran on whole ones, which every process gathered. Its results are right.

    Said once for each operation of a mesh. `configure(tensor_gather="allow")` says nothing, "refuse" makes it an error.
    """


def is_refused() -> bool:
    """Whether the user wants an error instead. Raises ValueError for a setting that means nothing."""
    if settings.tensor_gather not in CHOICES:
        raise ValueError(f"tensor_gather={settings.tensor_gather!r}: one of {', '.join(map(repr, CHOICES))}")
    return settings.tensor_gather == "refuse"


def heed(stream: Stream, plan: Plan, where: Place | None) -> None:
    """Tells the notices of a plan that is to be issued. Raises NoRuleError where gathering is refused."""
    if is_refused():
        notice = plan.notices[0]
        raise NoRuleError(
            notice.operation,
            notice.text.partition(": ")[2],
            'Redistribute its inputs yourself, or allow it: monarch.config.configure(tensor_gather="tell")',
            user_line(),
        )
    for notice in plan.notices:
        tell(stream, notice, where)


def tell(stream: Stream, notice: Notice, where: Place | None) -> None:
    """A warning at the user's line, once for each operation of a mesh."""
    if notice.operation in stream.noticed or settings.tensor_gather == "allow":
        return
    stream.noticed.add(notice.operation)
    origin = origin_of(where)
    if origin is None:
        warnings.warn(notice.text, GatherWarning, stacklevel=2)
    else:
        warnings.warn_explicit(notice.text, GatherWarning, origin.file, origin.line)
