"""Bulk: one buffer from one process to another, by memory file, in band, and over TCP with and without encryption."""

import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from monarch_nb.transport import Keys, Node, Parcel
from monarch_nb.wire.header import Header, Kind

MIB = int(os.environ.get("MIB", "256"))
COUNT = 6


def failed(header: Header, parcel: Parcel, reason: str) -> None:
    print("failed", header.kind, reason, flush=True)


def server(folder: str, key: str, bind: str) -> None:
    def handle(header: Header, parcel: Parcel) -> None:
        size = len(parcel.frames[1])
        node.send(Header(Kind.REPLY, header.src, header.dst, index=size), node.snapshot([b""]))
        node.consumed(parcel)

    options = {"tcp_bind": bind, "keys": Keys.load(key) if key else None, "insecure_loopback": True} if bind else {}
    node = Node(
        "h1/agent", run_folders={} if bind else {"h1": Path(folder)}, handler=handle, on_link_failed=failed, **options
    )
    node.start()
    print(node.tcp_endpoint, flush=True)
    threading.Event().wait()


def measure(name: str, *, tcp: bool = False, encrypted: bool = False, portable: bool = False) -> None:
    with tempfile.TemporaryDirectory() as folder:
        key = f"{folder}/key" if encrypted else ""
        keys = Keys.load_or_create(key) if encrypted else None
        os.environ["MONARCH_NB_PORTABLE"] = str(int(portable))
        arguments = [sys.executable, __file__, folder, key, "tcp://127.0.0.1:*" if tcp else ""]
        child = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        endpoint = child.stdout.readline().strip()
        arrived = threading.Semaphore(0)
        node = Node(
            "h0/c" if tcp else "h1/c",
            run_folders={} if tcp else {"h1": Path(folder)},
            handler=lambda header, parcel: arrived.release(),
            on_link_failed=failed,
            keys=keys,
            insecure_loopback=True,
        )
        node.start()
        if tcp:
            node.learn("h1", endpoint)
        data = bytearray(MIB << 20)
        seconds = []
        for _ in range(COUNT):
            start = time.perf_counter()
            node.send(Header(Kind.CALL, "h1/agent", node.address), node.snapshot([b"p", data]))
            arrived.acquire()
            seconds.append(time.perf_counter() - start)
        node.close()
        child.kill()
        child.wait()
        seconds.sort()
        best, middle = (len(data) / 1e9 / value for value in (seconds[0], seconds[len(seconds) // 2]))
        print(f"{name:34s} {MIB} MiB: best {best:5.2f} GB/s, median {middle:5.2f} GB/s, snapshot included", flush=True)


def main() -> None:
    measure("ipc, memory file")
    measure("ipc, in band", portable=True)
    measure("tcp", tcp=True)
    measure("tcp, encrypted", tcp=True, encrypted=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server(*sys.argv[1:])
    else:
        main()
