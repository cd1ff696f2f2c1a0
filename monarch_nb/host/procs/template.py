"""The template process: makes the imports of every proc, then forks for each one. Single-threaded, or it refuses.

Importing torch takes a second. So that the first procs need not wait for it, the agent's own process, before it has any
threads, forks a light template, which has the engine only; that one forks the template proper, which imports the rest.

Protocol, on one unix socket with the agent: a request is one 4-byte count with that many descriptors (the far ends of
channels); the template sends one JSON line when ready, then one "+" for each request done. A count of zero before that
line makes the template proper import at once; without it, it leaves the processors to the first procs for a moment.
Each child sends on its own channel from its first moment, so nothing is lost whoever dies in between. A child's parent
leaves at once: the agent, as the nearest subreaper, adopts it.
"""

import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import traceback
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from msgspec import Struct

from monarch_nb.host.linux import close_other_fds, die_with_pipe, name_process, portable, thread_count
from monarch_nb.host.procs.environment import PRELOAD, held_back, install

ENGINE = ("msgspec", "cloudpickle", "monarch_nb.runtime", "monarch_nb.transport", "monarch_nb.supervision",
          "monarch_nb.engine.worker", "monarch_nb.host.procs.proc_main")  # fmt: skip
AT_FIRST_USE = ("asyncio", "monarch_nb.transport.tcp.listener")  # async actors, and other hosts with ZeroMQ
QUICK = frozenset({"numpy"})  # takes a tenth of a second, so no process waits for it
# What sharded tensors and the first optimizer of a training program import, two seconds of work: done piece by piece
# while there are no requests.
WORTH_IMPORTING_LATER = (
    "sympy",
    "torch.distributed.tensor",
    "monarch_nb.tensor.workers.actor",
    "torch._inductor.config",
    "torch._functorch.aot_autograd",
    "torch._dynamo",
)
HOLD_S = 0.1  # before the template proper imports, so that the first proc starts and answers meanwhile
REQUEST_S = 0.002  # for a request that waits in the agent
QUIET_S = 0.5  # that long without a request before the next piece
BATCH = 16  # descriptors in one request; the kernel allows 253


class EarlyTemplates(Struct, frozen=True):
    """Templates that were forked before the agent started: the agent's ends of their control sockets."""

    pid: int  # of the light one
    light: socket.socket | None  # None for the template proper, with nothing more to import
    full: socket.socket


def main(argv: Sequence[str]) -> int:
    """Serves until the agent has ended; in a forked child, becomes a process and returns its exit status."""
    control = socket.socket(fileno=int(argv[0]))
    control.set_inheritable(False)
    cord = int(argv[1])
    _settle(cord)
    return _import_and_serve(control, cord)


def fork_early(cord: int, log: Path) -> "EarlyTemplates | int":
    """Forks the light template, and from it the template proper, off the process that is about to become the agent.

    Returns twice: in the agent the early templates; in a template, or a proc forked from it, once that has ended, its
    exit status. Raises OSError.
    """
    full, far_full = socket.socketpair()
    light, far_light = socket.socketpair() if worth_importing() else (None, None)
    pid = os.fork()
    if pid:
        for far in (far_full, far_light):
            if far is not None:
                far.close()
        return EarlyTemplates(pid, light, full)
    try:
        for end in (full, light):
            if end is not None:
                end.close()
        return _be_early(far_full, far_light, cord, log)
    except Exception:  # this must never go on as another agent
        traceback.print_exc()
        return 1


def _be_early(full: socket.socket, light: socket.socket | None, cord: int, log: Path) -> int:
    """Runs the forked process, which inherits only the cord from the agent."""
    os.setsid()
    with open(log, "ab") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    close_other_fds({cord, full.fileno(), full.fileno() if light is None else light.fileno()})
    _settle(cord)
    if light is None:
        return _import_and_serve(full, cord)
    import_all(ENGINE)
    # The first proc waits for no other fork; there is hardly any garbage to collect.
    return _serve_all(light, cord, [], [partial(_fork_full, full, cord, light)], REQUEST_S)


def can_fork_early() -> bool:
    """Returns whether this process may fork children that go on as templates."""
    return not portable() and thread_count() == 1


