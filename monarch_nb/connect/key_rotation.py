"""Rotation of the key of hosts in use: all hosts that share a key change it together."""

import contextlib
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from monarch_nb.connect.hosts import use_keys
from monarch_nb.connect.mesh_detach import Detacher
from monarch_nb.connect.remote_host import RemoteHost
from monarch_nb.connect.routes import HostRoutes
from monarch_nb.host import protocol as p
from monarch_nb.host import verbs
from monarch_nb.mesh.requests import request
from monarch_nb.runtime import Future, Runtime
from monarch_nb.transport import Keys, KeyStep, TransportError, TrustError
from monarch_nb.wire import agent_of, host_name

__all__ = ["rotate_key"]

logger = logging.getLogger(__name__)
_changing = threading.Lock()


def rotate_key(runtime: Runtime, name: str, hosts: Sequence[str], file: Path, *, force: bool, timeout: float) -> None:
    """Changes the key of the hosts of mesh `name`, as `HostMesh.rotate_key` does; blocks."""
    with _changing:
        _KeyRotation(runtime, name, hosts, time.monotonic() + timeout).run(file, force)


class _KeyRotation:
    """One change of one key, in three steps that all agents take together."""

    def __init__(self, runtime: Runtime, name: str, hosts: Sequence[str], deadline: float) -> None:
        self._runtime, self._name, self._deadline = runtime, name, deadline
        self._old = _key_of(runtime, name, hosts)
        self._new = Keys.create()
        attached = tuple(runtime.part(HostRoutes).attached.values())
        remotes = [remote for remote in attached if isinstance(remote, RemoteHost) and remote.keys == self._old]
        self._remotes = [remote for remote in remotes if not remote.lost]
        if lost := [host_name(remote.host) for remote in remotes if remote.lost]:
            logger.warning("%s cannot come back, since it has the former key: it is lost", ", ".join(lost))

    def run(self, file: Path, force: bool) -> None:
        """Executes all steps; blocks."""
        old, new, node = self._old, self._new, self._runtime.node
        try:
            node.change_keys("expect", old, new)
            self._expect(force)
            try:
                new.save(file)
            except OSError as error:
                raise self._unchanged(f"{file} cannot be written: {error.strerror or error}") from error
        except BaseException:
            for remote in self._remotes:
                with contextlib.suppress(TransportError):  # it has ended, and is why nothing changes
                    self._runtime.post(agent_of(remote.host), verbs.KEY, self._message("cancel"))
            node.change_keys("cancel", old, new)
            raise
        requests = self._ask("use")
        for remote in self._remotes:
            remote.keys = new
        for host, reply in self._collect(requests)[0].items():
            if reply.error:
                logger.warning(
                    "%s uses the new key, but its key file still has the former one: %s", host_name(host), reply.error
                )
        node.change_keys("use", old, new)
        use_keys(self._runtime, old, new)
        self._runtime.part(Detacher).keys_changed()
        self._finish()

    def _expect(self, force: bool) -> None:
        replies, silent = self._collect(self._ask("expect"))
        if silent:
            raise self._unchanged("; ".join(f"{host_name(host)}: {reason}" for host, reason in silent.items()))
        unwritable = [f"{host_name(host)}: {reply.error}" for host, reply in replies.items() if reply.error]
        if unwritable and not force:
            raise self._unchanged(
                f"agents cannot write their key files, and would have the former key after a restart "
                f"({'; '.join(unwritable)}). Make the files writable for them, or pass force=True"
            )
        users = {host: reply.users for host, reply in replies.items() if reply.users}
        if users and not force:
            programs = "; ".join(f"{host_name(host)}: {', '.join(names)}" for host, names in users.items())
            raise self._unchanged(
                f"other programs use the hosts, and would be cut off ({programs}). Detach or end them first, or pass "
                "force=True"
            )

    def _finish(self) -> None:
        """Has all agents forget the former key, and awaits unreachable ones on a thread."""
        requests = self._ask("done")
        _, silent = self._collect(requests)
        pending = {host: requests[host] for host in silent}
        if not pending:
            self._runtime.node.change_keys("done", self._old, self._new)
            return
        names = ", ".join(map(host_name, pending))
        logger.warning("%s: the key is changed; out of touch, and to get it once back: %s", self._name, names)

        def wait() -> None:
            for answer in pending.values():
                answer.exception()
            self._runtime.node.change_keys("done", self._old, self._new)

        threading.Thread(target=wait, name="monarch-keys", daemon=True).start()

    def _message(self, step: KeyStep) -> p.KeyChange:
        return p.KeyChange(step, self._new.to_text().decode())

    def _ask(self, step: KeyStep) -> dict[str, Future[p.KeyChanged]]:
        message = self._message(step)
        return {
            remote.host: request(self._runtime, agent_of(remote.host), verbs.KEY, message) for remote in self._remotes
        }

    def _collect(self, requests: Mapping[str, Future[p.KeyChanged]]) -> tuple[dict[str, p.KeyChanged], dict[str, str]]:
        """Waits for the replies; returns them, and the reasons for missing ones."""
        replies, silent = dict[str, p.KeyChanged](), dict[str, str]()
        for host, answer in requests.items():
            try:
                replies[host] = answer.get(max(0.0, self._deadline - time.monotonic()))
            except TimeoutError:
                silent[host] = "it has not answered"
            except RuntimeError as error:
                silent[host] = str(error)
        return replies, silent

    def _unchanged(self, reason: str) -> TrustError:
        return TrustError(f"{self._name}: the key was not changed: {reason}")


def _key_of(runtime: Runtime, name: str, hosts: Sequence[str]) -> Keys:
    """Returns the key of a mesh's hosts. Raises ValueError unless they share one."""
    keys: Keys | None = None
    for host in hosts:
        remote = runtime.part(HostRoutes).attached.get(host)
        if remote is None or remote.keys is None:
            raise ValueError(f"{name}: {host_name(host)} is reached without a key, and has none to change")
        if keys is not None and keys != remote.keys:
            raise ValueError(f"the hosts of {name} have different keys: change those of each job by itself")
        keys = remote.keys
    assert keys is not None
    return keys
