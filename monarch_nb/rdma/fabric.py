"""The NIXL agent of this process, which registers memory with an RDMA device and moves bytes between devices.

The agent is created at first use. It has no progress thread, which would keep a processor busy. Threads that wait for
bytes drive it, and so does an owner of leased memory (`MemoryLeases`).
"""

import contextlib
import ctypes
import importlib
import importlib.util
import itertools
import logging
import os
import secrets
import threading
from collections.abc import Iterator, Sequence
from typing import Protocol, cast

from monarch_nb.host.linux import rdma_devices
from monarch_nb.rdma.memory import Memory
from monarch_nb.rdma.movers import CannotReachError

_PACKAGES = ("nixl_cu12", "nixl_cu13", "nixl")  # the same library for different CUDAs, which is not needed
_HOST = "DRAM"  # NIXL's word for memory of the host
_ENVIRONMENT = {
    "NIXL_LOG_LEVEL": "FATAL",  # failures are reported as errors here
    "UCX_LOG_LEVEL": "fatal",
    "UCX_WARN_UNUSED_ENV_VARS": "n",
    # UCX would patch mmap, munmap and brk of the running process, to learn when memory that it has registered by itself
    # goes away. It registers none here, and threads that are in these functions then may crash.
    "UCX_MEM_EVENTS": "n",
}
_OF_THIS_PROCESS = 1 << 40  # the first number for memory registered for one transfer; regions have smaller ones
_FORKED = "this process was forked from one that may use NIXL, whose libraries do not survive that"

Span = tuple[int, int, int]  # address, bytes, and a number that distinguishes registrations at one address


class LinkCutError(Exception):
    """A lost connection to a peer: its process has ended, or the network between has failed."""


class _Transfer(Protocol):
    def release(self) -> None: ...


class _Agent(Protocol):
    """The methods of nixl_agent that are used."""

    agent: object

    def get_reg_descs(self, descs: Sequence[tuple[int, int, int, str]], mem_type: str) -> object: ...
    def get_xfer_descs(self, descs: Sequence[Span], mem_type: str) -> object: ...
    def register_memory(self, reg_list: object) -> object: ...
    def deregister_memory(self, dereg_list: object) -> None: ...
    def get_partial_agent_metadata(self, descs: object, inc_conn_info: bool, backends: list[str]) -> bytes: ...
    def add_remote_agent(self, metadata: bytes) -> bytes: ...
    def remove_remote_agent(self, agent: str) -> None: ...
    def initialize_xfer(self, operation: str, local: object, remote: object, remote_agent: str) -> _Transfer: ...
    def transfer(self, handle: _Transfer) -> str: ...
    def check_xfer_state(self, handle: _Transfer) -> str: ...
    def get_new_notifs(self) -> object: ...


_made: list[tuple[int, _Agent]] = []  # by process id: this process, or the one that it was forked from


def nixl_name() -> str:
    """Returns the name under which NIXL can be imported; "" where it is not installed. Imports nothing."""
    return next((name for name in _PACKAGES if importlib.util.find_spec(name) is not None), "")


def verbs_available() -> bool:
    """Returns whether this process can use an RDMA device."""
    return bool(nixl_name() and rdma_devices())


