"""Functions of a program that run on each rank, with its values of tensors: `remote`. Values of one rank: `inspect` and
others.
"""

import functools
import random
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from itertools import product
from operator import index
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from monarch_nb.mesh import SendsToPorts, ValueMesh
from monarch_nb.runtime import Future, Port, derived_future, when_done
from monarch_nb.tensor.commands import OBJECT, CallRemote, GroupOf, Name, TensorOf, mapped
from monarch_nb.tensor.errors import RankTensorError, call_site
from monarch_nb.tensor.handle import MeshTensor, current
from monarch_nb.tensor.lanes import ACTIVE, check_lane, check_loans
from monarch_nb.tensor.ranks.active import active_mesh, disabled, get_active_mesh
from monarch_nb.tensor.ranks.tensor import RankTensor
from monarch_nb.tensor.references import Reference
from monarch_nb.tensor.views import rewriting, share
from monarch_nb.tensor.workers.calls import OpaqueRef, Resolved, Returned, ReturnedTensor, to_returned
from monarch_nb.tensor.workers.handover import CallActor

if TYPE_CHECKING:
    from monarch_nb.tensor.mesh import Mesh
    from monarch_nb.tensor.stream import Stream as CommandStream

R = TypeVar("R")
_Answers: TypeAlias = Future[ValueMesh[Any]]
_MAX_CACHED = 1024  # calls whose results' shapes are known, of one function on one mesh
_WAYS = (None, "cached", "inspect", "mocked")
function_resolvers: list[Callable[[Any], Any]] = []
"""Resolvers that `remote` asks first for the function to call on the ranks.

Each gets the argument of `remote`, and returns an object with `resolve()`, which returns the function there, or None.
"""


class RemoteProcessGroup:
    """The process group of each rank along dimensions of a mesh, as an argument of a remote function.

    Raises KeyError for an unknown dimension, ValueError for none and for one that is given twice.
    """

    def __init__(self, mesh: "Mesh", dims: Sequence[str]) -> None:
        self.mesh, self.dims = mesh, tuple(dims)
        for name in self.dims:
            if name not in mesh.layout.names:
                raise KeyError(f"{mesh!r} has no dimension {name!r}; it has {', '.join(map(repr, mesh.layout.names))}")
        if not self.dims or len(set(self.dims)) < len(self.dims):
            raise ValueError(f"process_group({self.dims!r}): a group is along one or more different dimensions")
        self.dropped = False

    def size(self) -> int:
        """Number of ranks in it."""
        return self.mesh.size(self.dims)

    def drop(self) -> None:
        """Marks it as not needed any more; the groups of the ranks end with their mesh."""
        self.dropped = True

    def numbers_in(self, mesh: "Mesh") -> tuple[int, ...] | None:
        """Returns the dimensions of a mesh along which its ranks have the same groups, or None."""
        if not mesh.shares_processes(self.mesh) or not set(self.dims) <= set(mesh.layout.names):
            return None
        is_part = _groups(mesh, self.dims) <= _groups(self.mesh, self.dims)
        return tuple(sorted(mesh.layout.names.index(name) for name in self.dims)) if is_part else None


def _groups(mesh: "Mesh", dims: Sequence[str]) -> set[frozenset[int]]:
    """Returns the sets of the members of a mesh that differ in these dimensions alone."""
    rest = [number for number, name in enumerate(mesh.layout.names) if name not in dims]
    groups: dict[tuple[int, ...], list[int]] = {}
    for member, point in zip(mesh.members, product(*map(range, mesh.layout.shape)), strict=True):
        groups.setdefault(tuple(point[number] for number in rest), []).append(member)
    return set(map(frozenset, groups.values()))


