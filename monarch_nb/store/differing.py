"""Groups of ranks of a mesh that are alike: few kinds, however many ranks there are."""

from msgspec import Struct

from monarch_nb.shape import places
from monarch_nb.store.mesh_view import MeshView, RankView
from monarch_nb.store.records import RankState
from monarch_nb.wire import text_table

WORST_FIRST: tuple[RankState, ...] = (
    "failed",
    "unresponsive",
    "paused",
    "healing",
    "starting",
    "busy",
    "idle",
    "stopped",
)
MOST = 12  # kinds that are listed
_NAMED = 3  # hosts
_LONGEST = 60  # characters of coordinates, and of the description of a kind


class LikeRanks(Struct, frozen=True):
    """Ranks that are in the same state for the same reason, or run the same endpoint."""

    state: RankState
    about: str  # the endpoint, or the reason; "" without one
    ranks: tuple[RankView, ...]


def kinds(view: MeshView) -> list[LikeRanks]:
    """All kinds, the worst state first, then the largest first."""
    by_kind: dict[tuple[RankState, str], list[RankView]] = {}
    for rank in view.ranks:
        about = "" if rank.state == "unresponsive" else rank.detail  # its duration does not make a kind
        by_kind.setdefault((rank.state, about), []).append(rank)
    listed = [LikeRanks(state, about, tuple(ranks)) for (state, about), ranks in by_kind.items()]
    return sorted(listed, key=lambda kind: (WORST_FIRST.index(kind.state), -len(kind.ranks)))


def kind_rows(view: MeshView) -> list[tuple[str, str, str, str]]:
    """Each kind as text: count, state, description and location; a last row sums up those beyond `MOST`."""
    every = kinds(view)
    rows: list[tuple[str, str, str, str]] = [
        (f"{len(kind.ranks):,}", kind.state, _short(kind.about), where(view, kind, alone=len(every) == 1))
        for kind in every[:MOST]
    ]
    left = every[MOST:]
    if left:
        rows.append((f"{sum(len(kind.ranks) for kind in left):,}", "…", f"{len(left)} more kinds", ""))
    return rows


def where(view: MeshView, kind: LikeRanks, *, alone: bool = False) -> str:
    """Location of the ranks of a kind: coordinates, where they are short, and hosts."""
    if alone or len(kind.ranks) * 2 > len(view.ranks):
        return ""
    hosts = list(dict.fromkeys(rank.host for rank in kind.ranks))
    on = ", ".join(hosts) if len(hosts) <= _NAMED else f"{len(hosts):,} hosts"
    coordinates = places(view.labels, (rank.point for rank in kind.ranks), view.sizes)
    return f"{coordinates} on {on}" if coordinates and len(coordinates) <= _LONGEST else f"on {on}"


def kinds_text(view: MeshView) -> str:
    """The kinds as lines of text."""
    return text_table([(f"{count:>7}", state, about, location) for count, state, about, location in kind_rows(view)])


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
