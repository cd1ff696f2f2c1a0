"""The device of sharded tensors: `torch.device("mesh", 2)` is one mesh of several, `torch.device("mesh")` the current.

PyTorch reserves one name for backends like this (privateuse1). Where another package has taken it, handles report
the CPU: everything works except what depends on the device, such as `torch.arange(n, device=x.device)`.
"""

import contextlib
import ctypes
import gc
import sys
import threading
import time
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import repeat, starmap
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from monarch_nb._package import refuse_old_torch
from monarch_nb.mesh import ProcMesh
from monarch_nb.tensor.seeds import THREAD, mixed
from monarch_nb.tensor.stream import Stream

if TYPE_CHECKING:
    from monarch_nb.tensor.mesh import Mesh

Device = torch.device | str | int | None
NAME = "mesh"
_FREE = "privateuseone"
_FREED_WITHIN_S = 5.0  # the longest wait for unreferenced meshes, whose ranks still have to reply
_MOST = 127  # an index has seven bits

_streams: "weakref.WeakValueDictionary[int, Stream]" = weakref.WeakValueDictionary()  # by index
_procs: "weakref.WeakKeyDictionary[Stream, ProcMesh]" = weakref.WeakKeyDictionary()
_meshes: "weakref.WeakKeyDictionary[Stream, Callable[[Stream], Mesh]]" = weakref.WeakKeyDictionary()
_entered: list[Stream] = []  # `with mesh:`
_latest: "weakref.ref[Stream] | None" = None
_claimed: bool | None = None
_seed_state = (0, 0)  # torch's seed, and the number of meshes begun since it was set
_variable: Any = torch.autograd.Variable  # without types
_engine: Any = type(_variable._execution_engine)
_StoredError = tuple[int | None, ...]  # None, the addresses of an error's parts, its thread
_stored_errors: list[_StoredError] = []


class MeshModule(types.ModuleType):
    """The module `torch.mesh`, as PyTorch requires of a backend."""

    _initialized = True  # else activation checkpoints would not save the state of random numbers

    def is_initialized(self) -> bool:
        """Always true."""
        return True

    def is_available(self) -> bool:
        """Always true."""
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        """One more than the largest index in use."""
        return max(_streams, default=0) + 1

    def current_device(self) -> int:
        """Returns the index of the current mesh."""
        stream = current_stream()
        return (stream.device.index or 0) if stream is not None else 0

    def set_device(self, device: torch.device | str | int) -> None:
        """Sets the current mesh."""
        global _latest
        index = device if isinstance(device, int) else torch.device(device).index
        if index is not None and index >= 0:
            _latest = weakref.ref(stream_at(index))

    @contextlib.contextmanager
    def device(self, device: Device) -> Iterator[None]:
        """Sets the current mesh in a `with` block."""
        stream = _stream_of(device)
        _entered.append(stream)
        try:
            yield
        finally:
            _entered.remove(stream)

    def manual_seed_all(self, seed: int) -> None:
        """Seeds random operations on all meshes; called by `torch.manual_seed`."""
        global _seed_state
        if THREAD.runs_operations:  # in the process of a rank that has meshes of its own
            return
        _seed_state = (seed, 0)
        for stream in tuple(_streams.values()):
            stream.draws.reseed(stream, seed)

    manual_seed = manual_seed_all

    def get_rng_state(self, device: Device = None) -> torch.Tensor:
        """Returns the state for `set_rng_state`: two numbers."""
        stream = _stream_of(device)
        return torch.tensor([stream.draws.seed, stream.draws.drawn], dtype=torch.int64).view(torch.uint8)

    def set_rng_state(self, state: torch.Tensor, device: Device = None) -> None:
        """Restores a state of random operations."""
        stream = _stream_of(device)
        stream.draws.seed, stream.draws.drawn = (int(number) for number in state.view(torch.int64).tolist())

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """Returns the dtypes for `torch.autocast("mesh")`."""
        return [torch.bfloat16, torch.float16]

    def synchronize(self, device: Device = None) -> None:
        """Blocks until all issued operations have run. Raises TensorError for one that failed."""
        _stream_of(device).synchronise()


def claim() -> bool:
    """Registers the device name "mesh" once; returns whether that succeeded."""
    global _claimed
    if _claimed is None:
        _claimed = _claim()
    return _claimed


class _Error(ctypes.Structure):
    """Output of `PyErr_Fetch`, up to Python 3.11."""

    _fields_ = (("kind", ctypes.c_void_p), ("value", ctypes.c_void_p), ("trace", ctypes.c_void_p))


_PARTS = [name for name, _ in _Error._fields_]


def _error_parts() -> list[Iterable[object]]:
    """Returns iterators over pending errors: a step of the first two takes the error, the second and the following
    yield the addresses of its parts, or None."""
    if sys.version_info >= (3, 12):
        raised = ctypes.PYFUNCTYPE(ctypes.c_void_p)(("PyErr_GetRaisedException", ctypes.pythonapi))
        return [repeat(None), starmap(raised, repeat(()))]
    fetch, error = ctypes.PYFUNCTYPE(None)(("PyErr_Fetch", ctypes.pythonapi)), _Error()
    pointers = tuple(ctypes.byref(error, getattr(_Error, name).offset) for name in _PARTS)
    return [starmap(fetch, repeat(pointers)), *(map(attrgetter(name), repeat(error)) for name in _PARTS)]


def _raise(parts: tuple[int | None, ...]) -> NoReturn:
    """Raises a stored error with its traceback."""
    name = "PyErr_SetRaisedException" if sys.version_info >= (3, 12) else "PyErr_Restore"
    ctypes.PYFUNCTYPE(None, *(ctypes.c_void_p for _ in parts))((name, ctypes.pythonapi))(*parts)
    raise AssertionError("nothing was raised")