def _fork_full(control: socket.socket, cord: int, light: socket.socket) -> None:
    """Forks the template proper, as an orphan for the agent to adopt. Returns in the light template alone."""
    middle = os.fork()
    if middle:
        control.close()
        os.waitpid(middle, 0)
        return
    if os.fork():
        os._exit(0)
    light.close()
    os.setsid()
    die_with_pipe(cord)
    install(held_back(os.environ))
    control.sendall(json.dumps({"pid": os.getpid()}).encode() + b"\n")
    select.select([control], [], [], HOLD_S)
    os._exit(_import_and_serve(control, cord))


def _settle(cord: int) -> None:
    die_with_pipe(cord)
    for signum in (signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    name_process("mnb-template")


def _import_and_serve(control: socket.socket, cord: int) -> int:
    preloads = worth_importing()
    imported = import_all((*ENGINE, *AT_FIRST_USE, *preloads) if preloads else ENGINE)
    deferred = WORTH_IMPORTING_LATER if "torch" in imported else () if preloads else AT_FIRST_USE
    gc.collect()
    return _serve_all(control, cord, imported, [partial(_import_later, name) for name in deferred], QUIET_S)


def _serve_all(
    control: socket.socket, cord: int, imported: list[str], pending: list[Callable[[], None]], quiet_s: float
) -> int:
    _share()
    hello = {"pid": os.getpid(), "threads": thread_count(), "imported": imported}
    control.sendall(json.dumps(hello).encode() + b"\n")
    channel = _serve(control, cord, pending, quiet_s)
    if channel is None:
        return 0
    control.close()
    from monarch_nb.host.procs.proc_main import leave, run

    last = next(reversed(sys.modules))
    return leave(run(channel, cord, forked=True), last)


def worth_importing() -> list[str]:
    """Returns the modules that templates import: torch and numpy, unless the environment names others."""
    return [name.strip() for name in os.environ.get(PRELOAD, "numpy,torch").split(",") if name.strip()]


def import_all(names: Sequence[str]) -> list[str]:
    """Imports those of `names` that exist, and returns them. Errors are left for the processes."""
    done = []
    thresholds = gc.get_threshold()
    gc.set_threshold(0)  # imports leave little garbage, and searching for it is a tenth of torch's
    for name in names:
        try:
            importlib.import_module(name)
            done.append(name)
        except Exception as error:
            if not isinstance(error, ModuleNotFoundError):
                sys.stderr.write(f"template: {name}: {error!r}\n")
    if gc.get_threshold()[0] == 0:  # else a module has set its own
        gc.set_threshold(*thresholds)
    return done


def _share() -> None:
    """Keeps the garbage collector and the finalizers of imported modules from writing to pages that processes share.

    torch undoes the registration of its operators at the end of an interpreter: 40 ms for each proc, which is about to
    end anyway. Finalizers that a proc makes itself run as ever.
    """
    gc.freeze()
    for finalizer in tuple(vars(weakref.finalize).get("_registry", ())):  # Python has no public list of them
        finalizer.atexit = False


def _import_later(name: str) -> None:
    import_all([name])
    gc.collect()
    _share()


def _serve(
    control: socket.socket, cord: int, pending: list[Callable[[], None]], quiet_s: float = QUIET_S
) -> int | None:
    """Forks for each request. Returns a channel in a child, None in the template once the agent has ended.

    Whenever there was no request for `quiet_s`, the next of `pending` is called.
    """
    while True:
        while pending and not select.select([control], [], [], quiet_s)[0]:
            pending.pop(0)()
        data, fds, _, _ = socket.recv_fds(control, 4, BATCH)
        if not data:
            return None
        if not fds:
            continue
        child = _fork_batch(fds, cord)
        if child is not None:
            return child
        for fd in fds:
            os.close(fd)
        control.send(b"+")


def _fork_batch(channels: list[int], cord: int) -> int | None:
    """Forks a middle process that forks one child for each channel. Returns the channel in a child."""
    try:
        middle = os.fork()
    except OSError as error:
        _complain(channels, error)
        return None
    if middle:
        os.waitpid(middle, 0)
        return None
    for index, channel in enumerate(channels):
        try:
            child = os.fork()
        except OSError as error:
            _complain(channels[index:], error)
            break
        if child == 0:
            os.setsid()  # before the first message: from then on the agent signals the group,
            die_with_pipe(cord)  # and may be killed itself, whatever the state of this process
            os.write(channel, f"pid {os.getpid()}\n".encode())
            return channel
        os.close(channel)
    os._exit(0)


def _complain(channels: Sequence[int], error: OSError) -> None:
    for channel in channels:
        os.write(channel, f"error {error.strerror or error}\n".encode())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
