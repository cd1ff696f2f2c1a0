"""The torch.distributed process groups of the program in this process: waits in them, and their end.

Imports nothing: once the program has imported `torch.distributed`, the function that creates groups is patched.
PyTorch's flight recorder shows which thread has begun which collective; without it the frames of threads do.
"""

import contextlib
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import FrameType, ModuleType
from typing import TYPE_CHECKING

import msgspec

from monarch_nb._package import imported, when_imported
from monarch_nb.collectives.connections import (
    CAN_CUT,
    DDP,
    DEVICE_MESH,
    Connections,
    can_renew,
    connections_to,
    cut_each,
    cut_to,
    outlived,
    renew,
    reset_modules,
    retire_meshes,
    watch_meshes,
    watch_replicated,
)
from monarch_nb.collectives.environment import OURS, gloo_interface
from monarch_nb.collectives.threads import (
    MAKES_STORE,
    FlightRecord,
    address,
    frames_of,
    is_in_torch,
    is_torchs,
    python_threads,
    records,
    sought_store,
    stores,
)
from monarch_nb.collectives.verbs import GroupKey

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

logger = logging.getLogger(__name__)

_C10D = "torch.distributed.distributed_c10d"
_HELPER = "_new_process_group_helper"  # the function there that creates groups
_NAMER = "_process_group_name"  # the function that names them by number
_patched: "weakref.WeakSet[Callable[..., object]]" = weakref.WeakSet()
_CONNECTS_S = 0.5  # for a connection to a store
_STORE_OPENS_S = 5.0  # for a thread that looks for a missing store to find the stand-in


class Waiting(msgspec.Struct, frozen=True):
    """A wait of a thread: in collectives of groups, or in the construction of a group."""

    groups: frozenset[str] = frozenset()
    joins: bool = False
    used: frozenset[str] = frozenset()  # groups in which its call has begun collectives


class _CreatedGroup(msgspec.Struct, eq=False):
    """A group at its creation."""

    connections: Connections
    since_ns: int  # wall clock
    maker: tuple[str, int] | None  # mesh and rank of the actor whose __init__ has created it
    times: int = 0  # number of renewals


