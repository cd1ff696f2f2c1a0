"""A failed call as a rank sends it, so that it can be run again elsewhere: actor, arguments and surroundings.

The actor and the arguments are one pickle, so that what they share stays shared. What cannot be pickled is replaced by
a `MissingValue`, wherever in it that is.
"""

import concurrent.futures
import os
import platform
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pickle import PickleBuffer
from typing import TYPE_CHECKING, Any, NoReturn

from monarch_nb._package import imported
from monarch_nb.debug.records import DebugError
from monarch_nb.runtime import current, current_runtime
from monarch_nb.runtime.actors.failures import StoredFailure
from monarch_nb.runtime.context import Ancestor
from monarch_nb.shape import Point
from monarch_nb.wire import Pickler, Pieces, encode, error_line, with_article

if TYPE_CHECKING:
    from monarch_nb.wire.code import Cargo

_LIVE = (threading.Thread, subprocess.Popen, concurrent.futures.Executor)  # whose copy would do nothing
_LOCKS: dict[type, Callable[[], object]] = {
    type(threading.Lock()): threading.Lock,
    type(threading.RLock()): threading.RLock,
}
_USES = (
    *("call", "enter", "exit", "aenter", "aexit", "iter", "next", "aiter", "anext", "await", "len", "bool", "contains"),
    *("getitem", "setitem", "delitem", "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "matmul", "lt", "gt"),
    *("int", "float", "index"),
)


class MissingValue:
    """Stands for a value that could not be brought from its rank; raises DebugError where it is used."""

    def __init__(self, part: str, kind: str, reason: str) -> None:
        vars(self).update(_part=part, _kind=kind, _reason=reason)

    def __repr__(self) -> str:
        return f"<{vars(self)['_part']}: {vars(self)['_kind']}, not brought here>"

    def __str__(self) -> str:
        own = vars(self)
        return f"{own['_part']}, {with_article(own['_kind'])} ({own['_reason']})"

    def __reduce__(self) -> Any:
        own = vars(self)
        return MissingValue, (own["_part"], own["_kind"], own["_reason"])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # looked up by Python itself
            raise AttributeError(name)
        self._refuse()

    def __setattr__(self, name: str, value: object) -> None:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise DebugError(f"this is not here: {self}")


def _refused(self: MissingValue, *_: object, **__: object) -> NoReturn:
    raise DebugError(f"this is not here: {self}")


for _name in _USES:
    setattr(MissingValue, f"__{_name}__", _refused)


class StateTooLargeError(Exception):
    """An actor and its arguments have more bytes than were asked for."""


@dataclass(frozen=True)
class Surroundings:
    """The surroundings of a method, which may be the reason that it fails only there."""

    hostname: str
    device: str
    python: str
    torch: str
    folder: str
    environment: dict[str, str]


@dataclass(frozen=True)
class FailedCall:
    """A failed call on its rank, without the actor and the arguments themselves."""

    method: str
    point: Point  # in the slice that was called
    rank: Point
    base_rank: int
    incarnation: int
    itself: Ancestor
    surroundings: Surroundings
    missing: tuple[MissingValue, ...]
    notes: tuple[str, ...]


@dataclass
class ActorAndArguments:
    """The pickle that comes with a `FailedCall`."""

    actor: object
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def failed_call(actor: Any, call: str, limit: int) -> str | tuple[FailedCall, list[PickleBuffer]]:
    """Returns an actor's failed call, and the frames of its `ActorAndArguments`, or a reason. On its thread.

    The reason is not raised, because an error would replace the failure that the actor has stored.
    """
    context, runtime = current.get(), current_runtime()
    assert context is not None
    instance = context.actor_instance
    failures = runtime.failures.of(instance.mesh, instance.base_rank)
    stored = next((failure for failure in failures if failure.call == call), None)
    if stored is None:
        return _not_stored(instance.incarnation)
    if stored.endpoint.startswith("__"):
        return "it was no call of a method but a cell that ran on the actor: run the cell here"
    if stored.arguments is None:
        return "its arguments could not be unpickled on the rank"
    packer = _Packer(actor, limit)
    try:
        frames = packer.pack(stored)
    except StateTooLargeError:
        return f"the actor and its arguments have more than {limit:,} bytes: reproduce(limit=...) takes larger ones"
    except Exception as error:
        return f"the actor cannot be pickled: {error_line(error)}"
    notes = []
    if stored.instance is not instance:
        notes.append("the actor was created again after the failure (heal_mesh): its state is new")
    if packer.new_locks:
        notes.append(f"locks are new ones, and free: {', '.join(dict.fromkeys(packer.new_locks))}")
    record = FailedCall(
        stored.endpoint.lstrip("@!"),
        stored.point,
        instance.rank,
        instance.base_rank,
        instance.incarnation,
        instance.lineage[-1],
        surroundings(),
        tuple(packer.missing),
        tuple(notes),
    )
    buffers = [PickleBuffer(bytearray(bytes(frame)) if isinstance(frame, Pieces) else frame) for frame in frames]
    return record, buffers


def _not_stored(incarnation: int) -> str:
    if incarnation:
        return (
            "the rank was healed since the failure: the arguments and the state went with its former process. The "
            "traceback of the rank is in error.exception_formatted"
        )
    return (
        "its rank has nothing of it any more: it failed longer ago than debug_keep_failures calls, its arguments and "
        "frames held more than debug_keep_bytes, it ran out of memory, or only its result could not be sent"
    )


def surroundings() -> Surroundings:
    """Returns the surroundings in this process. Initializes no GPU."""
    torch = imported("torch")
    device = "none"
    if torch is not None and torch.cuda.is_initialized():
        device = f"cuda:{torch.cuda.current_device()} ({torch.cuda.get_device_name()})"
    version = "" if torch is None else str(torch.__version__)
    python = platform.python_version()
    return Surroundings(socket.gethostname(), device, python, version, os.getcwd(), dict(os.environ))


def _is_process(value: object) -> bool:
    """Returns whether this is a process of `multiprocessing`, without its import, which renames `__main__`."""
    module = sys.modules.get("multiprocessing.process")
    return module is not None and isinstance(value, module.BaseProcess)


@dataclass
class _NamedValue:
    """A value with its name in messages, as it is pickled."""

    name: str
    value: Any


def unwrapped(value: object) -> object:
    """Returns the value of a part; it is called where that is unpickled."""
    return value


def blank(cls: Any) -> Any:
    """Returns an actor without attributes; it is called where an actor is unpickled."""
    try:
        return object.__new__(cls)
    except TypeError:  # it derives from a builtin type
        return cls.__new__(cls)


def restore(actor: object, attributes: dict[str, object]) -> None:
    """Sets the attributes of an actor, past its own `__setattr__`; it is called where an actor is unpickled."""
    own = getattr(actor, "__dict__", None)
    slots = dict(_slots(type(actor)))
    for name, value in attributes.items():
        if own is not None and name not in slots:
            own[name] = value
        else:
            object.__setattr__(actor, name, value)


def _slots(cls: type) -> Iterator[tuple[str, str]]:
    """Attributes in slots, by the names that they are found under."""
    for base in cls.__mro__:
        names = vars(base).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else tuple(names):
            is_mangled = name.startswith("__") and not name.endswith("__")
            if name not in ("__dict__", "__weakref__"):
                yield f"_{base.__name__.lstrip('_')}{name}" if is_mangled else name, name


@dataclass
class _Packer:
    """Pickles an actor and the arguments of a call, and replaces what cannot be pickled."""

    actor: object
    limit: int  # bytes
    missing: list[MissingValue] = field(default_factory=list)
    new_locks: list[str] = field(default_factory=list)
    part: str = ""  # that is being pickled
    missing_parts: dict[str, MissingValue] = field(default_factory=dict)  # parts in which something cannot be replaced

    def pack(self, stored: StoredFailure) -> list[Any]:
        """Returns the frames of the `ActorAndArguments`. Raises StateTooLargeError."""
        assert stored.arguments is not None
        args, kwargs = stored.arguments
        wrapped = tuple(_NamedValue(f"argument {index}", value) for index, value in enumerate(args))
        named = {name: _NamedValue(f"argument {name}", value) for name, value in kwargs.items()}
        body = ActorAndArguments(self.actor, wrapped, named)
        while True:
            self.missing, self.new_locks, self.part = [*self.missing_parts.values()], [], ""
            try:
                frames = encode(body, current_runtime(), pickler=lambda cargo: _LenientPickler(cargo, self))
            except StateTooLargeError:
                raise
            except Exception as error:
                if not self.part or self.part in self.missing_parts:
                    raise
                self.missing_parts[self.part] = MissingValue(self.part, "value", error_line(error))
                continue
            size = sum(len(frame) if isinstance(frame, bytes | bytearray) else frame.nbytes for frame in frames)
            if size > self.limit:
                raise StateTooLargeError
            return frames

    def enter(self, part: _NamedValue) -> object:
        """Returns the reduced form of a part."""
        self.part = part.name
        return unwrapped, (self.missing_parts.get(part.name, part.value),)

    def replace(self, value: Any, reason: str) -> Any:
        """Returns the reduced form of a value that cannot be pickled: that of its stand-in."""
        missing = MissingValue(self.part, f"{type(value).__module__}.{type(value).__qualname__}", reason)
        self.missing.append(missing)
        return missing.__reduce__()

    def attributes(self) -> dict[str, object]:
        """Returns the attributes of the actor, by name."""
        values = {name: getattr(self.actor, name) for name, _ in _slots(type(self.actor)) if hasattr(self.actor, name)}
        values.update(getattr(self.actor, "__dict__", {}))
        return {name: _NamedValue(f"self.{name}", value) for name, value in values.items()}


class _LenientPickler(Pickler):
    """Pickles an actor and arguments, with stand-ins for parts that cannot be pickled."""

    def __init__(self, cargo: "Cargo", packer: _Packer) -> None:
        super().__init__(cargo)
        self._packer = packer
        self._measured, self._size = 0, 0

    def reducer_override(self, obj: Any) -> Any:
        """Returns the reduced form of `obj`."""
        packer = self._packer
        kind = type(obj)
        if kind is _NamedValue:
            self._check_size()
            return packer.enter(obj)
        if obj is packer.actor:
            return blank, (kind,), packer.attributes(), None, None, restore
        if kind in _LOCKS:
            packer.new_locks.append(packer.part)
            return _LOCKS[kind], ()
        if isinstance(obj, _LIVE) or _is_process(obj):
            return packer.replace(obj, "it would not run here")
        try:
            reduced = super().reducer_override(obj)
            if reduced is NotImplemented and not isinstance(obj, type | types.FunctionType):
                reducer = self.dispatch_table.get(kind)
                reduced = reducer(obj) if reducer is not None else obj.__reduce_ex__(5)
        except Exception as error:
            return packer.replace(obj, error_line(error))
        self._check_size()
        return reduced

    def _check_size(self) -> None:
        for buffer in self.buffers[self._measured :]:
            self._size += buffer.nbytes
            self._measured += 1
        if self._size > self._packer.limit:
            raise StateTooLargeError
