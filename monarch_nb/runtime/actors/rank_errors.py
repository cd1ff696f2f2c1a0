"""Errors that ranks have raised in a call, combined into one error with their places and differences."""

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

# Errors of gloo, NCCL and the store of torch.distributed after another member has left.
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
    """An error as it arrived from one rank: its text, and the exception, which is unpickled on request."""

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
        """True if the call was interrupted on the rank, even where that needed more than the interrupt."""
        return self.text.type_name == "KeyboardInterrupt"

    @property
    def follows(self) -> bool:
        """True if it only reports that another rank has left a collective. If it was raised after an error of this
        rank's own, that error counts."""
        first = "".join(self.text.formatted)
        for between in _CHAINED:
            first = first.partition(between)[0]
        return _LEFT_ALONE.search(first) is not None

    def exception(self, receiver: "Runtime") -> BaseException:
        """Unpickles the exception, and releases the message that carried it."""
        parcel, self._parcel = self._parcel, None
        try:
            return decode_exception(self._frames, receiver)
        finally:
            if parcel is not None:
                receiver.node.consumed(parcel)


def in_order(raised: dict[int, RankError]) -> dict[int, RankError]:
    """Sorts errors by position in their call: causes before consequences of other ranks' errors, each by time."""
    batch, began = 0, float("-inf")
    keys: dict[int, tuple[bool, int, int]] = {}
    for position, error in sorted(raised.items(), key=lambda item: item[1].since):
        if error.since - began > TOGETHER_S:
            batch, began = batch + 1, error.since
        keys[position] = (error.follows, batch, position)
    return dict(sorted(raised.items(), key=lambda item: keys[item[0]]))


class RankNames:
    """Names ranks of the mesh that a call was made on, by their positions in the call."""

    def __init__(self, state: MeshState | None, ranks: Sequence[int]) -> None:
        self._region = state.region if state is not None else None
        procs = state.procs if isinstance(state, ActorState) else state
        self._layout = procs.layout if isinstance(procs, ProcState) else None
        self._ranks = ranks
        self.of_procs = isinstance(state, ProcState)

    def __call__(self, positions: Iterable[int]) -> str:
        """Returns the ranks as text."""
        ranks = [self._ranks[position] for position in positions]
        region = self._region
        in_region = region is not None and all(rank in region.ndslice for rank in ranks)
        text = places_of(region, ranks) if region is not None and in_region else f"ranks {spans(ranks)}"
        return text if len(text) <= WIDTH else f"{text[:WIDTH].rpartition(',')[0]},…"

    def hosts(self, positions: Iterable[int]) -> str:
        """Returns their hosts as text, such as "host node7"; "" if they are unknown."""
        if self._layout is None:
            return ""
        hosts = list(dict.fromkeys(host_name(self._layout.host_of(self._ranks[position])) for position in positions))
        more = f" and {len(hosts) - HOSTS} more" if len(hosts) > HOSTS else ""
        return f"host{'s'[: len(hosts) > 1]} {', '.join(hosts[:HOSTS])}{more}"


def actor_error(
    receiver: "Runtime", title: str, raised: dict[int, RankError], size: int, missing: Sequence[int], names: RankNames
) -> ActorError:
    """Returns the error of a call: `raised` by position, as `in_order` sorts them, `missing` are without an answer."""
    failures = {position: error.exception(receiver) for position, error in raised.items()}
    name, _, method = title.partition(".")
    headline, of = f"Actor call {title} failed", ""
    if title.endswith("[cell]") or (names.of_procs and method == "cell"):
        headline, of = "The cell failed", f" of {name.removesuffix('[cell]')}"
    return ActorError.of_ranks(failures, f"{headline}.", _summary(headline, of, raised, size, missing, names))


def _summary(
    headline: str, of: str, raised: dict[int, RankError], size: int, missing: Sequence[int], names: RankNames
) -> str:
    followed = [position for position, error in raised.items() if error.follows]
    if len(followed) < len(raised):
        raised = {position: error for position, error in raised.items() if position not in followed}
    else:  # ranks that left are not among them
        followed = []
    kinds: dict[tuple[str, str, str], list[int]] = {}
    for position, error in raised.items():
        kinds.setdefault(error.text.likeness, []).append(position)
    ranks = names(raised)
    if size > 1:
        headline += f" on {len(raised)} of {size} ranks{of}" + (f": {ranks}" if ranks else "")
    elif ranks:
        headline += f" on {ranks}{of}"
    if len(raised) > 1:
        headline += "; the same error" if len(kinds) == 1 else f"; {len(kinds)} different errors"
    if followed:
        headline += f"; in consequence the collectives of {names(followed)} broke off"
    if missing:
        headline += f"; {names(missing)} had not answered"
    hosts = names.hosts(raised)
    lines = [f"{headline} ({hosts})" if hosts else headline]
    if len(kinds) > 1:
        ranks_by_kind = list(kinds.values())
        lines += [f"  {names(positions)}: {raised[positions[0]].text.line}" for positions in ranks_by_kind[:KINDS]]
        if len(ranks_by_kind) > KINDS:
            lines.append(f"  and {len(ranks_by_kind) - KINDS} more, in `failures` of this error")
    return "\n".join(lines)