def device_guard() -> object:
    """Returns the guard that PyTorch requires for the device type and streams.

    Its function consists of C functions: a Python function would check signals, and be traced by a debugger, with an
    error pending. It is a class attribute, since Python clears errors before looking up instance attributes.
    """
    records = zip(*_error_parts(), starmap(threading.get_ident, repeat(())), strict=False)
    errors = map(partial(filter, itemgetter(1)), zip(records, strict=False))
    kind = torch._C._autograd.DeviceType
    answers = zip(map(_stored_errors.extend, errors), repeat(kind.PrivateUse1), strict=False)
    acc: Any = torch._C._acc
    answer = staticmethod(partial(next, map(itemgetter(1), answers)))
    return type("DeviceGuard", (acc.DeviceGuard,), {"type_": answer})()


class _Engine(_engine):  # type: ignore[misc]
    """PyTorch's autograd engine, which also raises the errors that the device guard has stored."""

    def run_backward(self, *args: object, **kwargs: object) -> object:
        """Runs a backward pass; raises the error of an operation or hook."""
        try:
            return super().run_backward(*args, **kwargs)
        except RuntimeError as error:
            if "opt_ready_stream" not in str(error):
                raise
            raise RuntimeError(
                "PyTorch cannot compute gradients of tensors of a GPU in a process in which sharded tensors are used "
                "too (pytorch/pytorch#161129): train on the mesh, with Mesh(..., device='cuda'), or in an actor"
            ) from error
        except SystemError:
            records = [record for record in _stored_errors if record[-1] == threading.get_ident()]
            if not records:
                raise
        for record in records:
            _stored_errors.remove(record)
        _raise(records[-1][1:-1])


def after_backward(call: Callable[[], object]) -> None:
    """Calls a function at the end of the backward pass that runs in this thread."""
    _variable._execution_engine.queue_callback(call)


def keep_errors() -> None:
    """Makes backward passes of this process raise the errors that the device guard has stored."""
    if not isinstance(_variable._execution_engine, _Engine):
        _variable._execution_engine = _Engine()


def _claim() -> bool:
    try:
        from torch.utils.backend_registration import _setup_privateuseone_for_python_backend as set_up
    except ImportError as error:
        refuse_old_torch(error)
        raise
    name = torch._C._get_privateuse1_backend_name()
    if name != _FREE:
        warnings.warn(
            f'another package has taken the one device name that PyTorch keeps free, as "{name}": sharded tensors '
            'will say that they are on "cpu", and what makes tensors with device=x.device makes local ones',
            stacklevel=4,
        )
        return False
    set_up(NAME, backend_module=MeshModule(f"torch.{NAME}"), device_guard=device_guard())
    keep_errors()
    return True


def new_device() -> torch.device:
    """Returns a device with a free index. Raises RuntimeError if all indices are used."""
    if not claim():
        return torch.device("cpu")
    index, deadline = _free_index(), time.monotonic() + _FREED_WITHIN_S
    while index is None and time.monotonic() < deadline:
        gc.collect()  # streams of a program and their meshes refer to each other
        index = _free_index()
        if index is None:
            time.sleep(0.05)
    if index is None:
        raise RuntimeError(f"there are {_MOST} tensor meshes already: drop some of them, with all their tensors")
    return torch.device(NAME, index)


def _free_index() -> int | None:
    return next((index for index in range(_MOST) if index not in _streams), None)


def occupy(stream: Stream, procs: ProcMesh | None, mesh: "Callable[[Stream], Mesh]") -> None:
    """Binds a device to its stream, and makes the stream current unless another one is entered.

    `mesh` returns the `Mesh` of the stream, without a strong reference. A simulated one has no processes, and does not
    become the current one.
    """
    global _latest
    _meshes[stream] = mesh
    if stream.device.type == NAME:
        _streams[stream.device.index] = stream
    if procs is None:
        return
    stream.draws.begin(stream, _first_seed() if stream.lane is None else torch.initial_seed())
    _procs[stream] = procs
    _latest = weakref.ref(stream)


def _first_seed() -> int:
    """Returns the seed of a new mesh: torch's seed, changed for each further mesh since it was set."""
    global _seed_state
    seed, count = torch.initial_seed(), 0
    if _seed_state[0] == seed:
        count = _seed_state[1]
    _seed_state = (seed, count + 1)
    return mixed(seed, count) if count else seed


def mesh_of(stream: Stream) -> "Mesh":
    """Returns the `Mesh` of a stream."""
    return _meshes[stream](stream)


def streams() -> list[tuple[Stream, ProcMesh]]:
    """Returns the streams of all tensor meshes, oldest first, with their proc meshes."""
    return list(_procs.items())


def stream_at(index: int | None) -> Stream:
    """Returns the stream of an index, or the current one. Raises RuntimeError if there is none."""
    stream = current_stream() if index is None or index < 0 else _streams.get(index)
    if stream is None:
        raise RuntimeError(
            f'torch.device("{NAME}"{"" if index is None else f", {index}"}) is no mesh: make one first, '
            "with monarch.distributed.Mesh(shape=..., mesh_dim_names=...)"
        )
    return stream


def current_stream() -> Stream | None:
    """Returns the current stream: that of the innermost `with mesh:`, else the latest."""
    if _entered:
        return _entered[-1]
    return _latest() if _latest is not None else None


@contextlib.contextmanager
def entered(stream: Stream) -> Iterator[None]:
    """Makes tensor factories without a device use this mesh, in a `with` block."""
    _entered.append(stream)
    try:
        with torch.device(stream.device):
            yield
    finally:
        _entered.remove(stream)


def _stream_of(device: Device) -> Stream:
    index = device if isinstance(device, int) or device is None else torch.device(device).index
    return stream_at(index)
