"""Errors that ranks have raised in a call, made into one error that says where, and what differs."""

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from monarch_nb.runtime.meshes import ActorState, MeshState, ProcState
from monarch_nb.shape import places_of, spans
from monarch_nb.wire import ActorError, ExceptionText, InFrame, decode_exception, exception_text, host_name

if TYPE_CHECKING:
    from monarch_nb.runtime.process import Runtime
    from monarch_nb.transport import Parcel

KINDS = 8  # of errors that are listed
HOSTS = 3  # that are named
WIDTH = 120  # of the text that names ranks
TOGETHER_S = 0.5  # errors that come within this time count as simultaneous, and are in rank order

# What gloo, NCCL and the store of torch.distributed raise where another member has left.
_LEFT_ALONE = re.compile(
    r"gloo/.*(Connection (closed|reset)|Timed out waiting|Broken pipe|Socket closed|Application timeout)"
    r"|torch\.distributed\.Dist(Network|Store)Error"
    r"|NCCL communicator (was|has been) aborted|ncclRemoteError|remote process exited|Watchdog caught collective"
)
_CHAINED = (
    "\nThe above exception was the direct cause of the following exception:\n",
    "\nDuring handling of the above exception, another exception occurred:\n",
)


class RankError:
    """An error as it came from one rank: its words, and the exception, which is unpickled when it is asked for."""

    __slots__ = ("_frames", "_parcel", "_text", "since")

    def __init__(self, frames: Sequence[InFrame], parcel: "Parcel | None", since: float = 0.0) -> None:
        self._frames = frames if parcel is None else parcel.parts
        self._parcel = parcel
        self._text: ExceptionText | None = None
        self.since = since  # seconds of the receiver's clock

    @property
    def text(self) -> ExceptionText:
        """Text of the remote exception, with its traceback."""
        if self._text is None:
            self._text = exception_text(self._frames)
        return self._text

    @property
    def is_interrupt(self) -> bool:
        """Whether somebody has ended the call there, also where that needed more than the interrupt."""
        return self.text.type_name == "KeyboardInterrupt"

    @property
    def follows(self) -> bool:
        """Whether it only says that another rank has left a collective. Where it was raised after an error of this
        rank's own, that error counts."""
        first = "".join(self.text.formatted)
        for between in _CHAINED:
            first = first.partition(between)[0]
        return _LEFT_ALONE.search(first) is not None

    def exception(self, receiver: "Runtime") -> BaseException:
        """The exception; the message it came in is done with."""
        parcel, self._parcel = self._parcel, None
        try:
            return decode_exception(self._frames, receiver)
        finally:
            if parcel is not None:
                receiver.node.consumed(parcel)


def in_order(raised: dict[int, RankError]) -> dict[int, RankError]:
    """Errors by place in their call: causes before those that only follow from others', each in order of time."""
    batch, began = 0, float("-inf")
    keys: dict[int, tuple[bool, int, int]] = {}
    for place, one in sorted(raised.items(), key=lambda item: item[1].since):
        if one.since - began > TOGETHER_S:
            batch, began = batch + 1, one.since
        keys[place] = (one.follows, batch, place)
    return dict(sorted(raised.items(), key=lambda item: keys[item[0]]))


class RankNames:
    """Names ranks of the mesh that a call was made on, by their places in the call."""

    def __init__(self, state: MeshState | None, ranks: Sequence[int]) -> None:
        self._region = state.region if state is not None else None
        procs = state.procs if isinstance(state, ActorState) else state
        self._layout = procs.layout if isinstance(procs, ProcState) else None
        self._ranks = ranks
        self.of_procs = isinstance(state, ProcState)

    def __call__(self, places: Iterable[int]) -> str:
        """The ranks, as people write them."""
        ranks = [self._ranks[place] for place in places]
        region = self._region
        known = region is not None and all(rank in region.ndslice for rank in ranks)
        text = places_of(region, ranks) if region is not None and known else f"ranks {spans(ranks)}"
        return text if len(text) <= WIDTH else f"{text[:WIDTH].rpartition(',')[0]},…"

    def hosts(self, places: Iterable[int]) -> str:
        """Where they are, such as "host node7"; "" if that is not known."""
        if self._layout is None:
            return ""
        found = list(dict.fromkeys(host_name(self._layout.host_of(self._ranks[place])) for place in places))
        more = f" and {len(found) - HOSTS} more" if len(found) > HOSTS else ""
        return f"host{'s'[: len(found) > 1]} {', '.join(found[:HOSTS])}{more}"


def actor_error(
    receiver: "Runtime", title: str, raised: dict[int, RankError], size: int, missing: Sequence[int], where: RankNames
) -> ActorError:
    """The error of a call; `raised` by place in it, as `in_order` has them, `missing` who had not answered."""
    failures = {place: one.exception(receiver) for place, one in raised.items()}
    name, _, method = title.partition(".")
    named, of = f"Actor call {title} failed", ""
    if title.endswith("[cell]") or (where.of_procs and method == "cell"):
        named, of = "The cell failed", f" of {name.removesuffix('[cell]')}"
    return ActorError.of_ranks(failures, f"{named}.", _summary(named, of, raised, size, missing, where))


def _summary(
    named: str, of: str, raised: dict[int, RankError], size: int, missing: Sequence[int], where: RankNames
) -> str:
    followed = [place for place, one in raised.items() if one.follows]
    if len(followed) < len(raised):
        raised = {place: one for place, one in raised.items() if place not in followed}
    else:  # who left is not among them
        followed = []
    kinds: dict[tuple[str, str, str], list[int]] = {}
    for place, one in raised.items():
        kinds.setdefault(one.text.likeness, []).append(place)
    at = where(raised)
    if size > 1:
        named += f" on {len(raised)} of {size} ranks{of}" + (f": {at}" if at else "")
    elif at:
        named += f" on {at}{of}"
    if len(raised) > 1:
        named += "; the same error" if len(kinds) == 1 else f"; {len(kinds)} different errors"
    if followed:
        named += f"; in consequence the collectives of {where(followed)} broke off"
    if missing:
        named += f"; {where(missing)} had not answered"
    hosts = where.hosts(raised)
    lines = [f"{named} ({hosts})" if hosts else named]
    if len(kinds) > 1:
        ranks_by_kind = list(kinds.values())
        lines += [f"  {where(places)}: {raised[places[0]].text.line}" for places in ranks_by_kind[:KINDS]]
        if len(ranks_by_kind) > KINDS:
            lines.append(f"  and {len(ranks_by_kind) - KINDS} more, in `failures` of this error")
    return "\n".join(lines)
