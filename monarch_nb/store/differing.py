"""What differs among the ranks of a mesh: those that are alike are one kind, however many they are."""

from msgspec import Struct

from monarch_nb.mesh.text_table import text_table
from monarch_nb.shape import places
from monarch_nb.store.mesh_view import MeshView, RankView
from monarch_nb.store.rank import RankState

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
MOST = 12  # kinds that are told
_NAMED = 3  # hosts
_LONGEST = 60  # characters of places, and of what is said of a kind


class Kind(Struct, frozen=True):
    """Ranks that are in the same state for the same reason, or run the same endpoint."""

    state: RankState
    about: str  # the endpoint, or the reason; "" where there is nothing to say
    ranks: tuple[RankView, ...]


def kinds(view: MeshView) -> list[Kind]:
    """All of them, the worst state first, of one state the largest first."""
    found: dict[tuple[RankState, str], list[RankView]] = {}
    for rank in view.ranks:
        about = "" if rank.state == "unresponsive" else rank.detail  # for how long is not a kind
        found.setdefault((rank.state, about), []).append(rank)
    listed = [Kind(state, about, tuple(ranks)) for (state, about), ranks in found.items()]
    return sorted(listed, key=lambda kind: (WORST_FIRST.index(kind.state), -len(kind.ranks)))


def kind_rows(view: MeshView) -> list[tuple[str, str, str, str]]:
    """Each kind as text: how many, the state, about what, and where; what is too much is summed up in a last row."""
    every = kinds(view)
    rows: list[tuple[str, str, str, str]] = [
        (f"{len(kind.ranks):,}", kind.state, _short(kind.about), where(view, kind, alone=len(every) == 1))
        for kind in every[:MOST]
    ]
    left = every[MOST:]
    if left:
        rows.append((f"{sum(len(kind.ranks) for kind in left):,}", "…", f"{len(left)} more kinds", ""))
    return rows


def where(view: MeshView, kind: Kind, *, alone: bool = False) -> str:
    """Where the ranks of a kind are: their places, where these are few words, and their hosts."""
    if alone or len(kind.ranks) * 2 > len(view.ranks):
        return ""
    hosts = list(dict.fromkeys(rank.host for rank in kind.ranks))
    on = ", ".join(hosts) if len(hosts) <= _NAMED else f"{len(hosts):,} hosts"
    at = places(view.labels, (rank.point for rank in kind.ranks), view.sizes)
    return f"{at} on {on}" if at and len(at) <= _LONGEST else f"on {on}"


def kinds_text(view: MeshView) -> str:
    """The kinds as lines of text."""
    return text_table([(f"{count:>7}", state, about, at) for count, state, about, at in kind_rows(view)])


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
