"""Sans-I/O routing: links, order, casts, routes. Events go in, actions come out; no clock, thread or socket."""

from typing import TYPE_CHECKING

from monarch_nb._package import lazy_names
from monarch_nb.routing.cast import (
    Batch,
    Branch,
    Delivery,
    Expansion,
    Fold,
    LostIndices,
    branches_below,
    expand,
    indices,
    plan_cast,
    size_of,
)
from monarch_nb.routing.order import Gap, Inbox, InboxOverflow, InboxStats, Outbox

if TYPE_CHECKING:
    from monarch_nb.routing.actions import (
        PREFIX,
        PREFIX_SIZE,
        Acked,
        Action,
        Deliver,
        Failed,
        LinkConfig,
        LinkState,
        NewIncarnation,
        PrefixKind,
        Skipped,
        Transmit,
        Unblocked,
    )
    from monarch_nb.routing.link import BROKEN_EARLY, Link
    from monarch_nb.routing.routes import (
        Hop,
        Incarnations,
        LinkIncarnations,
        NoRoute,
        RoutingTable,
        first_link_incarnation,
        new_incarnation,
        process_incarnation,
    )

__all__ = [
    "BROKEN_EARLY",
    "PREFIX",
    "PREFIX_SIZE",
    "Acked",
    "Action",
    "Batch",
    "Branch",
    "Deliver",
    "Delivery",
    "Expansion",
    "Failed",
    "Fold",
    "Gap",
    "Hop",
    "Inbox",
    "InboxOverflow",
    "InboxStats",
    "Incarnations",
    "Link",
    "LinkConfig",
    "LinkIncarnations",
    "LinkState",
    "LostIndices",
    "NewIncarnation",
    "NoRoute",
    "Outbox",
    "PrefixKind",
    "RoutingTable",
    "Skipped",
    "Transmit",
    "Unblocked",
    "branches_below",
    "expand",
    "first_link_incarnation",
    "indices",
    "new_incarnation",
    "plan_cast",
    "process_incarnation",
    "size_of",
]

__getattr__ = lazy_names(
    __name__,
    {
        "actions": (
            "PREFIX",
            "PREFIX_SIZE",
            "Acked",
            "Action",
            "Deliver",
            "Failed",
            "LinkConfig",
            "LinkState",
            "NewIncarnation",
            "PrefixKind",
            "Skipped",
            "Transmit",
            "Unblocked",
        ),
        "link": ("BROKEN_EARLY", "Link"),
        "routes": (
            "Hop",
            "Incarnations",
            "LinkIncarnations",
            "NoRoute",
            "RoutingTable",
            "first_link_incarnation",
            "new_incarnation",
            "process_incarnation",
        ),
    },
)
