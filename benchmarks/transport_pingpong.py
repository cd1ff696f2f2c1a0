"""Round trip of 64 bytes between two processes: Node.send, handler, Node.send, handler; beside bare pyzmq."""

import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import zmq

from monarch_nb.transport import Node, Parcel
from monarch_nb.wire.header import Header, Kind

COUNT = int(os.environ.get("N", "5000"))
BODY = b"x" * int(os.environ.get("SIZE", "64"))


def report(name: str, seconds: list[float]) -> None:
    seconds.sort()
    p50, p99 = seconds[len(seconds) // 2] * 1e6, seconds[int(len(seconds) * 0.99)] * 1e6
    print(f"{name:34s} p50 {p50:7.1f} us   p99 {p99:8.1f} us   min {seconds[0] * 1e6:6.1f} us", flush=True)


def bare_server(path: str) -> None:
    router = zmq.Context().socket(zmq.ROUTER)
    router.bind(f"ipc://{path}/bare")
    while True:
        router.send_multipart(router.recv_multipart())


def bare_client(path: str) -> None:
    dealer = zmq.Context().socket(zmq.DEALER)
    dealer.connect(f"ipc://{path}/bare")
    seconds = []
    for _ in range(COUNT):
        start = time.perf_counter()
        dealer.send(BODY)
        dealer.recv()
        seconds.append(time.perf_counter() - start)
    report("bare DEALER/ROUTER, blocking", seconds[COUNT // 10 :])


def failed(header: Header, parcel: Parcel, reason: str) -> None:
    print("failed", header, reason, flush=True)


def node_server(path: str) -> None:
    def handle(header: Header, parcel: Parcel) -> None:
        node.send(Header(Kind.REPLY, header.src, "h/b", port=header.port), node.snapshot(parcel.frames))
        node.consumed(parcel)

    node = Node("h/b", run_folders={"h": Path(path)}, handler=handle, on_link_failed=failed)
    node.start()
    threading.Event().wait()


def node_client(path: str) -> None:
    seconds: list[float] = []
    done = threading.Event()

    def ping() -> None:
        node.send(Header(Kind.CALL, "h/b", "h/a", method="ping", port=7), node.snapshot([BODY]))

    # On the reader's thread, without a hand-over to another one:
    def handle(header: Header, parcel: Parcel) -> None:
        nonlocal start
        node.consumed(parcel)
        now = time.perf_counter()
        seconds.append(now - start)
        start = now
        if len(seconds) < COUNT:
            ping()
        else:
            done.set()

    node = Node("h/a", run_folders={"h": Path(path)}, handler=handle, on_link_failed=failed)
    node.start()
    start = time.perf_counter()
    ping()
    done.wait()
    report("Node, handler to handler", seconds[COUNT // 10 :])
    node.close()

    # From a thread that waits for the answer, as a blocking .get() does:
    arrived = threading.Lock()
    arrived.acquire()

    def release(header: Header, parcel: Parcel) -> None:
        node.consumed(parcel)
        arrived.release()

    node = Node("h/a", run_folders={"h": Path(path)}, handler=release, on_link_failed=failed)
    node.start()
    seconds = []
    for _ in range(COUNT):
        start = time.perf_counter()
        ping()
        arrived.acquire()
        seconds.append(time.perf_counter() - start)
    report("Node, main thread waits", seconds[COUNT // 10 :])
    node.close()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("bare", "node", "bare", "node"):
            server = subprocess.Popen([sys.executable, __file__, f"{kind}_server", folder])
            try:
                globals()[f"{kind}_client"](folder)
            finally:
                server.kill()
                server.wait()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        globals()[sys.argv[1]](sys.argv[2])
    else:
        main()
