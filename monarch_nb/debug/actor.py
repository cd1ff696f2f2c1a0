"""The debugger as an actor: one for each program, in its client's process, for all actors of the program."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from monarch_nb._deferred import asyncio
from monarch_nb.debug.api import Group
from monarch_nb.debug.records import DebugError, Stopped
from monarch_nb.debug.render.groups import pick
from monarch_nb.debug.service import controller
from monarch_nb.lifecycle import get_or_spawn_controller
from monarch_nb.mesh.declare import Actor, concurrent_endpoint

_LOOK_S = 0.5  # between checks whether the caller has gone away


@dataclass(order=True)
class DebugSessionInfo:
    """A stopped rank. Sorts by actor and rank."""

    actor_name: str
    rank: int
    coords: dict[str, int]
    hostname: str
    function: str | None
    lineno: int | None


class DebugController(Actor):
    """Lists stopped ranks and sends them commands; `monarch.debug` does the same without messages."""

    @concurrent_endpoint
    async def list(self, print_output: bool = True) -> "list[DebugSessionInfo]":
        """Returns all stopped ranks, by actor and rank; also printed in the client's output if `print_output`."""
        infos = sorted(map(_info, controller().stopped.records()))
        if print_output:
            sys.stdout.write(f"{Group(controller().stopped.records)!r}\n")
        return infos

    @concurrent_endpoint
    async def wait_pending_session(self) -> None:
        """Returns once anything is stopped."""
        stopped = controller().stopped
        while not await asyncio.to_thread(stopped.wait, _LOOK_S, lambda: stopped.any):
            pass

    @concurrent_endpoint
    async def run(self, command: str, actor_name: str | None = None, ranks: "str | int | Sequence[int]" = "all") -> str:
        """Sends a prompt command (`p loss`, `n`, `c`) to stopped ranks of an actor: 3, [0, 2], "0:4" or "gpus=0:2"; to
        all that is stopped without a name. Gives the text of the answers, with equal ones together.

        Raises DebugError where nothing of it is stopped.
        """
        selection = ranks if isinstance(ranks, str) else _selection([ranks] if isinstance(ranks, int) else ranks)

        def candidates() -> "list[Stopped]":
            records = controller().stopped.records()
            return records if actor_name is None else [record for record in records if record.name == actor_name]

        keys = {(record.mesh, record.rank, record.thread) for record in pick(candidates(), selection)}
        group = Group(lambda: [record for record in candidates() if (record.mesh, record.rank, record.thread) in keys])
        return (await asyncio.to_thread(group.run, command)).text


def _selection(ranks: Sequence[int]) -> str:
    if not ranks or not all(isinstance(rank, int) for rank in ranks):
        raise DebugError(f"ranks={ranks!r}: write a rank (3), several ([0, 2]), or text as in gpus=0:4")
    return ",".join(map(str, ranks))


def _info(record: Stopped) -> DebugSessionInfo:
    coords = dict(zip(record.labels, record.point, strict=True))
    return DebugSessionInfo(record.name, record.rank, coords, record.host, record.frame.function, record.frame.line)


def debug_controller() -> DebugController:
    """Returns the debug controller of this program, from any of its processes. Blocks for an answer of the client."""
    return get_or_spawn_controller("debug_controller", DebugController).get()
