"""The ZeroMQ sockets that we use, with their options, in one place."""

import os
import stat
from pathlib import Path
from typing import Any

import zmq
from zmq.backend import Socket as _Raw

from monarch_nb.transport.errors import TransportError, TrustError, descriptor_limit, is_descriptor_limit

_recv = _Raw.recv
_get = _Raw.get
_RCVMORE = int(zmq.RCVMORE)
_NOBLOCK = int(zmq.NOBLOCK)
_PATH_MAX = 100  # bytes of a unix socket's path, with a little room (107 on Linux, 103 on macOS)
_BACKLOG = 2048
_RECONNECT_MS = 3
_RECONNECT_MAX_MS = 200
_LINGER_MS = 1000


def new_context() -> "zmq.Context[zmq.Socket[bytes]]":
    """A context for one node."""
    try:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        context.set(zmq.MAX_SOCKETS, min(65535, context.get(zmq.SOCKET_LIMIT)))  # 1023 otherwise
    except zmq.ZMQError as error:
        raise _limit(error, "the message layer") from error
    return context


def listen_ipc(context: "zmq.Context[zmq.Socket[bytes]]", folder: Path, name: str) -> "zmq.Socket[bytes]":
    """A ROUTER in a run folder, which is created if need be and must be private."""
    private_folder(folder)
    endpoint = ipc_endpoint(folder, name)
    router = _socket(context, zmq.ROUTER, "the listening socket")
    try:
        router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.BACKLOG, _BACKLOG)
        router.bind(endpoint)
    except zmq.ZMQError as error:
        router.close(0)
        raise _cannot_bind(error, endpoint) from error
    return router


def dial(context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str, routing_id: str) -> "zmq.Socket[bytes]":
    """A DEALER connected to `endpoint`, which need not be there yet."""
    dealer = _socket(context, zmq.DEALER, f"a connection to {endpoint}")
    try:
        dealer.setsockopt(zmq.ROUTING_ID, routing_id.encode())
        dealer.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        dealer.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
        dealer.connect(endpoint)
    except BaseException:
        dealer.close(0)
        raise
    return dealer


def read(router: "zmq.Socket[bytes]") -> tuple[bytes, bytes, list[Any]] | None:
    """One message of a ROUTER as (routing id, frame 0, further frames), or None when there is none."""
    try:
        routing_id: Any = _recv(router, _NOBLOCK, True, False)
    except zmq.Again:
        return None
    frame0: Any = _recv(router, _NOBLOCK, True, False) if _get(router, _RCVMORE) else b""
    frames: list[Any] = []
    while _get(router, _RCVMORE):
        frames.append(_recv(router, _NOBLOCK, True, False))
    return routing_id, frame0, frames


def ipc_endpoint(folder: Path, name: str) -> str:
    """Where process `name` of the host with this run folder listens."""
    path = os.fspath(folder / name)
    if len(os.fsencode(path)) >= _PATH_MAX:
        raise TransportError(
            f"the socket path {path} is too long for this system: choose a shorter run folder "
            "(XDG_RUNTIME_DIR or TMPDIR)"
        )
    return f"ipc://{path}"


def private_folder(folder: Path) -> None:
    """Create a run folder that nobody else can enter, or check that it is one. Raises TrustError."""
    try:
        folder.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        pass
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise TrustError(f"{folder} is not a folder of its own: refusing to listen there")
    if found.st_uid != os.geteuid():
        raise TrustError(
            f"{folder} belongs to user {found.st_uid}: refusing to listen there; choose another run folder"
        )
    if found.st_mode & 0o077:
        raise TrustError(
            f"{folder} can be entered by others (mode {stat.S_IMODE(found.st_mode):o}): "
            "refusing to listen there; `chmod 700` it if it is yours"
        )


def _socket(context: "zmq.Context[zmq.Socket[bytes]]", kind: int, what: str) -> "zmq.Socket[bytes]":
    try:
        socket = context.socket(kind)
    except zmq.ZMQError as error:
        raise _limit(error, what) from error
    socket.setsockopt(zmq.SNDHWM, 0)  # nothing is ever dropped silently: our own credits keep queues short
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, _LINGER_MS)
    return socket


def _limit(error: zmq.ZMQError, what: str) -> TransportError:
    if is_descriptor_limit(None, error.errno):
        return descriptor_limit(what)
    return TransportError(f"cannot open {what}: {error}")


def _cannot_bind(error: zmq.ZMQError, endpoint: str) -> TransportError:
    if is_descriptor_limit(None, error.errno):
        return descriptor_limit(f"listening on {endpoint}")
    return TransportError(f"cannot listen on {endpoint}: {error}")
