"""A process as a worker: it keeps a host agent at an address until the host is shut down."""

import contextlib
import errno
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable

from monarch_nb._package import on_exit
from monarch_nb.connect.trust import CA, TRUST_ALL, PrivateKey, bound_end, check_trust, read_keys
from monarch_nb.host import AgentHandle, AgentStartError, begin_agent, new_host_id, run_folder_for
from monarch_nb.host.folders import make_run_folder, remove_run_folder
from monarch_nb.host.linux import become_subreaper
from monarch_nb.host.options import UNUSED, UNUSED_WORDS
from monarch_nb.host.preemption import BURST_S, END, LATE_S, UNKNOWN_S
from monarch_nb.host.procs.reaper import end_all_descendants
from monarch_nb.host.protocol import PreemptionNotice
from monarch_nb.lifecycle import unhandled
from monarch_nb.routing.routes import AddressError, WorkerAddress, parse_worker_address
from monarch_nb.runtime import Future, fail_future, pending_future, resolve_future
from monarch_nb.runtime.ids import ProcId
from monarch_nb.settings import settings
from monarch_nb.transport import Keys, TransportError, TrustError, bound_at
from monarch_nb.wire import error_line

_ENDING_S = 2.0
_RESTARTS, _RESTARTS_S = 5, 60.0  # of an agent: so many within so many seconds


class _Worker:
    """An agent that this process owns, and the link at an ipc path that leads to it.

    With `restarts` an agent that is killed, or fails, is replaced by another of the same host at the same address: its
    processes are lost with it, and healed there. After `_RESTARTS` failures within `_RESTARTS_S` it is not replaced.
    """

    def __init__(
        self, address: WorkerAddress, keys: Keys | None, unused_s: float | None = None, *, restarts: bool = False
    ) -> None:
        self.address = address
        self._keys, self._unused_s = keys, unused_s
        self._restarts = restarts and address.bind.scheme != "ipc"  # clients do not look for an agent at a path again
        self._restarted: deque[float] = deque(maxlen=_RESTARTS)
        self._ending = False
        self._host = new_host_id()
        self._link = os.path.abspath(address.bind.path) if address.bind.scheme == "ipc" else ""
        fd = address.bind.fd
        bind = bound_end(address, keys) if fd is None else bound_at(fd)
        check_trust(bind, keys)
        if self._link:
            _make_room(self._link)
        self._tcp, self._fd = None if self._link or fd is not None else str(bind), fd
        self.handle = self._start()
        if fd is not None and not restarts:
            os.close(fd)  # it is the agent's now
        if self._link:
            try:
                os.symlink(self.handle.run_folder / "agent", self._link)
            except OSError:
                self._link = ""
                self.handle.close()
                raise
        self._cancel_exit = on_exit(self.close)

    def _start(self) -> AgentHandle:
        host, keys = self._host, self._keys
        folder = run_folder_for(host)
        make_run_folder(folder)
        key = None
        try:
            if keys is not None:
                key = folder / "key"
                key.touch(0o600)
                key.write_bytes(keys.to_text())
            lease_s = settings.mesh_orphan_timeout
            agent = begin_agent(
                host,
                folder,
                tcp=self._tcp,
                tcp_fd=self._fd,
                key=key,
                insecure_loopback=keys is None,
                lease_s=lease_s,
                unused_s=self._unused_s,
                bound=True,  # an engine that kills this process removes the machine
            )
            return agent.wait(settings.host_spawn_ready_timeout)
        except BaseException:
            remove_run_folder(folder)
            raise

    def close(self) -> None:
        """Ends the agent and its processes; blocks."""
        self._cancel_exit()
        self.handle.close()
        self._unlink()

    def _unlink(self) -> None:
        with contextlib.suppress(OSError):
            if self._link and os.readlink(self._link) == str(self.handle.run_folder / "agent"):
                os.unlink(self._link)

    def kill(self) -> None:
        """Ends the agent and its processes at once: `wait` returns. Also in a signal handler."""
        self._ending = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.handle.pid, signal.SIGKILL)

    def _may_restart(self) -> bool:
        full = len(self._restarted) == _RESTARTS
        often = full and time.monotonic() - self._restarted[0] < _RESTARTS_S
        return self._restarts and not self._ending and not often

    def _restart(self) -> bool:
        """Starts another agent in place of a failed one; returns False if it must not, or cannot."""
        while self._may_restart():
            self._restarted.append(time.monotonic())
            end_all_descendants()  # its remaining processes
            self._take_key()
            self.handle.close()
            try:
                self.handle = self._start()
            except (AgentStartError, TransportError, OSError) as error:
                sys.stderr.write(f"no other host agent could be started: {error}\n")
                continue
            if self._ending:  # meanwhile
                self.kill()
            return True
        return False

    def _take_key(self) -> None:
        """Reads the key of the agent that has failed, which may have changed since its start."""
        if self._keys is not None:
            with contextlib.suppress(OSError, TrustError):
                self._keys = Keys.load(self.handle.run_folder / "key")

    def wait(self) -> None:
        """Blocks until the agent has ended. Raises RuntimeError unless it was shut down properly."""
        while (status := self.handle.wait()) not in (0, UNUSED):
            sys.stderr.write(f"the host agent (process {self.handle.pid}) ended with status {status}\n")
            if not self._restart():
                break
        self._cancel_exit()
        self.handle.close()
        self._unlink()
        if status == UNUSED:
            sys.stderr.write(f"{UNUSED_WORDS} {self._unused_s:g} s, and it has ended\n")
        elif status != 0:
            pid = self.handle.pid
            raise RuntimeError(f"the host agent (process {pid}) at {self.address} ended with status {status}")


