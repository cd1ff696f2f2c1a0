"""Classes by value: each definition is sent as (key, version, digest, bytes) and has one class object per process.

A definition is named by the tracker id that cloudpickle gives to a class object, so redefining a class makes a new
definition. Its bytes contain all that the class and its methods refer to; other by-value classes appear in them as
keys, and are sent beside them as units of their own. That makes cycles cheap and lets each class be cached by itself.

Only the process that defined a class pickles it. All others keep the received bytes and forward these. Receivers skip
bytes whose digest they have applied; others with a higher version update the class object in place. When a class
returns to its definer it is the definer's own object, unchanged. References inside the bytes (to actors, ports…) are
forwarded unchanged, so they must be meaningful in any process.
"""

import collections
import hashlib
import io
import linecache
import os
import pickle
import re
import sys
import threading
import types
import typing
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import cloudpickle.cloudpickle as cp

if TYPE_CHECKING:
    from monarch_nb.wire.pickler import Pickler

# Names that notebook kernels give to cells.
_CELL = re.compile(r"^<ipython-input-|[/\\](ipykernel|xpython)_\d+[/\\]")
# file name -> text received in a message
_received: dict[str, str] = {}
# file name -> (linecache's list of lines, the joined text): joined anew when linecache has read the file again
_joined: dict[str, tuple[list[str], str]] = {}


def is_cell_file(name: str) -> bool:
    """Returns whether a notebook's kernel gives this file name to a cell."""
    return _CELL.search(name) is not None


class Unit(NamedTuple):
    """One class definition in its sent form."""

    key: str
    version: int  # counts the definer's changes, so that late bytes do not undo newer ones
    digest: bytes
    data: bytes  # two pickles with one memo: arguments of the bare class, and attributes to set on it
    depends: tuple[str, ...]  # keys of the classes that the bytes name
    files: tuple[tuple[str, str | None], ...]  # files of the code in the bytes


class _ForeignClass:
    """A class that another process defined."""

    __slots__ = ("busy", "names", "unit")

    def __init__(self) -> None:
        self.unit: Unit | None = None  # the last one applied
        self.names: frozenset[str] = frozenset()  # names of the attributes it has set
        self.busy = False


_lock = threading.RLock()
_copies: "weakref.WeakKeyDictionary[type, _ForeignClass]" = weakref.WeakKeyDictionary()
_own: "weakref.WeakKeyDictionary[type, tuple[int, bytes]]" = weakref.WeakKeyDictionary()  # version, digest sent last
# Keeps the newest copies alive between messages, with the state of their code in class attributes and globals.
_kept: collections.deque[type] = collections.deque(maxlen=256)
_incoming: dict[str, Unit] = {}  # units being installed; guarded by _lock


def register_pickle_by_value(module: types.ModuleType) -> None:
    """Sends the classes and functions of `module` (and of modules below it) by value from now on.

    The same as cloudpickle's function of this name, which works as well.
    """
    cp.register_pickle_by_value(module)


def unregister_pickle_by_value(module: types.ModuleType) -> None:
    """Sends the content of `module` by its name again. Raises ValueError if it was not registered."""
    cp.unregister_pickle_by_value(module)


def travels_by_value(obj: object) -> bool:
    """Returns whether the class or function `obj` is sent as code, not as a name to import."""
    if isinstance(obj, type) and obj in cp._BUILTIN_TYPE_NAMES:
        return False
    return not cp._should_pickle_by_reference(obj)


class Cargo:
    """The by-value code of one message: the classes that its pickles name, and the source files."""

    def __init__(self) -> None:
        self.classes: dict[str, type] = {}
        self.files: dict[str, str | None] = {}

    def name(self, cls: type) -> str:
        """Returns the key of `cls`, whose unit will be part of the message."""
        key: str = cp._get_or_create_tracker_id(cls)
        self.classes[key] = cls
        return key

    def pack(self, make_pickler: Callable[["Cargo"], "Pickler"]) -> tuple[list[Unit], dict[str, str]]:
        """Returns all units that the message needs, and their sources."""
        units: dict[str, Unit] = {}
        while len(units) < len(self.classes):
            for key, cls in list(self.classes.items()):
                if key not in units:
                    units[key] = self._unit(key, cls, make_pickler)
        for unit in units.values():
            self.files.update(unit.files)
        return list(units.values()), gather_sources(self.files)

    def _unit(self, key: str, cls: type, make_pickler: Callable[["Cargo"], "Pickler"]) -> Unit:
        copy = _copies.get(cls)
        if copy is not None and copy.unit is not None:
            for needed in copy.unit.depends:
                depended = cp._DYNAMIC_CLASS_TRACKER_BY_ID.get(needed)
                if isinstance(depended, type):
                    self.name(depended)
            return copy.unit
        pickler = make_pickler(self)
        head, state = _take_apart(cls)
        pickler.dump(head)
        pickler.dump(state)
        data = pickler.getvalue()
        depends = tuple(needed for needed in pickler.named if needed != key)
        digest = hashlib.blake2b(data, digest_size=16).digest()
        with _lock:
            version, last = _own.get(cls, (0, b""))
            if digest != last:
                version += 1
                _own[cls] = (version, digest)
        return Unit(key, version, digest, data, depends, tuple(pickler.files.items()))


