"""The unix socket, in a run folder, on which processes of this host connect to this one."""

import contextlib
import errno
import os
import socket
import struct
from collections.abc import Callable

from monarch_nb.transport.errors import TransportError, descriptor_limit, is_descriptor_limit
from monarch_nb.transport.reader import Reader
from monarch_nb.transport.streams import NO_ROOM


class UnixListener:
    """A listening unix socket in a run folder; all callers belong to the same user."""

    def __init__(self, path: str, backlog: int, reader: Reader, connected: Callable[[socket.socket], None]) -> None:
        """`connected` gets each new connection, on the reading thread. Raises TransportError, DescriptorLimitError."""
        try:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            if is_descriptor_limit(error):
                raise descriptor_limit(f"listening on {path}") from error
            raise TransportError(f"cannot listen on {path}: {error}") from error
        try:
            _clear(path)
            self._socket.bind(path)
            self._socket.listen(backlog)
        except OSError as error:
            self._socket.close()
            os.close(self._spare)
            raise TransportError(f"cannot listen on {path}: {error.strerror or error}") from error
        self._socket.setblocking(False)
        self._reader, self._connected = reader, connected
        self._fd = self._socket.fileno()
        reader.watch(self._fd, self._accept)

    def _accept(self) -> bool:
        try:
            connection, _ = self._socket.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._turn_away()
            return False
        if _same_user(connection):
            self._connected(connection)
        else:
            connection.close()
        return True

    def _turn_away(self) -> None:
        """Sends a caller an error, since no descriptors are left."""
        self._give_up_spare()
        with contextlib.suppress(OSError), self._socket.accept()[0] as connection:
            connection.sendall(NO_ROOM)
        with contextlib.suppress(OSError):
            self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _give_up_spare(self) -> None:
        """Closes the spare descriptor, once only: another thread may reuse its number, and would lose that."""
        spare, self._spare = self._spare, -1
        if spare >= 0:
            os.close(spare)

    def close(self) -> None:
        """Closes the socket; after the reading thread has ended."""
        self._reader.unwatch(self._fd)
        self._socket.close()
        self._give_up_spare()


def _same_user(connection: socket.socket) -> bool:
    """Returns whether the caller is this user's, in addition to the folder's permissions."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return user in (os.geteuid(), 0)


def _clear(path: str) -> None:
    """Removes the socket of a killed process. Raises OSError if somebody listens there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        caller.setblocking(False)
        try:
            caller.connect(path)
        except FileNotFoundError:
            return
        except BlockingIOError:  # a full backlog belongs to a listener
            pass
        except OSError:
            os.unlink(path)
            return
    raise OSError(errno.EADDRINUSE, "another process listens there")
