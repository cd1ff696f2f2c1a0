"""The first code of a process, forked or fresh: cleans up inherited state, then runs the runtime."""

import atexit
import builtins
import ctypes
import faulthandler
import importlib
import itertools
import os
import signal
import sys
import threading
import traceback
import types
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from monarch_nb.host.linux import (
    close_other_fds,
    die_first_for_memory,
    die_with_pipe,
    keep_freed_memory,
    name_process,
    open_fds,
)
from monarch_nb.host.procs.channel import AgentChannel
from monarch_nb.host.procs.environment import QUIET, install, overlaid, wanted_threads
from monarch_nb.host.protocol import ProcSpec
from monarch_nb.logs.journal import redirect
from monarch_nb.transport import interrupt_program
from monarch_nb.wire import flush_output, parse_address, repr_of, text_of

_references: list[object] = []
DESCRIPTORS = "MONARCH_NB_DESCRIPTORS"  # of channel and cord, for a command of the user's own
_SETTERS = ("scipy_openblas_set_num_threads64_", "scipy_openblas_set_num_threads", "openblas_set_num_threads64_",
            "openblas_set_num_threads")  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Entry of the cold path: the descriptors of the channel and of the agent's cord."""
    fd, cord = map(int, argv or os.environ.pop(DESCRIPTORS).split())
    die_with_pipe(cord)  # before the first message: the agent may be killed at any moment after it
    AgentChannel(fd).say("pid", os.getpid())
    return run(fd, cord, forked=False)


def run(fd: int, cord: int, *, forked: bool) -> int:
    """Runs a process until its runner returns; returns the exit status."""
    lifeline = die_with_pipe(cord)  # first: from here on nothing of this process outlives the agent
    die_first_for_memory()  # the agent, its template and the kernel matter more than a rank, which can be healed
    channel = AgentChannel(fd)
    try:
        keep = {fd} if lifeline is None else {fd, lifeline}
        spec = channel.read_spec(lambda path: _prepare(path, keep))
    except (EOFError, SystemExit):
        return 1
    _settle(spec, forked=forked, keep=keep)
    threading.Thread(target=channel.serve, args=(_end_with_agent,), name="monarch-agent-channel", daemon=True).start()
    try:
        return _function(spec.runner)(spec) or 0
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except BaseException:
        traceback.print_exc()
        return 1


_NOT_OWN = frozenset({*sys.stdlib_module_names, "monarch", "monarch_nb", "monarch_kernel"})


def _empty_own_modules(last: str) -> None:
    """Clears a program's own modules, as at the end of any Python, so that `__del__` methods run.

    `last` names the last module of the template: earlier ones, thousands on pages that all processes share, are
    skipped.
    """
    imported = tuple(itertools.takewhile(lambda item: item[0] != last, reversed(sys.modules.copy().items())))
    for module in [module for name, module in imported if _is_own(name, module)]:
        names = vars(module)
        for name in [name for name in names if not name.startswith("__")]:
            try:
                names[name] = None
            except BaseException:
                traceback.print_exc()


def _is_own(name: str, module: object) -> bool:
    file = getattr(module, "__file__", None)
    if name.partition(".")[0] in _NOT_OWN or not isinstance(file, str):
        return False
    return not {"site-packages", "dist-packages"} & set(file.split(os.sep))


def leave(status: int, last: str) -> NoReturn:
    """Ends a forked process as an interpreter does, but without taking apart the template's modules, up to `last`.

    That would write to, and so copy, most pages that it shares with the template: half a second for each process.
    """
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    except BaseException:
        traceback.print_exc()
    atexit._run_exitfuncs()
    _empty_own_modules(last)
    flush_output()
    os._exit(status & 0xFF)


def _settle(spec: ProcSpec, *, forked: bool, keep: set[int]) -> None:
    close_other_fds(keep)
    for fd in keep:
        os.set_inheritable(fd, False)
    redirect(spec.log)
    _default_signals()
    keep_freed_memory()
    faulthandler.enable(file=2)
    if forked:
        install(overlaid(os.environ, spec.env))
        reseed()
        _restore_threads()
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    if spec.cwd:
        try:
            os.chdir(spec.cwd)
        except OSError as error:
            sys.stderr.write(f"cannot change to {spec.cwd}: {error.strerror}; staying in {os.getcwd()}\n")
    sys.path[:] = dict.fromkeys([*spec.sys_path, *sys.path])
    forget_folders()
    sys.argv = [spec.address]
    builtins.input = _nobody_answers
    # Cells define classes in a __main__ of their own; multiprocessing must not take the template for the program.
    _references.append(sys.modules["__main__"])
    sys.modules["__main__"] = types.ModuleType("__main__")
    sys.modules["__main__"].__dict__["__builtins__"] = __builtins__
    name_process(f"mnb:{parse_address(spec.address).name}")


