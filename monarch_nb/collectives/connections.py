"""The connections that a process group has opened in this process: cut to end waits, and renewed after an error.

No PyTorch call wakes a thread that waits in one of gloo's collectives (`abort`, `shutdown` and a shorter time-out have
no effect on it). The thread waits on a socket, though, and the collective raises within milliseconds once that socket
is shut down. PyTorch does not expose gloo's sockets, but the kernel does: gloo runs one thread for each group, which
sleeps in epoll, and the sockets registered there are the group's.

The kernel exposes a thread's epoll descriptor only while the thread sleeps in it. On a loaded machine gloo's thread
often waits for a core instead, so the descriptor is polled for when the group is created, and remembered.

Holders of a group (a DDP module, the device mesh of FSDP2, a variable of the program) stay valid when it is renewed.
PyTorch cannot replace a backend of a group, but accepts one of another type in its place; types are numbers.
"""

import contextlib
import functools
import logging
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import ModuleType
from typing import TYPE_CHECKING, Any

from monarch_nb._package import imported
from monarch_nb.collectives.threads import address
from monarch_nb.host.linux import process_state

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn import Module
    from torch.nn.parallel import DistributedDataParallel

logger = logging.getLogger(__name__)

_FDS = "/proc/self/fd"
_TASKS = "/proc/self/task"
_LOOP = "gloo_tcp_loop"  # the name of gloo's threads; older versions do not name them
_MADE_S = 5.0  # limit for the threads of a new group to fall asleep
_CUT_S = 0.05  # the same for threads whose epoll is still unknown when connections are cut
_AGAIN_S = (0.1, 0.5, 2.0, 5.0)  # pauses after which a cut is repeated, for connections that it has missed
CAN_CUT = sys.platform == "linux"  # other systems do not expose what a descriptor is
_FIRST_TYPE = 100  # of backends; PyTorch's own types are lower
MOST = 64  # renewals of one group: PyTorch keeps the threads of each backend until the group is destroyed
_JOINS_S = 4.0  # for all members to join
DDP = "torch.nn.parallel.distributed"
DEVICE_MESH = "torch.distributed.device_mesh"
_FSDP = "torch.distributed.fsdp._fully_shard._fsdp_state"
_GROUPS = ("shard_process_group", "replicate_process_group", "reduce_scatter_process_group")  # of a mesh of FSDP2
_STATES = "torch.distributed._composable_state"


class Connections:
    """Connections of a process group, or of a generation of groups. Any thread may call `cut`, also while they are
    opened."""

    def __init__(self) -> None:
        self._inodes: set[str] = set()  # descriptors are reused, inodes are not
        self._loops: set[TransportThread] = set()  # they may open connections later
        self._epolls: dict[TransportThread, int] = {}  # descriptors
        self._before: tuple[frozenset[str], frozenset[TransportThread]] | None = None  # the creation of a group
        self._ports: frozenset[int] = frozenset()
        self._lock = threading.Lock()
        self.is_cut = False

    @contextmanager
    def noted(self, *ports: int) -> Iterator[None]:
        """Assigns gloo's connections, and those to a store at one of `ports`, opened within the context to the group.

        Raises ConnectionAbortedError if the group has been cut already.
        """
        with self._lock:
            if self.is_cut:
                raise ConnectionAbortedError("the process group was given up while it was being made")
            self._before = frozenset(_sockets().values()), frozenset(_loop_threads())
            self._ports = frozenset(ports)
        try:
            yield
        finally:
            new = set(_loop_threads()) - self._before[1]
            self._find_epolls(new, _MADE_S)
            with self._lock:
                is_ours = self._ownership_test()
                self._inodes |= {inode for fd, inode in _sockets().items() if is_ours(fd, inode)}
                self._loops |= new
                self._before = None

    def cut(self) -> int:
        """Shuts down all connections, also those being opened; returns their number.

        Repeats the cut a few times in the background: a connection that was just being opened, or whose thread was not
        asleep, would keep its waiter for ever.
        """
        first = not self.is_cut
        count = self._cut()
        if first and CAN_CUT:
            threading.Thread(target=self._cut_again, name="monarch-cut", daemon=True).start()
        return count

    def _cut(self) -> int:
        with self._lock:
            self.is_cut = True
            is_ours = self._ownership_test()
            return sum(is_ours(fd, inode) and _shut_down(fd, inode) for fd, inode in _sockets().items())

    def _cut_again(self) -> None:
        for pause in _AGAIN_S:
            time.sleep(pause)
            if missed := self._cut():
                logger.debug("%d connections of a process group were cut late", missed)

    def _ownership_test(self) -> Callable[[int, str], bool]:
        """Returns a predicate that tests whether a socket, by descriptor and inode, belongs to the group."""
        before, ports, inodes = self._before, self._ports, self._inodes
        new = set(_loop_threads()) - before[1] if before is not None else set()
        self._find_epolls(self._loops | new, _CUT_S)
        watched = self._watched_sockets(self._loops | new)

        def is_ours(fd: int, inode: str) -> bool:
            if inode in inodes or inode in watched:
                return True
            if before is None or inode in before[0]:
                return False
            # Older versions of PyTorch do not name gloo's threads: there, every new socket counts.
            return _peer_port(fd) in ports or not new

        return is_ours

    def _find_epolls(self, loops: "set[TransportThread]", patience: float) -> None:
        """Looks up the unknown epolls of threads; blocks up to `patience` seconds."""
        deadline = time.monotonic() + patience
        for loop in loops - self._epolls.keys():
            with contextlib.suppress(OSError):  # it has ended, or the kernel refuses
                while (epoll := loop.epoll()) is None and time.monotonic() < deadline:
                    time.sleep(0.001)
                if epoll is not None:
                    self._epolls[loop] = epoll

    def _watched_sockets(self, loops: "set[TransportThread]") -> set[str]:
        """Returns the inodes of the sockets registered in the epolls of these threads."""
        watched: set[str] = set()
        for loop in loops & self._epolls.keys():
            sockets = _registered(self._epolls[loop])
            if loop.is_alive():  # else another epoll may have the descriptor now
                watched |= sockets
        return watched