def _make_room(link: str) -> None:
    """Removes the link of a worker that was killed. Raises OSError if the path is in use.

    An agent whose worker was killed needs a moment to end.
    """
    deadline = time.monotonic() + _ENDING_S
    while os.path.islink(link) and os.path.exists(link) and time.monotonic() < deadline:
        time.sleep(0.02)
    if os.path.islink(link) and not os.path.exists(link):
        os.unlink(link)
    elif os.path.lexists(link):
        raise OSError(errno.EADDRINUSE, "a worker listens there already, or it is another file", link)
    elif not os.path.isdir(os.path.dirname(link)):
        raise FileNotFoundError(errno.ENOENT, "there is no such folder for a worker's socket", os.path.dirname(link))


def _serve(
    private_key: PrivateKey, ca: CA, address: str, unused_s: float | None = None, *, restarts: bool = False
) -> _Worker:
    return _Worker(parse_worker_address(address), read_keys(private_key, ca), unused_s, restarts=restarts)


def start_worker_loop_forever(*, private_key: PrivateKey = None, ca: CA, address: str) -> Future[None]:
    """Makes this machine a host at an address, while this process lives; see `run_worker_loop_forever`.

    Returns when it listens. Ends this process, as `sys.exit(0)` on its main thread does, when a client shuts the host
    down (in a notebook the future resolves instead); the future fails if it cannot listen, with AgentStartError or
    OSError, and with RuntimeError if its agent ends otherwise. Signal handlers are left unchanged. Raises AddressError
    and TrustError.
    """
    return serve(parse_worker_address(address), read_keys(private_key, ca), exits=True)


def serve(address: WorkerAddress, keys: Keys | None, *, exits: bool) -> Future[None]:
    """Keeps a worker; the future resolves when its host is shut down, unless that `exits`: ends this process."""
    future: Future[None] = pending_future(describe=lambda: f"the worker at {address} runs")
    unhandled.prepare()
    try:
        worker = _Worker(address, keys)
    except (AddressError, TrustError):
        raise
    except Exception as error:
        fail_future(future, error)
        return future

    def wait() -> None:
        try:
            worker.wait()
        except BaseException as error:
            fail_future(future, error)
            return
        if not exits or unhandled.in_notebook():
            resolve_future(future, None)
        elif not unhandled.end_program(0):
            unhandled.leave_now(0)

    threading.Thread(target=wait, name="monarch-worker", daemon=True).start()
    return future


