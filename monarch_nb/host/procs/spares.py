"""Processes that are started ahead for a mesh: one of them takes the position of a rank that has ended."""

import contextlib
import logging
import os
import signal
from collections import Counter
from collections.abc import Callable
from functools import partial

from monarch_nb.host.loop import Loop
from monarch_nb.host.procs.channel import ProcChannel
from monarch_nb.host.procs.forker import Forker
from monarch_nb.host.procs.reaper import Reaper, kill_group
from monarch_nb.host.protocol import KeepSpares

log = logging.getLogger(__name__)
_REPLACE_S = 2.0  # until a spare is replaced, so that it does not slow down a heal
_ATTEMPTS = 3  # starts of spares that end by themselves


class SpareProc:
    """A process without a rank, of a mesh ("" once it is to end). `died` is called with its wait status."""

    def __init__(self, mesh: str, channel: ProcChannel, died: Callable[[int], None]) -> None:
        self.mesh, self.channel, self.died = mesh, channel, died
        self.pid = 0  # until it has been forked
        self.is_ready = False  # whether it has made its calls, which take longer than a fork


class SpareProcs:
    """The spares of the meshes of a host. Their environment, folder and devices are those of the rank they become.

    A spare that ends by itself is replaced, a few times, and nothing else happens. Everything happens on the loop's
    thread.
    """

    def __init__(self, loop: Loop, forker: Forker, reaper: Reaper) -> None:
        self._loop, self._forker, self._reaper = loop, forker, reaper
        self._requests: dict[str, KeepSpares] = {}  # by mesh
        self._spares: dict[ProcChannel, SpareProc] = {}
        self._attempts: Counter[str] = Counter()

    def keep(self, request: KeepSpares) -> None:
        """Starts the spares of a mesh, and replaces them from now on."""
        if request.count < 1:
            self.end(request.mesh)
            return
        is_new = self._requests.get(request.mesh) != request
        self._requests[request.mesh] = request
        del self._attempts[request.mesh]
        self._loop.call_later(0.0 if is_new else _REPLACE_S, lambda: self._fill(request.mesh))

    def take(self, mesh: str) -> SpareProc | None:
        """Returns and removes a spare of a mesh."""
        spare = next((spare for spare in self._spares.values() if spare.mesh == mesh and spare.is_ready), None)
        if spare is not None:
            del self._spares[spare.channel]
            del self._attempts[mesh]
            self._loop.call_later(_REPLACE_S, lambda: self._fill(mesh))
        return spare

    def refused(self, channel: ProcChannel, reason: str) -> bool:
        """Handles a refused fork; False if the channel belongs to no spare."""
        spare = self._spares.get(channel)
        if spare is None:
            return False
        channel.close()
        self._ended(spare, reason)
        return True

    def end(self, mesh: str) -> None:
        """Ends the spares of a mesh."""
        self._requests.pop(mesh, None)
        for spare in [spare for spare in self._spares.values() if spare.mesh == mesh]:
            spare.mesh = ""
            if spare.pid:  # else when it has been forked: the template has the channel
                self._drop(spare)

    def _drop(self, spare: SpareProc) -> None:
        del self._spares[spare.channel]
        spare.channel.close()
        with contextlib.suppress(ProcessLookupError):
            kill_group(spare.pid)
            os.kill(spare.pid, signal.SIGKILL)

    def owner_gone(self, owner: str) -> None:
        """Ends the spares of an owner's meshes."""
        for mesh in [mesh for mesh, request in self._requests.items() if request.owner == owner]:
            self.end(mesh)

    def _fill(self, mesh: str) -> None:
        request = self._requests.get(mesh)
        if request is None:
            return
        missing = request.count - sum(spare.mesh == mesh for spare in self._spares.values())
        channels: list[ProcChannel] = []
        for _ in range(missing):
            try:
                channel = ProcChannel(self._loop, None, lambda words: None, lambda: None)
            except OSError as error:
                log.warning("a spare process of %s could not be started: %s", mesh, error)
                break
            spare = self._spares[channel] = SpareProc(mesh, channel, lambda status: None)
            channel.attach(partial(self._on_words, spare), partial(self._channel_ended, spare))
            channel.prepare(request.prepare)
            channels.append(channel)
        if channels:
            self._forker.fork(channels)

    def _on_words(self, spare: SpareProc, words: list[str]) -> None:
        match words:
            case ["pid", number] if not spare.pid:
                spare.pid = int(number)
                self._forker.forked()
                spare.died = lambda status: self._ended(spare, f"it ended with status {status}")
                self._reaper.watch(spare.pid, lambda status: spare.died(status))
                if not spare.mesh:
                    self._drop(spare)
            case ["ready"]:
                spare.is_ready = True
            case ["error", *text]:
                spare.channel.close()
                self._ended(spare, " ".join(text))

    def _channel_ended(self, spare: SpareProc) -> None:
        if not spare.pid:  # else its death is about to be seen
            self._ended(spare, "its start failed")

    def _ended(self, spare: SpareProc, reason: str) -> None:
        if self._spares.pop(spare.channel, None) is None:
            return
        spare.channel.close()
        self._attempts[spare.mesh] += 1
        log.warning("a spare process of %s is gone: %s", spare.mesh, reason)
        if self._attempts[spare.mesh] < _ATTEMPTS:
            self._loop.call_later(_REPLACE_S, lambda: self._fill(spare.mesh))
