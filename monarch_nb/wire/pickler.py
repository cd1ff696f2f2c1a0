"""The pickler of message bodies: cloudpickle, with tensors and by-value classes in the engine's own way."""

import functools
import pickle
import sys
import types
import typing
import warnings
from collections import ChainMap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import cloudpickle
import cloudpickle.cloudpickle as cp

from monarch_nb.gpu import DeviceFile, Marker
from monarch_nb.settings import settings
from monarch_nb.wire.code import Cargo, class_of, travels_by_value
from monarch_nb.wire.tensors import NAMED_BY_TORCH, Storage, reduce_storage, reduce_tensor, tensor_types, torchs_own

SMALLEST_BUFFER = 4096  # bytes; below, a copy into the pickle is cheaper than a frame
_ENGINE = (str(Path(__file__).parent.parent), str(Path(cloudpickle.__file__).parent))
_SMALL = (type(None), bool, int, float, types.FunctionType, types.ModuleType, type)


class _Sink:
    """The target of a pickler, which passes bytes and bytearrays of 64 KiB and more without copying."""

    __slots__ = ("write",)

    def __init__(self, write: Callable[[bytes | bytearray], object]) -> None:
        self.write = write


# Reductions that programs set for objects of some types, as in `copyreg`. They precede the engine's own.
Reducer = Callable[[Any], object]  # of objects of one type: see `copyreg`
REDUCERS: dict[type, Reducer] = {}