def connections_to(ports: set[int]) -> dict[int, str]:
    """Returns this process's connections to servers at these ports, by descriptor."""
    return {fd: inode for fd, inode in _sockets().items() if _peer_port(fd) in ports}


def cut_to(ports: set[int]) -> int:
    """Shuts down this process's connections to servers at these ports; returns their number."""
    return cut_each(connections_to(ports))


def cut_each(connections: Mapping[int, str]) -> int:
    """Shuts down connections whose descriptors have not been reused; returns their number."""
    return sum(_shut_down(fd, inode) for fd, inode in connections.items())


def _sockets() -> dict[int, str]:
    """Returns the inodes of this process's sockets, by descriptor."""
    sockets: dict[int, str] = {}
    if not CAN_CUT:
        return sockets
    for name in os.listdir(_FDS):
        try:
            target = os.readlink(f"{_FDS}/{name}")
        except OSError:  # the descriptor that lists them, or one closed meanwhile
            continue
        if target.startswith("socket:"):
            sockets[int(name)] = target
    return sockets


@dataclass(frozen=True)
class TransportThread:
    """A thread of gloo; thread ids are reused, so the start time (clock ticks since boot) is part of it."""

    tid: int
    started: int

    def is_alive(self) -> bool:
        """Returns whether the thread still runs."""
        return _start_time(self.tid) == self.started

    def epoll(self) -> int | None:
        """Returns the descriptor of the epoll in which the thread sleeps; None while it runs or sleeps elsewhere.

        Raises OSError once the thread has ended, or if the kernel refuses to answer.
        """
        with open(f"{_TASKS}/{self.tid}/syscall") as asleep:
            words = asleep.read().split()
        if len(words) < 2 or words[0] == "-1":
            return None
        fd = int(words[1], 16)
        try:
            return fd if os.readlink(f"{_FDS}/{fd}") == "anon_inode:[eventpoll]" else None
        except OSError:  # the first argument of another system call
            return None


def _loop_threads() -> list[TransportThread]:
    """Returns gloo's threads in this process."""
    threads = []
    for name in os.listdir(_TASKS) if CAN_CUT else ():
        try:
            with open(f"{_TASKS}/{name}/comm") as comm:
                is_loop = comm.read().strip() == _LOOP
        except OSError:  # it has ended
            continue
        if is_loop and (started := _start_time(int(name))):
            threads.append(TransportThread(int(name), started))
    return threads


def _start_time(tid: int) -> int:
    """Returns the start time of a thread, which the kernel lists like a process; 0 once it has ended."""
    try:
        return process_state(tid)[1]
    except OSError:
        return 0