class ProcessGroups:
    """The process groups of one process. Thread-safe."""

    def __init__(self) -> None:
        self._entries: dict[str, _CreatedGroup] = {}  # by name
        self._making: dict[int, Connections] = {}  # by thread
        self._apart: set[str] = set()  # names of groups that their creators manage
        self._orphans: set[tuple[str, int]] = set()
        self._local = threading.local()
        self._cut: set[str] = set()  # names of groups that were cut, but not given up yet
        self._recent: set[str] = set()  # of these, groups created in the call that was cut
        self._cut_joins = False
        self._number = 0  # at which the names of the next groups begin
        self._own_variables: dict[str, str] = {}  # of the environment, set here and not changed by the program since
        self._lock = threading.RLock()
        self._maker: Callable[[], tuple[str, int] | None] = lambda: None

    # -- creation of groups -----------------------------------------------------------------------------------------

    def watch(self, maker: Callable[[], tuple[str, int] | None]) -> None:
        """Starts to record groups. `maker` returns the actor that is being constructed on the calling thread."""
        self._maker = maker
        names = os.environ.pop(OURS, "").split(",")
        self._own_variables = {name: os.environ[name] for name in names if name in os.environ}
        when_imported(_C10D, self._change)
        when_imported(DDP, watch_replicated)
        when_imported(DEVICE_MESH, watch_meshes)

    def _change(self, module: ModuleType) -> None:
        make = getattr(module, _HELPER, None)
        if make is None or make in _patched:
            return

        def helper(*args: object, **kwargs: object) -> "tuple[ProcessGroup, object]":
            hosts = [host for value in (*args, *kwargs.values()) if (host := address(value)[0])]
            with gloo_interface(hosts[0] if hosts else ""):
                return self._make(module, make, args, kwargs)

        _patched.add(helper)
        setattr(module, _HELPER, helper)
        name = getattr(module, _NAMER, None)
        if name is None:  # of another PyTorch
            module._world.group_count = max(module._world.group_count, self._number)
            return

        def namer(*args: object, **kwargs: object) -> object:
            # PyTorch counts from 0 again once the program has destroyed all groups: a new rank would await another.
            if not getattr(self._local, "apart", False):
                module._world.group_count = max(module._world.group_count, self._number)
            return name(*args, **kwargs)

        setattr(module, _NAMER, namer)

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Leaves groups that this thread creates within the context to their creators."""
        self._local.apart = True
        try:
            yield
        finally:
            self._local.apart = False

    def _make(
        self,
        module: ModuleType,
        make: "Callable[..., tuple[ProcessGroup, object]]",
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> "tuple[ProcessGroup, object]":
        thread, connections = threading.get_ident(), Connections()
        apart = getattr(self._local, "apart", False)
        since = time.time_ns()
        ports = {port for value in (*args, *kwargs.values()) if (port := address(value)[1])}
        if apart:
            result = make(*args, **kwargs)
        else:
            self._making[thread] = connections
            try:
                with connections.noted(*ports):
                    result = make(*args, **kwargs)
            finally:
                self._making.pop(thread, None)
        name = module._world.pg_names.get(result[0])
        if name is not None:
            with self._lock:
                self._cut.discard(name)
                (self._apart.add if apart else self._apart.discard)(name)
                if not apart:
                    maker = self._maker()
                    self._entries[name] = _CreatedGroup(connections, since, maker)
                    if maker is not None:
                        self._orphans.discard(maker)
        return result

    # -- live groups ------------------------------------------------------------------------------------------------

    def _live(self, *, apart: bool = False) -> "dict[str, ProcessGroup]":
        """Returns the program's groups, with `apart` also those left to their creators, by name."""
        module = imported(_C10D)
        if module is None:
            return {}
        left_out: set[str] = set() if apart else self._apart
        return {name: group for group, name in tuple(module._world.pg_names.items()) if name not in left_out}

    def keys(self, *, apart: bool = False) -> dict[str, GroupKey]:
        """Returns the keys of the program's groups, with `apart` also those left to their creators, by name."""
        keys = {}
        for name, group in self._live(apart=apart).items():
            world = sys.modules[_C10D]._world
            members = world.pg_group_ranks.get(group, {})
            host, port = address(world.pg_map.get(group, (None, None))[1])
            keys[name] = GroupKey.of(name, sorted(map(int, members)), f"{host}:{port}" if port else "")
        return keys

    def remembered(self) -> tuple[list[tuple[GroupKey, list[FlightRecord]]], bool]:
        """Returns the last collectives of each of the program's groups, in order, and whether any are recorded."""
        recorded = records()
        return self._of_groups(recorded, self.keys()), bool(recorded)

    def history(self, since_ns: int) -> list[tuple[GroupKey, list[FlightRecord]]]:
        """Returns the collectives of all groups that have begun since `since_ns` (wall clock), in order."""
        recent = [record for record in records() if record.time_created_ns >= since_ns]
        return self._of_groups(recent, self.keys(apart=True))

    def _of_groups(
        self, recorded: list[FlightRecord], keys: dict[str, GroupKey]
    ) -> list[tuple[GroupKey, list[FlightRecord]]]:
        by_group = dict[str, list[FlightRecord]]()
        for record in recorded:
            name = record.process_group[0]
            entry = self._entries.get(name)
            if name in keys and not record.is_p2p and (entry is None or record.time_created_ns >= entry.since_ns):
                by_group.setdefault(name, []).append(record)
        for history in by_group.values():
            history.sort(key=lambda record: record.collective_seq_id)
        return [(keys[name], history) for name, history in by_group.items()]

    @property
    def orphans(self) -> set[tuple[str, int]]:
        """Actors whose `__init__` has created a group that was given up since, by mesh and rank."""
        with self._lock:
            return set(self._orphans)

    @property
    def broken(self) -> set[str]:
        """Groups that were cut, but not given up yet."""
        with self._lock:
            return self._cut & set(self._live())

    @property
    def broken_joins(self) -> bool:
        """True if a group was cut during its construction."""
        return self._cut_joins

    # -- waits ------------------------------------------------------------------------------------------------------

    def waits(self, thread: int, since_ns: int, *, alone: bool = True, helpers: bool = False) -> Waiting:
        """Returns the wait of a thread in a call that began at `since_ns` (wall clock).

        A call that computes may also have pending collectives. If it is `alone` in this process, autograd threads
        count as its own; if it has `helpers`, all threads do.
        """
        live = self._live()
        frames = frames_of(thread)
        if thread in self._making or any(frame.f_code.co_name == MAKES_STORE for frame in frames):
            return Waiting(joins=True)
        excluded: frozenset[int] = frozenset() if helpers else python_threads()
        groups, used = set(), set()
        remembered = records()
        for record in remembered:
            name, by, began = record.process_group[0], record.thread, record.time_created_ns
            entry = self._entries.get(name)
            if name not in live or name in self._cut or (entry is not None and began < entry.since_ns):
                continue
            if by == thread and began >= since_ns:
                used.add(name)
            if not record.has_ended and (by == thread or (alone and began >= since_ns and by not in excluded)):
                groups.add(name)
        if not groups:
            groups = self._in_frames(frames, live)
        if not groups and live and not remembered and is_in_torch(frames):
            groups = set(live) - self._cut
        ports = {address(value)[1] for frame in frames if is_torchs(frame) for value in stores(frame)}
        return Waiting(frozenset(groups), not groups and bool(ports - {0}), frozenset(used))

    def used(self, thread: int, since_ns: int) -> set[str]:
        """Returns groups in which a thread has begun a collective since then; all groups if that is not known."""
        live, remembered = self._live(), records()
        if not remembered:
            return set(live)
        mine = (record for record in remembered if record.thread == thread and record.time_created_ns >= since_ns)
        return {record.process_group[0] for record in mine} & set(live)

    def _in_frames(self, frames: list[FrameType], live: "Mapping[str, ProcessGroup]") -> set[str]:
        """Returns the group of the innermost function of torch.distributed in a thread's frames."""
        module = imported(_C10D)
        for frame in frames:
            if module is not None and frame.f_globals is vars(module):
                for name in ("group", "pg", "process_group"):
                    if name in frame.f_code.co_varnames:
                        group = frame.f_locals.get(name)
                        group = module._world.default_pg if group is None else group
                        return {name for name, pg in live.items() if pg is group and name not in self._cut}
        return set()

    # -- the end ----------------------------------------------------------------------------------------------------

    def end_waits(self, thread: int, waiting: Waiting, since_ns: int) -> bool:
        """Cuts the groups in which a thread waits, in a call begun at `since_ns` (wall clock), so that it raises there.

        Blocks for a moment. Returns False if nothing can be cut.
        """
        if not CAN_CUT and not waiting.joins:
            return False
        for name in waiting.groups:
            self._cut_group(name, since_ns)
        if waiting.joins:
            self._cut_joins = True
            making = self._making.get(thread)
            if making is not None:
                making.cut()
            frames = frames_of(thread)
            ports = {port for frame in frames for value in stores(frame) if (port := address(value)[1])}
            targets = {target for frame in frames if (target := sought_store(frame))}
            if not cut_to(ports | {port for _, port in targets}) and targets:
                threading.Thread(
                    target=self._stand_in, args=(thread, targets), name="monarch-store", daemon=True
                ).start()
        return bool(waiting.groups) or waiting.joins

    def mark_broken(self, names: set[str], since_ns: int) -> None:
        """Cuts these groups, which are unusable: their collectives broke off in a call that began at `since_ns`."""
        for name in names & set(self._live()):
            self._cut_group(name, since_ns)

    def _cut_group(self, name: str, since_ns: int = 0) -> None:
        group = self._live().get(name)
        with self._lock:
            entry = self._entries.get(name)
            if group is None or name in self._cut:
                return
            self._cut.add(name)
            if entry is None or entry.since_ns >= since_ns:
                self._recent.add(name)
        if entry is not None:
            entry.connections.cut()
        _abort(group)

    @staticmethod
    def _stand_in(thread: int, targets: set[tuple[str, int]]) -> None:
        """Opens a stand-in for a missing store for which a thread would look for minutes.

        The thread's connection is cut once it has found the store, or has waited there for a while: if it is cut while
        connecting, PyTorch tries again after growing pauses. Only for a store that was to be on this host, where other
        processes may look for it too.
        """
        distributed = sys.modules["torch.distributed"]
        for host, port in targets:
            try:
                store = distributed.TCPStore(host, port, None, True, wait_for_workers=False)
            except Exception:  # the store belongs to another host, or exists by now
                logger.debug("no stand-in for the store at %s:%s", host, port, exc_info=True)
                store = None
            deadline, since = time.monotonic() + _STORE_OPENS_S, dict[tuple[int, str], float]()
            while (now := time.monotonic()) < deadline and any(map(sought_store, frames_of(thread))):
                since = {connection: since.get(connection, now) for connection in connections_to({port}).items()}
                cut_each(dict(connection for connection, began in since.items() if now - began > _CONNECTS_S))
                time.sleep(0.02)
            cut_to({port})
            if store is not None:
                time.sleep(max(0.0, deadline - time.monotonic()))
            del store

    def give_up(
        self,
        number: int,
        keys: tuple[GroupKey, ...] = (),
        lost: tuple[int, ...] = (),
        *,
        again: tuple[GroupKey, ...] = (),
        everything: bool = False,
    ) -> None:
        """Gives up the groups in `keys`, with a lost member, or cut, or all; others, and those in `again`, live on.

        The names of the next groups begin at `number`, which must be equal on all ranks. Blocks for a moment."""
        module = imported(_C10D)
        mine = self.keys()
        names = self.broken - {key.name for key in again if key in mine.values()}
        names |= {
            name for name, key in mine.items() if everything or key in keys or not set(lost).isdisjoint(key.members)
        }
        self._cut_joins = False
        self._number = number
        if module is None:
            return
        with self._lock:
            makers = [self._entries[name].maker for name in names if name in self._entries]
            self._orphans |= {maker for maker in makers if maker is not None}
        for name in names:
            self._cut_group(name)
        groups = self._live()
        outlived([groups[name] for name in names if name in groups])
        retire_meshes(set(self._live(apart=True)) - names)  # the program may have destroyed others itself
        default = module._world.default_pg
        remaining = set(module._world.pg_names.values()) - names
        try:
            if default is not None and module._world.pg_names.get(default) in names:
                if not remaining:
                    module.destroy_process_group()
                else:
                    _forget_default(module, default)
                names.discard(next((name for name, group in groups.items() if group is default), ""))
            if remaining:
                for name in names:
                    module.destroy_process_group(groups[name])
        except Exception:
            logger.exception("process groups could not be given up: %s", ", ".join(sorted(names)))
        with self._lock:
            self._cut &= set(self._live())
            self._recent &= self._cut

    def ended(self, busy: set[str]) -> set[str]:
        """Returns groups that cannot be used once cut: groups that a call still uses, that the cut call has created, as
        the next one creates them again, and that PyTorch cannot reconnect."""
        module = imported(_C10D)
        times = {name: entry.times for name, entry in tuple(self._entries.items())}
        return {
            name
            for name, group in self._live().items()
            if name in busy or name in self._recent or not can_renew(module, group, times.get(name, 0))
        }

    def renew(self, keys: tuple[GroupKey, ...], number: int) -> tuple[GroupKey, ...]:
        """Reconnects groups, with all their members, and resets unfinished work of modules on them. Blocks for some
        seconds at most. Returns the groups that could not be reconnected."""
        mine, live, failed, groups = (
            self.keys(),
            self._live(),
            list[GroupKey](),
            list[tuple[GroupKey, "ProcessGroup", _CreatedGroup]](),
        )
        for key in keys:
            entry = self._entries.get(key.name)
            if mine.get(key.name) != key or entry is None:
                continue
            self._cut_group(key.name)
            since = time.time_ns()
            try:
                connections = renew(sys.modules[_C10D], live[key.name], number, entry.times)
            except Exception:
                logger.debug("the process group %s was not connected anew", key.name, exc_info=True)
                failed.append(key)
                continue
            groups.append((key, live[key.name], _CreatedGroup(connections, since, entry.maker, entry.times + 1)))
        try:
            reset_modules([group for _, group, _ in groups])
        except Exception:
            logger.debug("modules were not reset", exc_info=True)
            for _, _, entry in groups:
                entry.connections.cut()
            return keys
        with self._lock:
            for key, _, entry in groups:
                self._entries[key.name] = entry
                self._cut.discard(key.name)
                self._recent.discard(key.name)
        return tuple(failed)

    def set_environment(self, environment: Mapping[str, str], *, forced: bool = False) -> None:
        """Sets variables for the next groups; variables that the user has changed stay, unless `forced`."""
        for name, value in environment.items():
            if forced or name not in os.environ or os.environ[name] == self._own_variables.get(name):
                os.environ[name] = self._own_variables[name] = value


PROCESS_GROUPS = ProcessGroups()


def _abort(group: "ProcessGroup") -> None:
    """Aborts a group's backends, which ends NCCL's collectives, but not gloo's."""
    for device in tuple(getattr(group, "_device_types", ())):
        with contextlib.suppress(Exception):
            group._get_backend(device).abort()


def _forget_default(module: ModuleType, group: "ProcessGroup") -> None:
    """Removes the default group from torch's tables; unlike `destroy`, it leaves the other groups there."""
    world = module._world
    name = world.pg_names.pop(group, None)
    for table in (world.pg_map, world.pg_group_ranks, world.pg_backend_config, world.pg_coalesce_state):
        table.pop(group, None)
    tag = world.pg_to_tag.pop(group, None)
    for groups in world.tags_to_pg.values():
        groups[:] = [pg for pg in groups if pg is not group]
    logger.debug("the default group %s (%s) was given up, others are left", name, tag)
    module._update_default_pg(None)
    if name is not None:
        module._unregister_process_group(name)
