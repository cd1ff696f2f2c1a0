"""Simulated processes that write: their output arrives as a host agent sends it."""

from types import SimpleNamespace
from typing import Any

from monarch_nb.logs import MeshLogs
from monarch_nb.logs.verbs import LogBlock, LogChunk
from monarch_nb.mesh.mesh_events import ProcStarted
from monarch_nb.runtime import ProcState
from monarch_nb.runtime.actors.hosting import LogPositions
from monarch_nb.shape import Extent
from monarch_nb.wire import Layout

AGENT = "h/agent"


class Cluster:
    """A process that has spawned the ranks of one mesh, which write when a test says so."""

    def __init__(self, ranks: int = 4) -> None:
        region = Extent(["gpus"], [ranks]).region
        self.procs = ProcState("p", "workers", region, "h/c", layout=Layout("p", ("h",), ranks), spawn_spec=object())
        self.levels: list[tuple[int, int]] = []
        self.deferred: list[Any] = []
        self.runtime: Any = SimpleNamespace(
            meshes={"p": self.procs},
            calls={},
            verbs=SimpleNamespace(handle=lambda *_: None),
            post=lambda *_: None,
            log_positions=LogPositions(),
            local_hosts={"h"},
            later=lambda _, function: self.deferred.append(function),
        )
        self.logs = MeshLogs(self.runtime, lambda _, rank, level: self.levels.append((rank, level)))
        self._offsets: dict[str, int] = {}

    def start(self, rank: int, incarnation: int = 0) -> None:
        """A process has started."""
        address = f"h/p.{rank}.{incarnation}"
        self.logs.happened(ProcStarted(address, 1, f"/logs/{rank}.{incarnation}.log"))

    def write(
        self, rank: int, text: str, call: str = "c:1", *, stream: int = 1, level: int = 0, time: float = 0.0,
        skipped: int = 0, incarnation: int = 0,
    ) -> int:  # fmt: skip
        """A process writes; gives the position in its log, as its replies carry it."""
        address, data = f"h/p.{rank}.{incarnation}", text.encode()
        offset = self._offsets.get(address, 0)
        end = self._offsets[address] = offset + len(data)
        block = LogBlock(stream, level, time or 1.0 + offset / 1e6, call, data)
        self.logs.receiver.take([LogChunk(address, offset, end, (block,), skipped)], AGENT)
        return end