class Fabric:
    """The NIXL agent of a process. Thread-safe; methods that drive the agent raise LinkCutError."""

    def __init__(self, process: str) -> None:
        self.name = f"{process}#{os.getpid()}-{secrets.token_hex(4)}"  # unique among all processes at the address
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._agent: _Agent | None = None
        self._closed = False
        self._numbers = itertools.count(_OF_THIS_PROCESS)

    def check(self, *, asked_for: bool) -> None:
        """Raises CannotReachError without NIXL, or without a device unless the settings name this mover.

        Without a device UCX, the library below NIXL, uses the kernel inside a machine, and TCP between two.
        """
        if self._pid != os.getpid():
            raise CannotReachError(_FORKED)
        if self._agent is None and not nixl_name():
            raise CannotReachError("NIXL is not installed (pip install 'monarch-nb[rdma]')")
        if not asked_for and not rdma_devices():
            raise CannotReachError("there is no RDMA device (/dev/infiniband/uverbs*)")

    def register(self, memory: Memory, number: int = 0) -> Span:
        """Registers memory with the device, as region `number` or for one transfer. Raises CannotReachError."""
        span = (memory.address, memory.size, number or next(self._numbers))
        with self._using() as agent:
            try:
                agent.register_memory(agent.get_reg_descs([(*span, "")], _HOST))
            except Exception as error:
                raise CannotReachError(f"{memory.size:,} bytes cannot be registered: {_text(error)}") from None
        return span

    def deregister(self, span: Span) -> None:
        """Deregisters memory from the device."""
        with contextlib.suppress(Exception), self._using() as agent:
            agent.deregister_memory(agent.get_reg_descs([(*span, "")], _HOST))

    def connection_data(self, spans: Sequence[Span]) -> bytes:
        """Returns the data with which another process connects to these spans."""
        with self._using() as agent:
            return agent.get_partial_agent_metadata(
                agent.get_reg_descs([(*span, "") for span in spans], _HOST), True, ["UCX"]
            )

    def connect(self, peer: str, data: bytes) -> None:
        """Adds a peer by the result of its `connection_data`. Raises CannotReachError."""
        if peer == self.name:
            return
        with self._using() as agent:
            try:
                agent.add_remote_agent(data)
            except Exception as error:
                raise CannotReachError(f"the two ends have no transport in common: {_text(error)}") from None

    def forget(self, peer: str) -> None:
        """Ends the connection to a process and its transfers."""
        with contextlib.suppress(Exception), self._using() as agent:
            agent.remove_remote_agent(peer)

    def start(self, peer: str, local: Sequence[Span], remote: Sequence[Span], *, write: bool) -> "Transfer":
        """Begins to move bytes between memory of this process and of another, span by span."""
        with self._using() as agent, _named():
            source, target = agent.get_xfer_descs(local, _HOST), agent.get_xfer_descs(remote, _HOST)
            handle = agent.initialize_xfer("WRITE" if write else "READ", source, target, peer)
            return Transfer(self, handle)

    def drive(self) -> None:
        """Polls the agent, so that peers can connect."""
        with contextlib.suppress(Exception), self._using() as agent:
            agent.get_new_notifs()

    def close(self) -> None:
        """Releases the agent."""
        with self._lock:
            agent, self._agent, self._closed = self._agent, None, True
            _made[:] = [entry for entry in _made if entry[1] is not agent]

    @contextlib.contextmanager
    def _using(self) -> Iterator[_Agent]:
        with self._lock:
            if self._closed:
                raise CannotReachError("this process leaves the cluster")
            if self._agent is None:
                self._agent = _make(self.name)
            yield self._agent


class Transfer:
    """A transfer in progress."""

    def __init__(self, fabric: Fabric, handle: _Transfer) -> None:
        self._fabric, self._handle = fabric, handle
        self._posted = False

    def over(self) -> bool:
        """Returns whether all bytes have arrived; drives the agent. Raises LinkCutError."""
        with self._fabric._using() as agent, _named():
            state = agent.check_xfer_state(self._handle) if self._posted else agent.transfer(self._handle)
            self._posted = True
        if state not in ("DONE", "PROC"):
            raise LinkCutError(f"NIXL says {state}")
        return state == "DONE"

    def release(self) -> bool:
        """Releases the transfer; False if its bytes are in flight."""
        with self._fabric._using():
            try:
                self._handle.release()
            except Exception:
                return False
        return True


@contextlib.contextmanager
def _named() -> Iterator[None]:
    """Turns all errors of NIXL, which share no class, into LinkCutError."""
    try:
        yield
    except Exception as error:
        raise LinkCutError(_text(error)) from None


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _make(name: str) -> _Agent:
    """Creates an agent: loads libraries and looks for devices, for half a second. Raises CannotReachError."""
    if any(process != os.getpid() for process, _ in _made):
        raise CannotReachError(_FORKED)
    package = nixl_name()
    if not package:
        raise CannotReachError("NIXL is not installed (pip install 'monarch-nb[rdma]')")
    # The wheel has libraries of its own beside the system's. Where the system's were loaded first, the two do not share
    # their registrations, and the process exits without a crash.
    with contextlib.suppress(OSError):
        ctypes.CDLL("libibverbs.so.1")
    with _environment(_ENVIRONMENT | ({"UCX_TLS": "^tcp"} if rdma_devices() else {})):
        try:
            nixl = importlib.import_module(f"{package}._api")
            logging.getLogger("nixl").setLevel(logging.ERROR)  # else it prints messages of success
            config = nixl.nixl_agent_config(
                enable_prog_thread=False, backends=["UCX"], sync_mode=nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
            )
            agent = cast("_Agent", nixl.nixl_agent(name, config))
        except Exception as error:
            raise CannotReachError(f"NIXL does not start: {_text(error)}") from None
    _made.append((os.getpid(), agent))
    return agent


@contextlib.contextmanager
def _environment(words: dict[str, str]) -> Iterator[None]:
    """Sets environment variables while libraries start, unless they are set already."""
    mine = {name: word for name, word in words.items() if name not in os.environ}
    os.environ.update(mine)
    try:
        yield
    finally:
        for name in mine:
            os.environ.pop(name, None)


def _forked() -> None:
    """Keeps the child from ending what the libraries have begun in its parent."""
    for _, agent in _made:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(agent.agent))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