def install(units: Iterable[Sequence[Any]], sources: dict[str, str]) -> list[type]:
    """Creates or updates the classes of a message, and its sources. Returns them, to be held during unpickling."""
    register_sources(sources)
    arrived = [Unit(*unit) for unit in units]
    with _lock:
        before = dict(_incoming)
        _incoming.update((unit.key, unit) for unit in arrived)
        try:
            return [_resolve(unit) for unit in arrived]
        finally:
            _incoming.clear()
            _incoming.update(before)


def class_of(key: str) -> type:
    """Returns the class object of this process for a definition; pickles call it."""
    with _lock:
        unit = _incoming.get(key)
        if unit is not None:
            return _resolve(unit)
    cls = cp._DYNAMIC_CLASS_TRACKER_BY_ID.get(key)
    if not isinstance(cls, type):
        raise pickle.UnpicklingError(f"the definition {key} of a class is not part of the message")
    return cls


def _resolve(unit: Unit) -> type:
    cls = cp._DYNAMIC_CLASS_TRACKER_BY_ID.get(unit.key)
    copy = None
    if cls is not None:
        copy = _copies.get(cls)
        if copy is None or copy.busy:
            return typing.cast(type, cls)  # defined here, or being created right now
        if copy.unit is not None and (copy.unit.digest == unit.digest or copy.unit.version >= unit.version):
            return typing.cast(type, cls)
    unpickler = pickle.Unpickler(io.BytesIO(unit.data))
    make, arguments = unpickler.load()
    if cls is None:
        # Loading the bases may already have created the class.
        cls = cp._DYNAMIC_CLASS_TRACKER_BY_ID.get(unit.key)
        if cls is not None:
            return typing.cast(type, cls)
        cls = make(*arguments)
        copy = _copies[cls] = _ForeignClass()
        _kept.append(cls)
    assert copy is not None
    copy.busy = True
    try:
        state = unpickler.load()
        _apply(cls, state, copy)
        copy.unit = unit
    finally:
        copy.busy = False
    return typing.cast(type, cls)


def _apply(cls: type, state: Any, copy: _ForeignClass) -> None:
    cp._class_setstate(cls, state)
    names = frozenset(state[0])
    for name in copy.names - names:
        if name in cls.__dict__:
            delattr(cls, name)
    copy.names = names


def _take_apart(cls: type) -> tuple[object, object]:
    """Returns the arguments that create the bare class, and the attributes to set on it then."""
    make, arguments, state, *_ = cp._dynamic_class_reduce(cls)
    slots = cls.__dict__.get("__slots__")
    if (
        slots is not None
        and make is cp._make_skeleton_class
        and typing.NamedTuple not in cls.__dict__.get("__orig_bases__", ())  # it creates its own
    ):
        # Slots must be there when the class is created: later they would have no effect.
        arguments[3].setdefault("__slots__", slots)
    return (make, arguments), state


def gather_sources(files: Mapping[str, str | None]) -> dict[str, str]:
    """Returns the texts to send for by-value code: of those `files` (name -> module) that a receiver may not have."""
    texts = {}
    for name, module in files.items():
        text = _received.get(name)
        if text is None and _must_ship(name, module):
            text = _text(name)
        if text:
            texts[name] = text
    return texts


def register_sources(texts: Mapping[str, str]) -> None:
    """Adds the lines of `texts` (file name -> text) to this process's linecache."""
    for name, text in texts.items():
        if _received.get(name) != text or name not in linecache.cache:
            _received[name] = text
            # Without a modification time checkcache() keeps the entry.
            linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)


def received_sources() -> Iterable[str]:
    """Returns the names of the files whose text other processes have sent."""
    return tuple(_received)


def _must_ship(name: str, module: str | None) -> bool:
    if module == "__main__" or is_cell_file(name):
        return True
    if module is not None and any(_is_within(module, listed) for listed in cp.list_registry_pickle_by_value()):
        return True
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    return name == main or not os.path.exists(name)


def _is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def _text(name: str) -> str:
    lines = linecache.getlines(name)
    cached = _joined.get(name)
    if cached is None or cached[0] is not lines:
        cached = _joined[name] = (lines, "".join(lines))
    return cached[1]
