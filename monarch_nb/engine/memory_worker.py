"""A process of a mesh that is simulated inside this one: its runtime is real, its process is not."""

import threading
from collections.abc import Callable
from typing import Any

from monarch_nb.engine.compose import Role, compose
from monarch_nb.engine.in_process import InlineConsole
from monarch_nb.engine.worker import host_console
from monarch_nb.host.protocol import ProcSpec
from monarch_nb.mesh.handle import Handle, state_of
from monarch_nb.mesh.registry import MeshRegistry
from monarch_nb.runtime import Local, ProcState, Runtime, current, endpoint, runtime, waiting
from monarch_nb.transport.memory.time import MemoryTime, ProcessClock
from monarch_nb.transport.memory.transport import MemoryTransport
from monarch_nb.wire import Header

_MUTE = 0.0


class MemoryConsole(InlineConsole):
    """Runs the set-up and cells of such a process."""

    @endpoint
    def setup(
        self, sources: list[tuple[str, str]], bootstrap: Callable[[], Any] | None, mesh: Handle[ProcState]
    ) -> None:
        """Runs the set-up of the process, once, before any actor is constructed."""
        try:
            runtime().part(MeshRegistry).belongs(state_of(mesh))
            self._prepare(sources, bootstrap, mesh)
        finally:
            runtime().end_setup()


class MemoryWorker:
    """One process, from its start to its end."""

    def __init__(self, time: MemoryTime, spec: ProcSpec) -> None:
        self.spec = spec
        self._time = time
        local = Local(spec.address)
        node = MemoryTransport(time, spec.address, handler=self._take, on_link_failed=self._lost)
        role = Role(spec.agent, is_worker=True, root_id=f"<{spec.name or 'proc'}>")
        self.engine: Runtime = compose(local, node, ProcessClock(time, self._enter), role)
        self._console = host_console(self.engine, spec, MemoryConsole(spec.rank))
        waiting.guards.append(self.engine.waits.guard)

    def start(self) -> None:
        """It takes messages from now on; actors are constructed once its set-up is done."""
        constructed = threading.Event()
        self._console.executor.post_control(constructed.set)
        self._console.executor.start()
        constructed.wait(10.0)
        self.engine.begin_setup()
        self.engine.start()

    def stop(self, reason: str, timeout: float) -> None:
        """Ends its actors with their clean-up, then itself; blocks."""
        self.engine.stop_actors(reason, timeout)
        self._console.stop(reason)
        self._end(linger=0.1)

    def kill(self, reason: str) -> None:
        """Ends it as SIGKILL does: nothing of it answers any more, no clean-up is run."""
        self.engine.node.close(_MUTE)
        for cell in tuple(self.engine.cells.values()):
            cell.abandon(reason)
        self._end(linger=_MUTE)

    def _end(self, linger: float) -> None:
        for cell in tuple(self.engine.cells.values()):
            cell.interrupt()  # what a real process would end with itself, and what would else wait here for ever
        self.engine.end_setup()
        if self.engine.waits.guard in waiting.guards:
            waiting.guards.remove(self.engine.waits.guard)
        self.engine.close(linger)

    # what comes to it is handled as its own code, which finds this process as the current one

    def _enter(self, function: Callable[[], object]) -> object:
        token = current.set(self.engine.root_context)
        try:
            return function()
        finally:
            current.reset(token)

    def _take(self, header: Header, parcel: Any) -> None:
        self._enter(lambda: self.engine.handle(header, parcel))

    def _lost(self, header: Header, parcel: Any, reason: str) -> None:
        self._enter(lambda: self.engine.undelivered(header, reason))