class RemoteArguments:
    """The arguments of a call: its tensors, and their placeholders. Without tensors it is on `mesh`."""

    def __init__(
        self, args: tuple[object, ...], kwargs: dict[str, object], name: str, mesh: "Mesh | None" = None
    ) -> None:
        self.tensors: list[RankTensor] = []
        self._name = name
        self._groups: list[RemoteProcessGroup] = []
        self.args: tuple[object, ...] = mapped(args, self._substitute)
        self.kwargs: dict[str, object] = mapped(kwargs, self._substitute)
        streams = dict.fromkeys(tensor.reference.stream for tensor in self.tensors)
        if len(streams) > 1:
            raise RankTensorError("WRONG_MESH", f"{name}: tensors of {len(streams)} meshes are its arguments")
        mesh = self.tensors[0].device_mesh if self.tensors else mesh or active_mesh()
        if mesh is None:
            raise ValueError(f"{name}: Remote functions require an active device mesh, use `with mesh.activate():`")
        self.mesh = mesh if self.tensors else mesh.on(ACTIVE.stream)
        self.joined = bool(self._groups)
        if self.joined:
            self.args, self.kwargs = mapped((self.args, self.kwargs), self._group_of)
        stream = self.mesh.stream
        check_lane(stream, name, [tensor.reference for tensor in self.tensors], ())
        stream.resume_if_healed()
        stream.draws.announce(stream)

    def _group_of(self, value: object) -> object:
        if not isinstance(value, RemoteProcessGroup):
            return value
        numbers = value.numbers_in(self.mesh)
        if numbers is None:
            raise RankTensorError(
                "WRONG_MESH",
                f"{self._name}: a process group of {value.mesh!r} is an argument, and {self.mesh!r} runs it",
            )
        return GroupOf(numbers)

    def _substitute(self, value: object) -> object:
        if isinstance(value, MeshTensor):
            if not isinstance(value, RankTensor):
                raise TypeError(f"{self._name}: a sharded tensor is an argument: t.per_rank() gives each rank its part")
            value.reference.stream.resume_if_healed()
            value.reference.stream.held.require_contents((value.reference.number,))
            number = current(value)
            if all(number != tensor.reference.number for tensor in self.tensors):
                self.tensors.append(value)
            return TensorOf(number)
        if isinstance(value, torch.Tensor) and value.dim():
            raise RankTensorError(
                "LOCAL_TENSOR",
                f"{self._name}: a local tensor of shape {tuple(value.shape)} is an argument: make it on the ranks, "
                "inside `with mesh.activate():`",
            )
        if isinstance(value, OpaqueRef):
            return OpaqueRef.of_key(mapped(value.key, self._substitute))
        if isinstance(value, RemoteProcessGroup):
            self._groups.append(value)
            return value  # until it is known which mesh runs the function
        return value

    def key(self) -> object:
        """Returns the facts that the shapes of results may depend on, on one mesh; None if they cannot be compared."""
        memories: dict[object, int] = {}
        tensors = {tensor.reference.number: tensor for tensor in self.tensors}
        key = (_facts(self.args, tensors, memories), _facts(self.kwargs, tensors, memories))
        try:
            hash(key)
        except TypeError:
            return None
        return key


def _facts(value: object, tensors: Mapping[int, RankTensor], memories: dict[object, int]) -> object:
    """Returns the facts of one argument that the shapes of results may depend on. `memories` are numbered in order."""
    if isinstance(value, TensorOf):
        tensor = tensors[value.number]
        memory = tensor.reference.memory or tensor.reference
        return tensor.meta, memories.setdefault(memory, len(memories)), tensor.requires_grad
    if isinstance(value, OpaqueRef):
        return OpaqueRef, _facts(value.key, tensors, memories)
    if isinstance(value, list | tuple):
        return type(value), tuple(_facts(item, tensors, memories) for item in value)
    if isinstance(value, dict):
        return tuple((name, _facts(item, tensors, memories)) for name, item in value.items())
    return type(value), value


