"""The command line of a host agent."""

import argparse
import os
import platform
import re
import stat
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from monarch_nb._package import more
from monarch_nb.host.folders import lasting_host_id, new_host_id, run_folder_for
from monarch_nb.host.protocol import AgentReady
from monarch_nb.settings import positive_seconds
from monarch_nb.transport import split

UNUSED = 4  # the exit status of an agent that has ended because it was not used
UNUSED_WORDS = "no program has used this host for"  # the last words of a worker that ends by itself


class Options(Struct, frozen=True):
    """The command-line options of an agent."""

    host: str
    run_folder: Path
    owner_fd: int | None
    ready_fd: int
    tcp: str | None
    tcp_fd: int | None
    dial: str | None
    key: Path | None
    insecure_loopback: bool
    lease_s: float
    prewarm: bool
    bound: bool  # True if it ends with its owner even if controllers have left meshes here
    keep_folder: bool
    unused_s: float | None = None
    terminal: bool = False  # True if a user started it in a terminal, and may press Ctrl-C


_EXAMPLE = (
    "Example: --tcp tcp://0.0.0.0:22222 --key job.key --keep. It makes the key file if there is none; controllers that "
    "have the same file may use this machine."
)


def parse(argv: Sequence[str], prog: str = "python -m monarch_nb.host") -> Options:
    """Reads the command line; prints usage and exits if it is wrong."""
    parser = argparse.ArgumentParser(prog=prog, description="Run a Monarch host agent.", epilog=_EXAMPLE)
    parser.add_argument(
        "--host",
        type=_host,
        help="id of this host (default: a new one; with --keep and a fixed port, the same at each start)",
    )
    parser.add_argument("--run-folder", type=Path, help="private folder for sockets and logs (default: a new one)")
    parser.add_argument("--tcp", help="also listen here, such as tcp://0.0.0.0:0")
    parser.add_argument("--tcp-fd", type=int, help="also listen on the bound socket of this descriptor")
    parser.add_argument(
        "--dial", help="join the controller that accepts hosts at this address, such as tcp://login:22222"
    )
    parser.add_argument("--key", type=Path, help="key file for TCP")
    parser.add_argument("--insecure-loopback", action="store_true", help="allow TCP without a key, on loopback only")
    parser.add_argument("--owner-fd", type=int, default=0, help="end when this pipe closes (default: stdin)")
    parser.add_argument(
        "--keep",
        action="store_true",
        help="keep running when a controller ends; its processes end once it is silent for --lease-s",
    )
    parser.add_argument(
        "--ready-fd", type=int, default=1, help="descriptor to write to when the agent is ready (default: stdout)"
    )
    parser.add_argument(
        "--lease-s",
        type=positive_seconds,
        default=60.0,
        help="seconds after which the processes of a silent controller end (default: 60)",
    )
    parser.add_argument("--unused-s", type=positive_seconds, help="end once no controller has used it for so long")
    parser.add_argument("--bound", action="store_true", help="end with the owner at once, with all that is here")
    parser.add_argument("--prewarm", action="store_true", help="start the template process at once")
    parser.add_argument("--keep-folder", action="store_true", help="leave the run folder behind, to read the logs")
    args = parser.parse_args(argv)
    for option in ("tcp", "dial"):
        if problem := _wrong_address(getattr(args, option), bind=option == "tcp"):
            parser.error(f"--{option} {problem}")
    if (args.tcp or args.dial) and args.key is None and not args.insecure_loopback:
        parser.error(
            f"{'--tcp' if args.tcp else '--dial'} needs --key FILE, with a file that the controller has, too: it is "
            f"made if it is missing{more('manual/hosts.md#who-is-trusted')}"
        )
    if not args.keep and not _has_end(args.owner_fd):
        parser.error(
            "it ends when its standard input does, which is no pipe and no terminal here (as with nohup or systemd): "
            "--keep has it run on"
        )
    try:
        os.fstat(args.ready_fd)
    except OSError:
        parser.error(f"--ready-fd {args.ready_fd} is no open descriptor")
    if args.run_folder is not None and _has_other_files(args.run_folder):
        parser.error(f"--run-folder {args.run_folder} goes with the agent, and has other files: name a new one")
    host = args.host or (lasting_host_id(args.tcp) if args.keep else None) or new_host_id()
    return Options(
        host=host, run_folder=(args.run_folder or run_folder_for(host)).absolute(), tcp=args.tcp,
        tcp_fd=args.tcp_fd, dial=args.dial, key=args.key,
        insecure_loopback=args.insecure_loopback,
        owner_fd=None if args.keep else args.owner_fd, ready_fd=args.ready_fd, lease_s=args.lease_s,
        prewarm=args.prewarm, bound=args.bound, keep_folder=args.keep_folder, unused_s=args.unused_s,
        terminal=os.isatty(0) and os.isatty(args.ready_fd),
    )  # fmt: skip


def _wrong_address(endpoint: str | None, *, bind: bool) -> str:
    """Returns the error in an endpoint, or ""; a port of 0 is any free one where it is bound."""
    if endpoint is None:
        return ""
    try:
        split(endpoint.removesuffix(":0") + ":1" if bind and endpoint.endswith(":0") else endpoint)
    except ValueError:
        example = "tcp://0.0.0.0:22222" if bind else "tcp://login:22222"
        return f"{endpoint}: write a scheme, an address and a port, such as {example}"
    return ""


def _host(text: str) -> str:
    """Returns an id that can be part of addresses, and of the name of a folder."""
    if not re.fullmatch(r"[A-Za-z0-9_~-][A-Za-z0-9_.~-]*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no id: take letters, digits, and - _ . within")
    return text


def _has_other_files(folder: Path) -> bool:
    """Returns whether a folder has content, and was not made as a run folder."""
    try:
        content = os.listdir(folder)
    except OSError:
        return False  # whoever makes it says what is wrong
    return bool(content) and not {"logs", "spool"} <= {*content}


def _has_end(fd: int) -> bool:
    """Returns whether the close of the other end of a descriptor can be noticed: of a pipe, a socket or a terminal."""
    try:
        mode = os.fstat(fd).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(fd)


def ready_text(options: Options, ready: AgentReady) -> str:
    """Returns the text for a user at a terminal once the agent runs."""
    lines = [f"Host agent {ready.host} runs (process {ready.pid}). Ctrl-C ends it, and all processes on it."]
    if ready.endpoint is not None:
        key = f', key="{options.key}"' if options.key is not None else ", insecure_loopback=True"
        name = ready.endpoint.replace("0.0.0.0", platform.node())
        lines.insert(0, f'Attach to this machine with: attach_hosts(["{name}"]{key})')
    if options.dial is not None:
        lines.insert(0, f"It joins the controller at {options.dial} as soon as that accepts hosts.")
    return "\n".join(lines)