def forget_folders() -> None:
    """Makes imports look again at the folders of `sys.path`, also at those that did not exist when the template looked.

    `importlib.invalidate_caches` writes to a page for each folder that was ever imported from: 1.6 MB that a process
    then has for itself.
    """
    for path in sys.path:
        finder = sys.path_importer_cache.get(path)
        if finder is None:
            sys.path_importer_cache.pop(path, None)
        elif hasattr(finder, "invalidate_caches"):
            finder.invalidate_caches()


def _nobody_answers(prompt: object = "", /) -> NoReturn:
    """Replaces `input()` in a process that has no terminal and no cell."""
    question = repr_of(text_of(prompt)) if text_of(prompt) else ""
    raise EOFError(
        f"input({question}) has nobody to ask on a rank: ask in the notebook or script, and pass the answer to the "
        "call, as in trainers.step.call(input('lr? ')); breakpoint() stops here, for whoever waits for the call"
    )


def _default_signals() -> None:
    """Restores the signal handling of a fresh interpreter, whatever the parent ignored or blocked."""
    ignored = {signal.SIGPIPE, *(s for s in (getattr(signal, "SIGXFSZ", None),) if s)}
    for signum in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        try:
            if signum in ignored:
                signal.signal(signum, signal.SIG_IGN)
            elif signum == signal.SIGINT:
                signal.signal(signum, interrupt_program)
            elif signal.getsignal(signum) is not signal.SIG_DFL:
                signal.signal(signum, signal.SIG_DFL)
        except (OSError, ValueError):
            pass
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def reseed() -> None:
    """Gives this process the randomness of a fresh one: a fork, whose template has seeded generators by its imports.

    Devices other than the processor seed theirs when a process first uses them. torch is asked for its generator, since
    `torch.seed` would set the devices to one seed.
    """
    for name, seed in _GENERATORS.items():
        module = sys.modules.get(name)
        if module is not None:
            seed(module)


# Seeds the generators that modules make when they are imported: Python's, and those of all that a template imports.
_GENERATORS: dict[str, Callable[[Any], object]] = {
    "random": lambda module: module.seed(),
    "numpy.random": lambda module: module.seed(),
    "torch": lambda module: module.default_generator.seed(),
    "sympy.core.random": lambda module: module.seed(),
}


def _restore_threads() -> None:
    """Gives thread pools the size they would have had without the template."""
    torch = sys.modules.get("torch")
    if torch is not None:
        count = wanted_threads(os.environ, "OMP_NUM_THREADS", "MKL_NUM_THREADS")
        if count != torch.get_num_threads():
            torch.set_num_threads(count)
    if "numpy" in sys.modules:
        _set_openblas_threads(wanted_threads(os.environ, "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"))


def _function(path: str) -> Callable[..., int | None]:
    module, _, name = path.partition(":")
    function: Callable[..., int | None] = getattr(importlib.import_module(module), name)
    return function


def _prepare(path: str, keep: set[int]) -> None:
    """Makes a call in a process without a rank, which can be used even if the call fails.

    Descriptors that it opens are added to those to keep: threads of libraries may use them. Raises SystemExit if it has
    opened a GPU: which GPUs a process sees is decided when it opens the first, and its rank may have others.
    """
    close_other_fds(keep)
    try:
        _function(path)()
    except Exception:
        traceback.print_exc()
    keep |= open_fds()
    if any(os.readlink(f"/proc/self/fd/{fd}").startswith("/dev/nvidia") for fd in keep):
        raise SystemExit(1)
    name_process("mnb-spare")


def _end_with_agent() -> None:
    """Ends this process and its children once the agent has ended, if the kernel did not."""
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _set_openblas_threads(count: int) -> bool:
    """Makes every loaded OpenBLAS use `count` threads. Returns whether there was one."""
    was_set = False
    for path in _loaded("openblas"):
        library = ctypes.CDLL(path)
        for name in _SETTERS:
            if hasattr(library, name):
                getattr(library, name)(ctypes.c_int(count))
                was_set = True
                break
    return was_set


def _loaded(part: str) -> set[str]:
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            paths = {line.split(maxsplit=5)[5].strip() for line in maps if line.count(" ") > 4 and "/" in line}
    except OSError:
        return set()
    return {path for path in paths if part in path.rpartition("/")[2]}