class Remote(SendsToPorts):
    """A function that runs on each rank. A call returns tensors of the ranks' own, without waiting for them.

    The result is a tree of tensors; their shapes come from the first call with such arguments, which waits for it, or
    from `propagate`, a function that is called here with tensors without values.
    """

    def __init__(self, function: Callable[..., object] | str, propagate: object = None) -> None:
        if not (propagate in _WAYS if not callable(propagate) else True):
            raise ValueError(f"propagate={propagate!r} is none of None, 'cached', 'inspect', 'mocked' and a function")
        self._name = function if isinstance(function, str) else getattr(function, "__name__", repr(function))
        self._function, self._propagate = _resolve(function, self._name), propagate
        self._cached: weakref.WeakKeyDictionary[CommandStream, dict[object, Returned]] = weakref.WeakKeyDictionary()
        if not isinstance(function, str):
            functools.update_wrapper(self, function, updated=())

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Calls it on each rank of the arguments' mesh, or of the active one; see `Remote`."""
        inputs = RemoteArguments(args, kwargs, self._name)
        return self.issued(inputs, args, kwargs, key=inputs.key())()

    rref = __call__

    def issued(
        self, inputs: RemoteArguments, args: tuple[object, ...], kwargs: dict[str, object], key: object = None
    ) -> Callable[[], Any]:
        """Issues a call with `inputs`; returns a function that returns its results, and waits for unknown shapes.

        `args` and `kwargs` are for `propagate`; shapes depend on `key`, which is None if that is unknown.
        """
        if self._propagate == "mocked":
            raise NotImplementedError("propagate='mocked': give a function that computes on tensors without values")
        command = self._command(inputs)
        if self._propagate == "inspect":
            _issue(inputs, command, range(len(inputs.tensors)))
            return _nothing
        if callable(self._propagate):
            outcome = _predict(self._propagate, inputs, args, kwargs)
        else:
            cached = self._cached.get(inputs.mesh.stream, {}).get(key)
            if cached is None:
                return self._first(inputs, command, key)
            outcome = cached
        check_loans(inputs.mesh.stream, self._name, [tensor.reference for tensor in inputs.tensors], outcome.written)
        references = [_hold(inputs, result) for result in outcome.tensors]
        numbers = tuple(reference.number for reference in references)
        command = with_writes(command, [inputs.tensors[index] for index in outcome.written], results=numbers)
        _issue(inputs, command, outcome.written)
        return functools.partial(_result, inputs, outcome, references)

    def _command(self, inputs: RemoteArguments) -> CallRemote:
        command = CallRemote(self._function, inputs.args, inputs.kwargs, joined=inputs.joined)
        return command if isinstance(self._function, CallActor) else command.pack(inputs.mesh.stream)

    def _first(self, inputs: RemoteArguments, command: CallRemote, key: object) -> Callable[[], Any]:
        """Calls it; the results are named once the ranks have described them."""
        stream = inputs.mesh.stream
        bundle = stream.hold_object()
        command = with_writes(command, inputs.tensors, bundle=bundle.number)
        with rewriting(tensor.reference for tensor in inputs.tensors):
            request = stream.requested([(OBJECT, command)], f"remote({self._name})")

        def name_results() -> Any:
            [replies] = request.get()
            outcome = cast(Returned, next(iter(replies.values())))
            if key is not None:
                cached = self._cached.setdefault(stream, {})
                if len(cached) >= _MAX_CACHED:  # an argument is another number each time
                    cached.clear()
                cached[key] = outcome
            references = [_hold(inputs, result) for result in outcome.tensors]
            stream.issue_object(Name(bundle.number, tuple(reference.number for reference in references)))
            return _result(inputs, outcome, references)

        return name_results

    def call(self, *args: object, **kwargs: object) -> _Answers:
        """Calls it on each rank; the future gives the result of each, with tensors as local ones on the CPU."""
        return self.ask(RemoteArguments(args, kwargs, self._name))

    def call_one(self, *args: object, **kwargs: object) -> Future[Any]:
        """Like `call`, on a mesh of one rank: the future gives its result. Raises ValueError for a larger mesh."""
        inputs = RemoteArguments(args, kwargs, self._name)
        if len(inputs.mesh) != 1:
            raise ValueError(f"call_one: {inputs.mesh!r} has {len(inputs.mesh)} ranks, not exactly one")
        return _of_rank(self.ask(inputs), 0)

    def choose(self, *args: object, **kwargs: object) -> Future[Any]:
        """Like `call`, on any one rank; the future gives its result."""
        inputs = RemoteArguments(args, kwargs, self._name)
        rank = random.randrange(len(inputs.mesh))
        return _of_rank(self.ask(inputs, rank), rank)

    def stream(self, *args: object, **kwargs: object) -> Iterator[Future[Any]]:
        """Like `call`; yields a future for each rank."""
        inputs = RemoteArguments(args, kwargs, self._name)
        values = self.ask(inputs)
        return iter([_of_rank(values, rank) for rank in range(len(inputs.mesh))])

    def broadcast(self, *args: object, **kwargs: object) -> None:
        """Calls it on each rank without replies; reports errors."""
        inputs = RemoteArguments(args, kwargs, self._name)
        command = self._command(inputs)
        _issue(inputs, command, range(len(inputs.tensors)))

    def send_to(
        self, port: Port[Any] | None, args: tuple[object, ...], kwargs: dict[str, object], *, single: bool
    ) -> None:
        """Calls it on each rank, or on any one; results go to the port, if any."""
        if port is None:
            self.broadcast(*args, **kwargs)
            return
        values: Future[Any] = self.choose(*args, **kwargs) if single else self.call(*args, **kwargs)

        def deliver() -> None:
            try:
                result = values.get()
            except Exception as error:
                port.exception(error)
            else:
                for value in [result] if single else result.values():
                    port.send(value)

        thread = threading.Thread(target=deliver, name="monarch-remote-answers", daemon=True)
        when_done(values, lambda _: thread.start())

    def ask(self, inputs: RemoteArguments, only: int | None = None) -> _Answers:
        """Like `call`, with arguments that are read already, on all ranks or on a single one."""
        command = with_writes(self._command(inputs), inputs.tensors, replies=True, only=only)
        with rewriting(tensor.reference for tensor in inputs.tensors):
            values = inputs.mesh.stream.requested([(OBJECT, command)], f"remote({self._name})")
        return derived_future(values, lambda: values.get()[0])

    def __repr__(self) -> str:
        return f"<remote {self._name}>"