def _registered(epoll: int) -> set[str]:
    """Returns the inodes of the sockets registered in an epoll."""
    inodes: set[str] = set()
    try:
        with open(f"/proc/self/fdinfo/{epoll}") as info:
            fds = [int(line.split()[1]) for line in info if line.startswith("tfd:")]
    except OSError:
        return inodes
    for fd in fds:
        with contextlib.suppress(OSError):
            target = os.readlink(f"{_FDS}/{fd}")
            if target.startswith("socket:"):
                inodes.add(target)
    return inodes


def _peer_port(fd: int) -> int:
    """Returns the port at the other end of a network connection; 0 for other descriptors."""
    try:
        with socket.socket(fileno=os.dup(fd)) as duplicate:
            return int(duplicate.getpeername()[1]) if duplicate.family != socket.AF_UNIX else 0
    except (OSError, IndexError, TypeError):
        return 0


def _shut_down(fd: int, inode: str) -> bool:
    """Shuts down both directions of a network connection; leaves its descriptors to their owners."""
    try:
        duplicate = socket.socket(fileno=os.dup(fd))
    except OSError:
        return False
    with duplicate:
        try:
            if os.readlink(f"{_FDS}/{duplicate.fileno()}") != inode or duplicate.family == socket.AF_UNIX:
                return False
            duplicate.getpeername()  # not a listening socket: gloo ends the process if it cannot listen
            duplicate.shutdown(socket.SHUT_RDWR)
        except OSError:  # closed by the other end, or not connected
            return False
    return True


def can_renew(module: ModuleType | None, group: "ProcessGroup", times: int) -> bool:
    """Returns whether a group can be renewed once more, as gloo groups can. `module` is `distributed_c10d`."""
    gloo = getattr(module, "ProcessGroupGloo", None)
    try:
        backends = [group._get_backend(device) for device in group._device_types]
        return (
            times < MOST
            and bool(backends)
            and all(type(backend) is gloo for backend in backends)
            and hasattr(group, "_register_backend")
            and all(hasattr(root, "reset_iter_state") for root in _sharded(()))
        )
    except Exception:  # another version of PyTorch
        return False


def renew(module: ModuleType, group: "ProcessGroup", number: int, times: int) -> Connections:
    """Reconnects the members of a group; all of them call this, with the same number. Blocks until all have done
    so, or raises after some seconds."""
    name, store = module._world.pg_names[group], module._world.pg_map[group][1]
    before = group._get_backend(next(iter(group._device_types)))
    host, port = address(store)
    if port:  # another thread may wait in the group's own store
        torch = sys.modules["torch.distributed"]
        store = torch.TCPStore(host, port, None, False, timedelta(seconds=_JOINS_S), wait_for_workers=False)
    connections = Connections()
    with connections.noted():
        backend = module.ProcessGroupGloo(
            module.PrefixStore(f"renewed/{number}/{name}", store),
            group.rank(),
            group.size(),
            timeout=timedelta(seconds=_JOINS_S),
        )
    backend._set_default_timeout(before.options._timeout)
    backend.options.global_ranks_in_group = before.options.global_ranks_in_group
    backend.options.group_name = before.options.group_name
    kind = module.ProcessGroup.BackendType(_FIRST_TYPE + times)
    for device in group._device_types:
        group._register_backend(device, kind, backend)
    group._set_group_name(name)
    group._set_group_desc(group.group_desc)
    with contextlib.suppress(Exception):
        backend._set_sequence_number_for_group()
    return connections


def reset_modules(groups: "Collection[ProcessGroup]") -> None:
    """Resets unfinished work of modules on these groups, equally on all members."""
    for replicated in _replicated(groups):
        _reset_replicated(replicated)
    for root in _sharded(groups):
        state = root._get_fsdp_state()
        for part in state._state_ctx.all_states:
            for params in part._fsdp_param_groups:
                params._all_gather_result = None  # it will never complete
                for param in params.fsdp_params:
                    param.unsharded_accumulated_grad = None
                    if hasattr(param, "_unsharded_param"):
                        param._unsharded_param.grad = None
        root.reset_iter_state()


# DDP modules, with their built-in communication hooks, which DDP passes to its reducer and does not store
_ddp_modules: "weakref.WeakKeyDictionary[DistributedDataParallel, object]" = weakref.WeakKeyDictionary()
_meshes: "dict[int, weakref.ref[Any]]" = {}  # device meshes by identity: equal ones are different meshes here


