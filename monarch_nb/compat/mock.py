"""Actors that stand in for others in tests: `monarch._src.actor.mock`."""

from collections.abc import Callable, Mapping
from typing import Generic, ParamSpec, TypeVar

from monarch_nb.lifecycle.actor_spawn import simulated_mesh, stand_ins, tensor_engines
from monarch_nb.mesh import ProcMesh
from monarch_nb.runtime.recorder import within

R = TypeVar("R")

P = ParamSpec("P")
K = TypeVar("K")
V = TypeVar("V")
TensorEngineFactory = Callable[[ProcMesh], object]  # makes the mesh of a ProcMesh


_actor_registry, _tensor_engine_registry = stand_ins, tensor_engines


class _Patch(Generic[K, V]):
    """A block during which a table holds a value under a key."""

    def __init__(self, table: dict[K, V], key: K, value: V) -> None:
        self._table, self._key, self._value = table, key, value
        self._before: list[V | None] = []

    def __enter__(self) -> V:
        self._before.append(self._table.get(self._key))
        self._table[self._key] = self._value
        return self._value

    def __exit__(self, *error: object) -> None:
        before = self._before.pop()
        if before is None:
            self._table.pop(self._key, None)
        else:
            self._table[self._key] = before

    async def __aenter__(self) -> V:
        return self.__enter__()

    async def __aexit__(self, *error: object) -> None:
        self.__exit__()

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Returns the function, run within the patch at each call."""
        return within(function, lambda: self)


class patch_actor(_Patch[type, type]):  # noqa: N801 - a verb, as unittest.mock.patch
    """Spawns `mock` instead of `original` within the block, also in processes that are spawned within it.

    For `with` and `async with`, or as a decorator of a `def` or `async def`. May be nested.
    """

    def __init__(self, original: type, mock: type) -> None:
        self.original, self.mock = original, mock
        super().__init__(stand_ins, original, mock)


class patch_tensor_engine(_Patch[type, TensorEngineFactory]):  # noqa: N801
    """Makes `procs.activate()` in actors of a class return a simulated mesh within the block; see `monarch.Simulator`.

    That includes processes spawned within it. `mock_factory` makes another mesh for a ProcMesh. For `with` and
    `async with`, or as a decorator of a `def` or `async def`. May be nested.
    """

    def __init__(self, actor_class: type, mock_factory: TensorEngineFactory | None = None) -> None:
        self.actor_class, self.mock_factory = actor_class, mock_factory or simulated_mesh
        super().__init__(tensor_engines, actor_class, self.mock_factory)


def get_actor_class(cls: type) -> type:
    """Returns the class that is spawned in place of `cls`."""
    return stand_ins.get(cls, cls)


def get_actor_mock_registry_state() -> dict[type, type]:
    """Returns a copy of the table of classes and their stand-ins."""
    return dict(stand_ins)


def set_actor_mock_registry_state(state: Mapping[type, type]) -> None:
    """Adds the entries of a table that `get_actor_mock_registry_state` has returned, also in another process."""
    stand_ins.update(state)


def get_tensor_engine_factory(cls: type) -> TensorEngineFactory | None:
    """Returns the function that makes the mesh for `activate` in actors of a class; None for the usual one."""
    return tensor_engines.get(cls)


def get_tensor_engine_mock_registry_state() -> dict[type, TensorEngineFactory]:
    """Returns a copy of the table of classes and of the functions that make their meshes."""
    return dict(tensor_engines)


def set_tensor_engine_mock_registry_state(state: Mapping[type, TensorEngineFactory]) -> None:
    """Adds the entries of a table that `get_tensor_engine_mock_registry_state` has returned."""
    tensor_engines.update(state)


__all__ = [
    "TensorEngineFactory",
    "get_actor_class",
    "get_actor_mock_registry_state",
    "get_tensor_engine_factory",
    "get_tensor_engine_mock_registry_state",
    "patch_actor",
    "patch_tensor_engine",
    "set_actor_mock_registry_state",
    "set_tensor_engine_mock_registry_state",
]