class Pickler(cp.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Pickles into `chunks`, and buffers into `buffers`. By-value classes go into `cargo`."""

    def __init__(self, cargo: Cargo, *, out_of_band: bool = True, gpu: bool = False) -> None:
        self.cargo = cargo
        self.chunks: list[bytes | bytearray] = []
        self.buffers: list[memoryview | DeviceFile] = []
        self._gpu = gpu  # whether tensors of a GPU may be sent as files of it
        self.named: dict[str, type] = {}
        self.files: dict[str, str | None] = {}
        self._storages: dict[tuple[int, int], Storage] = {}
        self._tensors = tensor_types()
        keep = _keeper(self.buffers) if out_of_band else None
        super().__init__(_Sink(self.chunks.append), protocol=5, buffer_callback=keep)

    def getvalue(self) -> bytes:
        """Returns all pickles so far, as one."""
        return b"".join(self.chunks)

    def reducer_override(self, obj: Any) -> object:
        """Returns the reduction of `obj`; called for everything but the plainest types."""
        kind = type(obj)
        if REDUCERS and kind in REDUCERS:
            return REDUCERS[kind](obj)
        if kind in self._tensors:
            return reduce_tensor(obj, self._storages, gpu=self._gpu)
        if issubclass(kind, type):
            if obj in cp._BUILTIN_TYPE_NAMES:
                return cp._class_reduce(obj)
            if not travels_by_value(obj):
                return NotImplemented
            key = self.cargo.name(obj)
            self.named[key] = obj
            return class_of, (key,)
        if kind is types.FunctionType:
            return self._reduce_function(obj)
        if issubclass(kind, BaseException):
            return _reduce_exception(obj)
        special = _SPECIAL.get(kind)
        if special is not None:
            return special(obj)
        if self._tensors and kind.__name__ in ("UntypedStorage", "TypedStorage"):
            return reduce_storage(obj, self._storages, gpu=self._gpu)
        if self._tensors and kind.__name__ in NAMED_BY_TORCH:
            return torchs_own, (str(obj),)
        return NotImplemented

    def _reduce_function(self, function: types.FunctionType) -> object:
        reduced = super().reducer_override(function)
        if reduced is NotImplemented:
            return reduced
        _warn_of_big_captures(function, reduced[2][1]["__globals__"])
        self.files[function.__code__.co_filename] = function.__globals__.get("__name__")
        return reduced


def _keeper(buffers: list[memoryview | DeviceFile]) -> Callable[[pickle.PickleBuffer], bool]:
    def keep(buffer: pickle.PickleBuffer) -> bool:
        """Returns whether the pickle contains the buffer itself."""
        view = buffer.raw()
        if type(view.obj) is Marker:
            buffers.append(view.obj.file)
            return False
        if view.nbytes < SMALLEST_BUFFER:
            return True
        buffers.append(view)
        return False

    return keep


def _reduce_exception(exc: BaseException) -> object:
    """Rebuilds exceptions with an `__init__` of their own without calling it, since `args` need not fit it."""
    cls = type(exc)
    if (
        cls.__reduce__ is not BaseException.__reduce__
        or cls.__reduce_ex__ is not object.__reduce_ex__
        or not isinstance(cls.__init__, types.FunctionType)
    ):
        return NotImplemented
    return rebuild_exception, (cls, exc.args, exc.__dict__ or None)


def rebuild_exception(
    cls: type[BaseException], args: tuple[object, ...], state: dict[str, object] | None
) -> BaseException:
    """Returns an exception that was pickled as its class, arguments and attributes."""
    exc: BaseException = cls.__new__(cls, *args)
    for base in cls.__mro__:
        if not isinstance(base.__dict__.get("__init__"), (types.FunctionType, type(None))):
            base.__dict__["__init__"](exc, *args)  # of a builtin, which sets its state outside of __dict__
            break
    exc.args = args
    if state:
        exc.__dict__.update(state)
    return exc


# Objects that would be pickled as a name in __main__, or not at all.


def _reduce_lru_cache(cached: "functools._lru_cache_wrapper[object]") -> object:
    if not travels_by_value(cached.__wrapped__):
        return NotImplemented
    parameters = cached.cache_parameters()
    return rebuild_lru_cache, (cached.__wrapped__, parameters["maxsize"], parameters["typed"])


def rebuild_lru_cache(
    function: Callable[..., object], maxsize: int | None, typed: bool
) -> "functools._lru_cache_wrapper[object]":
    """Returns an empty cache around `function`."""
    return functools.lru_cache(maxsize, typed)(function)


def _reduce_cached_property(prop: "functools.cached_property[object]") -> object:
    return rebuild_cached_property, (prop.func, prop.attrname)


def rebuild_cached_property(function: Callable[[Any], object], name: str | None) -> "functools.cached_property[object]":
    """Returns a cached property, which contains a lock up to Python 3.11."""
    prop = functools.cached_property(function)
    if name is not None:
        prop.attrname = name
    return prop


def _reduce_new_type(new_type: typing.NewType) -> object:
    if new_type.__module__ != "__main__":
        return NotImplemented
    return rebuild_new_type, (new_type.__name__, new_type.__supertype__, new_type.__module__)


def rebuild_new_type(name: str, supertype: object, module: str) -> object:
    """Returns a `typing.NewType` without a module to be imported from."""
    make: Any = typing.NewType  # a variable, since type checkers take the call for a declaration
    new_type = make(name, supertype)
    new_type.__module__ = module
    return new_type


_FILE_NAME = 10  # the position of `co_filename` among the parameters of `types.CodeType`


def reduce_code(code: types.CodeType) -> object:
    """Reduces code with its file name for tracebacks and breakpoints; cloudpickle omits it since 3.1.3."""
    make, values = cp._code_reduce(code)
    return make, (*values[:_FILE_NAME], code.co_filename, *values[_FILE_NAME + 1 :])


# For a pickler that differs from cloudpickle's only in names of files.
DISPATCH_TABLE: ChainMap[type, Reducer] = ChainMap({types.CodeType: reduce_code}, *cp.Pickler.dispatch_table.maps)

_SPECIAL: dict[type, Reducer] = {
    types.CodeType: reduce_code,
    functools._lru_cache_wrapper: _reduce_lru_cache,
    functools.cached_property: _reduce_cached_property,
    typing.NewType: _reduce_new_type,
}


def _warn_of_big_captures(function: types.FunctionType, captured: Mapping[str, object]) -> None:
    """Warns, naming variable and function, of each of the `captured` globals that is large."""
    for name, value in captured.items():
        if isinstance(value, _SMALL):
            continue
        size = _weight(value, depth=2)
        if size > settings.capture_warning_size:
            warnings.warn(
                f"the function `{function.__qualname__}` captures the global `{name}` ({size / 1e6:.0f} MB), which "
                "travels with every message that the function is in: pass it as an argument, or put it on the "
                "actors once",
                stacklevel=_distance_to_user(),
            )


def _weight(value: object, depth: int) -> int:
    """Estimates the bytes of `value` in a pickle; visits a bounded number of members."""
    if isinstance(value, (bytes, bytearray, str, memoryview)):
        return len(value)
    if isinstance(value, (list, tuple, set, frozenset, dict)):
        count = len(value)
        if not depth or not count:
            return 8 * count
        members = value.values() if isinstance(value, dict) else value
        sample = [_weight(member, depth - 1) for member, _ in zip(members, range(1000), strict=False)]
        return 8 * count + sum(sample) * count // len(sample)
    module: Any = getattr(sys.modules.get("torch.nn"), "Module", ())
    if isinstance(value, module):
        return sum(int(parameter.nbytes) for parameter in value.parameters())
    if type(value).__module__.partition(".")[0] not in ("numpy", "torch", "pandas", "array", "pyarrow", "polars"):
        return 0  # attributes of other types may compute anything
    try:
        if hasattr(value, "nbytes"):
            return int(value.nbytes)
        if hasattr(value, "memory_usage"):
            usage = value.memory_usage()
            return int(usage if isinstance(usage, int) else usage.sum())
        if hasattr(value, "estimated_size"):
            return int(value.estimated_size())
    except Exception:  # an estimate is not worth an error
        pass
    return 0


def _distance_to_user() -> int:
    """Returns how many frames above the caller's caller the first user frame is, for `warnings.warn`."""
    frame, distance = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_ENGINE):
        frame, distance = frame.f_back, distance + 1
    return distance