def watch_replicated(module: ModuleType) -> None:
    """Records DDP modules that are created from now on. `module` is torch's."""
    kind = module.DistributedDataParallel
    begin, register = kind._ddp_init_helper, kind._register_builtin_comm_hook

    def helper(ddp: "DistributedDataParallel", *args: object, **kwargs: object) -> object:
        _ddp_modules.setdefault(ddp, None)
        return begin(ddp, *args, **kwargs)

    def register_builtin(ddp: "DistributedDataParallel", comm_hook_type: object) -> None:
        register(ddp, comm_hook_type)
        _ddp_modules[ddp] = comm_hook_type

    kind._ddp_init_helper, kind._register_builtin_comm_hook = helper, register_builtin


def watch_meshes(module: ModuleType) -> None:
    """Records device meshes that are created from now on. `module` is torch's."""
    kind = module.DeviceMesh
    begin = kind.__init__

    @functools.wraps(begin)
    def init(mesh: "DeviceMesh", *args: object, **kwargs: object) -> None:
        key = id(mesh)
        _meshes[key] = weakref.ref(mesh, lambda _: _meshes.pop(key, None))
        begin(mesh, *args, **kwargs)

    kind.__init__ = init


def retire_meshes(living: Collection[str]) -> None:
    """Makes device meshes with a group that is not among the living ones, by name, unequal to all other meshes.

    DTensor's caches, one for each thread, compare meshes by shape and ranks: for the mesh that replaces such a mesh,
    they would return the entries of the old one, and the old mesh with them.
    """
    for reference in tuple(_meshes.values()):
        mesh = reference()
        if mesh is not None and not set(living).issuperset(_names_of_groups(mesh)):
            mesh._thread_id = f"given up {id(mesh)}"  # takes part in comparisons of meshes; otherwise unused


def _names_of_groups(mesh: "DeviceMesh") -> list[str]:
    """Returns the names of the groups of a mesh, one for each dimension."""
    names = getattr(mesh, "_dim_group_names", None)
    if names is None:  # before PyTorch 2.8
        names = [info[-1] for info in getattr(mesh, "_dim_group_infos", ())]
    return [name for name in names if isinstance(name, str)]


def outlived(groups: "Collection[ProcessGroup]") -> None:
    """Makes modules on these groups, which are given up, raise an error that says so when they are called."""
    if groups:
        with contextlib.suppress(Exception):  # another version of PyTorch
            for module in (*_replicated(groups), *_sharded(groups)):
                module.register_forward_pre_hook(_say_outlived, prepend=True)


def _say_outlived(module: "Module", *_: object) -> None:
    inner = getattr(module, "module", None)
    name, suffix = type(module).__name__, "" if inner is None else f"({type(inner).__name__})"
    raise RuntimeError(
        f"{name}{suffix} was made on a process group that was given up, as a rank of it was lost or left it: make the "
        "module again, once init_process_group has made a new group"
    )


def _replicated(groups: "Collection[ProcessGroup]") -> "list[DistributedDataParallel]":
    """Returns the DDP modules on these groups."""
    return [ddp for ddp in tuple(_ddp_modules) if any(ddp.process_group is group for group in groups)]


def _reset_replicated(ddp: Any) -> None:
    """Creates the buckets again: at the error, some ranks may have reordered theirs, and others not."""
    if ddp.mixed_precision is not None or ddp._use_python_reducer:
        raise NotImplementedError("a DDP module with mixed_precision, or a reducer in Python")
    ddp._remove_autograd_hooks()
    ddp._has_rebuilt_buckets = False
    parameters, sparse = ddp._build_params_for_reducer()
    ddp._ddp_init_helper(parameters, sparse, ddp._build_debug_param_to_name_mapping(parameters), ddp.static_graph)
    if ddp.static_graph:
        ddp.reducer._set_static_graph()
        ddp.logger._set_static_graph()
    hooks, ddp._comm_hooks = ddp._comm_hooks, []
    for hook, state in hooks:
        ddp.register_comm_hook(state, hook)
    if (builtin := _ddp_modules.get(ddp)) is not None:
        ddp._register_builtin_comm_hook(builtin)


def _sharded(groups: "Collection[ProcessGroup]") -> Iterator[Any]:
    """Yields the FSDP2 roots on these groups that have run; without groups all of them."""
    module, states = imported(_FSDP), imported(_STATES)
    if module is None or states is None:
        return
    for holder, entry in tuple(states._module_state_mapping.items()):
        state = entry() if callable(entry) else entry
        if not isinstance(state, module.FSDPState) or not state._is_root:
            continue
        meshes = [params.mesh_info for part in state._state_ctx.all_states for params in part._fsdp_param_groups]
        used = [getattr(mesh, name, None) for mesh in meshes for name in _GROUPS]
        if not groups or any(pg is group for pg in used for group in groups):
            yield holder