def run_worker_loop_forever(
    *, private_key: PrivateKey = None, ca: CA, address: str, service_proc_id: ProcId | None = None
) -> None:
    """Makes this machine a host at an address, until a client shuts it down, which ends this process.

    `address` is `ipc://path` or `tcp://name:port`, with `@tcp://0.0.0.0:port` behind it to bind elsewhere; `fdN` for a
    port is a socket that is bound already, which this process was given as descriptor N. `private_key` is the job's key
    file (or its content), the same on both sides; `ca="trust_all_connections"` without a key is honoured on ipc and
    loopback addresses only. Processes on the host end with the client that spawned them, or with this process; the host
    then waits for the next client. `service_proc_id` is of earlier versions of torchmonarch; hosts have their own ids.
    Blocks.
    Raises AddressError, TrustError, AgentStartError, TransportError for a descriptor that is no such socket, and
    OSError for an ipc path that is in use.
    """
    run_worker_loop_until_shutdown(private_key=private_key, ca=ca, address=address)
    sys.exit(0)


def _sigterm_notice() -> PreemptionNotice:
    return PreemptionNotice(by="SIGTERM")


def run_worker_until_killed(
    address: str, private_key: PrivateKey = None, ready: Callable[[str], None] = lambda _host: None,
    unused_s: float | None = None, find_out: Callable[[], PreemptionNotice] = _sigterm_notice,
) -> None:  # fmt: skip
    """Runs a worker until it is shut down, or END kills all of it at once; without a key for this machine alone.

    SIGTERM is the notice of its engine, which is about to kill it: a host in use continues, and sends its users the
    result of `find_out`, which may block. A second SIGTERM at least `BURST_S` later kills the worker.
    `ready` is given the id of the host once its agent listens. The host ends by itself once no controller has used it,
    nor left a mesh there, for `unused_s` seconds; None: never. An agent that is killed is started again. Blocks.
    """
    adopts = become_subreaper()
    worker = _serve(private_key, TRUST_ALL, address, unused_s, restarts=True)
    killed, first, until = False, 0.0, 0.0

    def kill(*_: object) -> None:
        nonlocal killed
        killed = True
        worker.kill()

    def terminate(*_: object) -> None:
        nonlocal first, until
        now = time.monotonic()
        if now < until:
            if now - first >= BURST_S:
                kill()
            return
        first, until = now, now + UNKNOWN_S
        threading.Thread(target=warn, args=(now,), name="monarch-notice", daemon=True).start()

    def warn(since: float) -> None:
        nonlocal until
        try:
            notice = find_out()
        except Exception as error:  # its users are informed in any case
            notice = PreemptionNotice(by=f"SIGTERM; more could not be found out: {error_line(error)}")
        if notice.seconds is not None:
            until = since + notice.seconds + LATE_S
        worker.handle.warn(notice)

    signal.signal(END, kill)
    signal.signal(signal.SIGTERM, terminate)
    try:
        ready(worker.handle.host)
        worker.wait()
    except RuntimeError:
        if not killed:
            raise
        if adopts:  # left over by the agent; elsewhere they end with it
            end_all_descendants()
    finally:
        worker.close()
    if killed:
        unhandled.leave_now(0)


def run_worker_loop_until_shutdown(*, private_key: PrivateKey = None, ca: CA, address: str) -> None:
    """Like `run_worker_loop_forever`, but returns when the host is shut down."""
    worker = _serve(private_key, ca, address)
    try:
        worker.wait()
    finally:
        worker.close()
