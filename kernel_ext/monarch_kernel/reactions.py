"""Descriptions of what ranks do, and of how they reacted to an interrupt."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from monarch_nb.lifecycle.interrupts import SILENT_AFTER
from monarch_nb.runtime import EXEC, HOOK, RELOAD, MeshState, ProcState, RunningEndpoint
from monarch_nb.shape import places

OFFERED = 8  # the most ranks that are named one by one
_ENGINES = {EXEC: "the cell", HOOK: "__healed__()", RELOAD: "the reload"}
_CONSOLE = {"cell": "the cell", "setup": "the set-up"}  # endpoints of processes

FileName = Callable[[str], str]


def call_text(state: MeshState, endpoint: str) -> str:
    """Returns the running call, `a.step()`, or the cell."""
    name = endpoint.lstrip("@!")
    title = _ENGINES.get(endpoint) or (_CONSOLE.get(name) if isinstance(state, ProcState) else None)
    return title or f"{state.name}.{name}()"


def ranks_text(state: MeshState, ranks: Iterable[int]) -> str:
    """Base ranks of a mesh, by its name: `a gpus=0-3`."""
    base = state.region
    text = places(base.labels, (tuple(base.point_of_base_rank(rank).values()) for rank in ranks))
    return f"{state.name} {text}".rstrip()


def restart_commands(state: MeshState, ranks: Sequence[int]) -> str:
    """Commands that kill and restart the processes of ranks that do not react."""
    base = state.region
    pick = places(base.labels, (tuple(base.point_of_base_rank(rank).values()) for rank in ranks))
    some = len(ranks) < len(base) and len(ranks) <= OFFERED
    picks = [f" {part.strip()}" for part in pick.split(";")] if some else [""]
    commands = "; ".join(f"%heal {state.name}{pick} --kill" for pick in picks)
    return (
        f"{commands} kills {'their processes and starts them' if len(ranks) > 1 else 'its process and starts it'} again"
    )


def grouped(
    doings: Mapping[int, RunningEndpoint], key: Callable[[RunningEndpoint], tuple[object, ...]]
) -> list[tuple[RunningEndpoint, list[int]]]:
    """Ranks that do the same, together."""
    groups: dict[tuple[object, ...], tuple[RunningEndpoint, list[int]]] = {}
    for rank, doing in doings.items():
        groups.setdefault(key(doing), (doing, []))[1].append(rank)
    return list(groups.values())


def ended(state: MeshState, reactions: Mapping[int, RunningEndpoint | None]) -> list[str]:
    """Description of the calls that an interrupt ended, and their ranks."""
    over = {rank: doing for rank, doing in reactions.items() if doing is not None and doing.ended}
    return [
        f"interrupted {call_text(state, doing.endpoint)} on {ranks_text(state, ranks)}"
        for doing, ranks in grouped(over, lambda doing: (doing.endpoint,))
    ]


def stuck(state: MeshState, reactions: Mapping[int, RunningEndpoint | None], name: FileName) -> list[str]:
    """Description of ranks that have not reacted to an interrupt, the reason, and what ends their calls."""
    running = {rank: doing for rank, doing in reactions.items() if doing is not None and doing.call and not doing.ended}
    lines = []
    for doing, ranks in grouped(running, lambda doing: (doing.endpoint, doing.file, doing.line)):
        location = f"{name(doing.file) or doing.file}, line {doing.line}" if doing.file else ""
        inside = f" in `{doing.source}` ({location})" if doing.source else f" ({location})" if location else ""
        single = len(ranks) == 1
        lines.append(
            f"{ranks_text(state, ranks)} {'has' if single else 'have'} not reacted within {SILENT_AFTER:g} s: "
            f"{call_text(state, doing.endpoint)} waits{inside} for something that an interrupt does not end. It ends "
            f"when that does, or {restart_commands(state, ranks)}"
        )
    silent = [rank for rank, doing in reactions.items() if doing is None]
    if silent:
        lines.append(
            f"{ranks_text(state, silent)} {'does' if len(silent) == 1 else 'do'} not answer: a long call in C, or "
            f"stopped. {restart_commands(state, silent)}"
        )
    return lines
