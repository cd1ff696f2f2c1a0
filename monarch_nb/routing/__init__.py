"""Sans-I/O routing: links, order, casts, membership. Events go in, actions come out; no clock, thread or socket."""

from monarch_nb.routing.actions import (
    PREFIX,
    PREFIX_SIZE,
    Acked,
    Action,
    Deliver,
    Failed,
    LinkConfig,
    LinkState,
    NewLife,
    PrefixKind,
    Skipped,
    Transmit,
    Unblocked,
)
from monarch_nb.routing.cast import Branch, Delivery, Expansion, below, expand, indices, plan_cast, size_of
from monarch_nb.routing.fold import Batch, Fold, Lost
from monarch_nb.routing.link import Link
from monarch_nb.routing.membership import Expired, Hop, Leases, NoRoute, Responsiveness, Routes, Silence
from monarch_nb.routing.order import Gap, Inbox, InboxOverflow, InboxStats, Outbox

__all__ = [
    "PREFIX",
    "PREFIX_SIZE",
    "Acked",
    "Action",
    "Batch",
    "Branch",
    "Deliver",
    "Delivery",
    "Expansion",
    "Expired",
    "Failed",
    "Fold",
    "Gap",
    "Hop",
    "Inbox",
    "InboxOverflow",
    "InboxStats",
    "Leases",
    "Link",
    "LinkConfig",
    "LinkState",
    "Lost",
    "NewLife",
    "NoRoute",
    "Outbox",
    "PrefixKind",
    "Responsiveness",
    "Routes",
    "Silence",
    "Skipped",
    "Transmit",
    "Unblocked",
    "below",
    "expand",
    "indices",
    "plan_cast",
    "size_of",
]
