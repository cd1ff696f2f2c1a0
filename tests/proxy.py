"""A TCP connection through a proxy that can cut it."""

import contextlib
import socket
import threading
from collections.abc import Iterator


class Proxy:
    """Passes a TCP connection on, counts its bytes, and can be cut."""

    def __init__(self, target: str) -> None:
        self._target = int(target.rpartition(":")[2])
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.endpoint = f"tcp://127.0.0.1:{self.port}"
        self.sent = 0  # bytes towards the target
        self.is_cut = False
        self.swallows = False
        self._passes = threading.Event()  # data that is not passed on waits, as in a proxy that buffers
        self._passes.set()
        self._open: list[socket.socket] = []
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._accept, name="proxy")]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                try:
                    if self.is_cut:
                        raise OSError("cut")
                    server = socket.create_connection(("127.0.0.1", self._target))
                except OSError:
                    client.close()
                    continue
                self._open += [client, server]
                for source, sink, outward in ((client, server, True), (server, client, False)):
                    thread = threading.Thread(target=self._pump, args=(source, sink, outward), name="proxy")
                    thread.start()
                    self._threads.append(thread)

    def _pump(self, source: socket.socket, sink: socket.socket, outward: bool) -> None:
        with contextlib.suppress(OSError):
            for data in self._all(source) if outward else self._from(source):
                if outward:
                    self.sent += len(data)
                self._passes.wait()
                if not self.swallows:
                    sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    @staticmethod
    def _all(source: socket.socket) -> Iterator[bytes]:
        while data := source.recv(1 << 18):
            yield data

    def _from(self, source: socket.socket) -> Iterator[bytes]:
        """Data from the target, in pieces."""
        return self._all(source)

    def cut(self) -> None:
        """No connection lives, and none comes about, until `mend`."""
        with self._lock:
            self.is_cut = True
            for end in self._open:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def reset(self) -> None:
        """No connection lives, and data under way is lost; new ones come about."""
        with self._lock:
            for end in self._open:
                with contextlib.suppress(OSError):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                    end.shutdown(socket.SHUT_RDWR)

    def narrow(self) -> None:
        """Connections that come about from now on take little that is not passed on yet."""
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)

    def swallow(self) -> None:
        """Connections live, and deliver nothing any more."""
        self.swallows = True

    def hold(self) -> None:
        """Connections live, and data waits until `release`, when all of it goes on at once."""
        self._passes.clear()

    def release(self) -> None:
        self._passes.set()

    def mend(self) -> None:
        self.is_cut = False

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.release()
        self.cut()
        for thread in self._threads:
            thread.join()
        for end in self._open:
            end.close()
