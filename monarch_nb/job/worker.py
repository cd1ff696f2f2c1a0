"""One host of a job: a process that keeps a host agent at an address, or at any port, which it tells."""

import argparse
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from monarch_nb.connect import run_worker_until_killed
from monarch_nb.host.preemption import END
from monarch_nb.job.notice import of_engine
from monarch_nb.job.report import own_addresses, report, write_report
from monarch_nb.wire import json_decoder

ANY = "tcp://0.0.0.0:0"
_LARGEST = 4096
_LAUNCHER_S = 1.0


class Wanted(msgspec.Struct, frozen=True):
    """A host in such a list."""

    name: str
    env: dict[str, str] = {}


def main(argv: Sequence[str]) -> int:
    """Be a worker until the host is shut down, or killed."""
    parser = argparse.ArgumentParser(prog="python -m monarch_nb.job.worker", description=__doc__)
    parser.add_argument("address", nargs="?", default=ANY, help="where to listen (default: any port, which is told)")
    parser.add_argument("--key", help="the file with the job's key; - reads it from stdin")
    parser.add_argument("--report", type=Path, help="the file in which to tell where this agent is met")
    parser.add_argument("--folder", type=Path, help="the job's folder, which all hosts share: it has the key")
    parser.add_argument("--wanted", default="wanted.json", help="the file in it that lists the hosts by rank")
    parser.add_argument("--rank-from", default="", help="environment variables that may say which of them this is")
    parser.add_argument("--known-as", default="", help="the name by which others know this machine")
    parser.add_argument("--keep", type=float, help="end once no program has used this host for so many seconds")
    parser.add_argument("--bound", action="store_true", help="end with the process that has started this one")
    given = parser.parse_args(argv)
    key, told = given.key, given.report
    if given.folder is not None:
        rank = next(int(os.environ[name]) for name in given.rank_from.split(",") if name in os.environ)
        me = json_decoder(list[Wanted]).decode((given.folder / given.wanted).read_bytes())[rank]
        os.environ.update(me.env)
        key, told = given.folder / "key", given.folder / f"{me.name}.json"
    if given.bound or given.folder is not None:
        threading.Thread(target=_end_with, args=(os.getppid(),), name="monarch-launcher", daemon=True).start()
    _work(given.address, _secret(key), told, os.path.expandvars(given.known_as), given.keep)
    return 0


def _end_with(launcher: int) -> None:
    """Ends this process when the engine's own on this machine has ended without a word."""
    while os.getppid() == launcher:
        time.sleep(_LAUNCHER_S)
    os.kill(os.getpid(), END)


def _secret(key: "str | Path | None") -> bytes | Path | None:
    """The job's key: a launcher's secret may be a link into a read-only mount, whose mode is the launcher's matter."""
    if key == "-":
        return sys.stdin.buffer.read(_LARGEST)
    if key is None:
        return None
    path = Path(key)
    return path.read_bytes() if path.is_symlink() else path


def _work(address: str, key: bytes | Path | None, told: Path | None, known_as: str, keep: float | None) -> None:
    host, _, port = address.rpartition(":")
    joins: tuple[str, ...] = (address,)
    if port == "0":
        door = socket.create_server((host.removeprefix("tcp://"), 0))
        joins, address = own_addresses(door.getsockname()[1], known_as), f"{host}:fd{door.detach()}"
    elif host.startswith("tcp://"):
        joins = own_addresses(int(port), known_as)

    def tell(host: str) -> None:
        if told is not None:
            write_report(told, report(host, joins))

    run_worker_until_killed(address, key, ready=tell, unused_s=keep, find_out=of_engine)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
