"""Actors that stand in for others in tests: `monarch._src.actor.mock`."""

from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar

from monarch_nb._package import refuse
from monarch_nb.lifecycle.actor_spawn import stand_ins
from monarch_nb.runtime.spans import within

R = TypeVar("R")

P = ParamSpec("P")


_actor_registry = stand_ins


class patch_actor:  # noqa: N801 - a verb, as unittest.mock.patch
    """Within it, spawning `original` spawns `mock`; so it does in processes that are spawned within it.

    For `with` and `async with`, or as a decorator of a `def` or `async def`. May be nested.
    """

    def __init__(self, original: type, mock: type) -> None:
        self.original = original
        self.mock = mock
        self._before: list[type | None] = []

    def __enter__(self) -> type:
        self._before.append(stand_ins.get(self.original))
        stand_ins[self.original] = self.mock
        return self.mock

    def __exit__(self, *error: object) -> None:
        before = self._before.pop()
        if before is None:
            stand_ins.pop(self.original, None)
        else:
            stand_ins[self.original] = before

    async def __aenter__(self) -> type:
        return self.__enter__()

    async def __aexit__(self, *error: object) -> None:
        self.__exit__()

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """The function, run within the patch each time it is called."""
        return within(function, lambda: self)


class patch_tensor_engine:  # noqa: N801
    """A simulated tensor engine for an actor class. Raises NotImplementedError: there is none yet."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        refuse("patch_tensor_engine", "the simulator")


def get_actor_class(cls: type) -> type:
    """The class that is spawned where `cls` is asked for."""
    return stand_ins.get(cls, cls)


def get_actor_mock_registry_state() -> dict[type, type]:
    """Which classes stand in for which, as a copy."""
    return dict(stand_ins)


def set_actor_mock_registry_state(state: Mapping[type, type]) -> None:
    """Adds what `get_actor_mock_registry_state` gave elsewhere."""
    stand_ins.update(state)


__all__ = [
    "get_actor_class",
    "get_actor_mock_registry_state",
    "patch_actor",
    "patch_tensor_engine",
    "set_actor_mock_registry_state",
]