def _resolve(function: Callable[..., object] | str, name: str) -> Callable[..., object] | str:
    answer = next((answer for resolver in function_resolvers if (answer := resolver(function)) is not None), None)
    return function if answer is None else Resolved(answer, name)


def remote(function: Any = None, *, propagate: object = None) -> Any:
    """Makes a function, or the function at a path such as "math.sqrt", run on each rank: `Remote`. Also a decorator.

    `propagate` defines the shapes of results: a function, which is called with tensors without values; "inspect": it
    returns nothing; None or "cached": from the first call with such arguments, which waits.
    """
    if function is None:
        return functools.partial(remote, propagate=propagate)
    return Remote(function, propagate)


def call_on_shard_and_fetch(
    remote: Remote, *args: object, shard: Mapping[str, int] | None = None, **kwargs: object
) -> Future[Any]:
    """Calls a remote function on the rank at coordinates; the future gives its result. See `fetch_shard`."""
    if not isinstance(remote, Remote):
        raise TypeError(
            f"call_on_shard_and_fetch: {remote!r} is no remote function: monarch.remote(function) makes one"
        )
    inputs = RemoteArguments(args, kwargs, "call_on_shard_and_fetch")
    rank = rank_at(inputs.mesh, shard, {}, "call_on_shard_and_fetch")
    return _of_rank(remote.ask(inputs, rank), rank)


def _of_rank(values: _Answers, rank: int) -> Future[Any]:
    return derived_future(values, lambda: values.get().values()[rank])


def with_writes(command: CallRemote, writes: Sequence[RankTensor], **changed: Any) -> CallRemote:
    """Returns the command with these tensors as the ones that it changes."""
    numbers = tuple(tensor.reference.number for tensor in writes)
    return replace(command, writes=numbers, **changed)


def _nothing() -> None:
    """Replaces the result of a function that returns nothing."""


def _issue(inputs: RemoteArguments, command: CallRemote, written: Sequence[int]) -> None:
    targets = [inputs.tensors[index].reference for index in written]
    stream = inputs.mesh.stream
    stream.resume_if_healed()
    with rewriting(targets):
        stream.issue((OBJECT, command), call_site(), [target.writes for target in targets])


def _hold(inputs: RemoteArguments, result: ReturnedTensor) -> Reference:
    """Returns a reference to a tensor that a call returns, which may share memory with an argument."""
    reference = inputs.mesh.stream.hold(result.meta, call_site())
    if result.source >= 0:
        share(reference, inputs.tensors[result.source].reference, result.offset, None)
    return reference


def _result(inputs: RemoteArguments, outcome: Returned, references: Sequence[Reference]) -> Any:
    remaining = iter(references)
    return tree_map_only(ReturnedTensor, lambda leaf: MeshTensor(leaf.meta, next(remaining)), outcome.tree)


class _ThreadMode(threading.local):
    """A mode in which tensors have no values, for each thread, since making one takes as long as a prediction."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode()


_thread = _ThreadMode()


def _predict(function: Callable[..., object], inputs: RemoteArguments, args: object, kwargs: object) -> Returned:
    """Returns the result of a propagating function for tensors without values, which it may change in place."""
    layout = inputs.mesh.stream.layout
    fakes: dict[int, torch.Tensor] = {}
    leaves, tree = tree_flatten((args, kwargs))
    has_local = any(isinstance(leaf, torch.Tensor) and not isinstance(leaf, RankTensor) for leaf in leaves)
    # A mode reuses what it has made of a local tensor, although either may have changed since.
    with disabled(), FakeTensorMode() if has_local else _thread.mode as mode, torch.no_grad():
        for tensor in inputs.tensors:
            meta, number = tensor.meta, tensor.reference.number
            fakes[number] = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=layout.device)

        def fill_in(leaf: object) -> object:
            if isinstance(leaf, RankTensor):
                return fakes[leaf.reference.number]
            return mode.from_tensor(leaf) if isinstance(leaf, torch.Tensor) else leaf

        filled = [fill_in(leaf) for leaf in leaves]
        fake_inputs = [fakes[tensor.reference.number] for tensor in inputs.tensors]
        versions = [fake._version for fake in fake_inputs]
        fake_args, fake_kwargs = tree_unflatten(filled, tree)
        value = function(*fake_args, **fake_kwargs)
        return to_returned(value, fake_inputs, versions, layout)


def rank_at(mesh: "Mesh", shard: Mapping[str, int] | None, coordinates: Mapping[str, int], operation: str) -> int:
    """Returns the rank in a mesh at these coordinates; the first one without any.

    Raises KeyError for an unknown dimension, ValueError for a missing one, IndexError for one out of range.
    """
    point = {**(shard or {}), **coordinates}
    sizes = mesh.sizes
    for name in point:
        if name not in sizes:
            raise KeyError(
                f"{operation}: {mesh!r} has no dimension {name!r}; it has {', '.join(map(repr, sizes)) or 'none'}"
            )
    if not point:
        return 0
    rank = 0
    for name, size in sizes.items():
        if name not in point:
            raise ValueError(
                f"{operation}: Missing key {name!r} in shard map: give a coordinate for each dimension, or none"
            )
        coordinate = index(point[name])
        if not 0 <= coordinate < size:
            raise IndexError(f"{operation}: {name}={coordinate} is out of range; {mesh!r} has {size} along {name!r}")
        rank = rank * size + coordinate
    return rank


def mesh_of_all(tensors: list[Any], operation: str) -> "Mesh":
    """Returns the mesh of tensors, or the active one without any. Raises RankTensorError for several."""
    meshes = list(dict.fromkeys(tensor.reference.stream for tensor in tensors))
    if (count := len(meshes)) > 1:
        raise RankTensorError("WRONG_MESH", f"{operation}: tensors of {count} meshes; take those of one at a time")
    return tensors[0].device_mesh if tensors else get_active_mesh().on(ACTIVE.stream)


def fetch_shard(obj: object, /, shard: Mapping[str, int] | None = None, **coordinates: int) -> Future[Any]:
    """Returns one rank's values of the tensors in `obj`, as local tensors on the CPU; other leaves as they are.

    The rank is at the given coordinates; without any, at the first of each dimension. Does not block; the future waits
    for all earlier operations on their mesh, and raises TensorError if operations that they depend on have failed on
    any rank. `fetch_shard(None)` waits for all earlier operations on the active mesh.
    """
    leaves, tree = tree_flatten(obj)
    tensors = [leaf for leaf in leaves if isinstance(leaf, MeshTensor)]
    _refuse_sharded(tensors)
    mesh = mesh_of_all(tensors, "fetch_shard")
    check_lane(mesh.stream, "fetch_shard", [tensor.reference for tensor in tensors], ())
    rank = rank_at(mesh, shard, coordinates, "fetch_shard")
    values = mesh.stream.own_of([current(tensor) for tensor in tensors], rank)

    def fetched() -> Any:
        shards = iter(values.get())
        return tree_unflatten(
            [next(shards).values()[rank] if isinstance(leaf, MeshTensor) else leaf for leaf in leaves], tree
        )

    return derived_future(values, fetched)


def _refuse_sharded(tensors: list[MeshTensor]) -> None:
    if any(not isinstance(tensor, RankTensor) for tensor in tensors):
        raise TypeError(
            "fetch_shard: a tensor that is sharded over ranks is fetched whole, t.full_tensor(), or by t.local_shards()"
        )


def inspect(obj: object, /, shard: Mapping[str, int] | None = None, **coordinates: int) -> Any:
    """Returns the values of one rank; blocks. See `fetch_shard`."""
    return fetch_shard(obj, shard, **coordinates).get()


def show(obj: object, /, shard: Mapping[str, int] | None = None, **coordinates: int) -> Any:
    """Shows the values of one rank: as an image by torchshow, if installed, else printed. Blocks."""
    value = inspect(obj, shard, **coordinates)
    try:
        torchshow = import_module("torchshow")
    except ImportError:
        sys.stdout.write(f"{value}\n")
        return None
    return torchshow.show(value)
