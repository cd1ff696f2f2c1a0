"""Actor classes that others stand in for where they are spawned: what `patch_actor` changes, for tests."""

from collections.abc import Callable, Mapping
from typing import Any

stand_ins: dict[type, type] = {}
"""By the class that is asked for; of this process, and of processes that it spawns from now on."""


class SetUp:
    """The set-up of new processes: they take over which classes stand in for others, then comes the user's own."""

    def __init__(self, classes: Mapping[type, type], bootstrap: Callable[[], Any] | None) -> None:
        self._classes = dict(classes)
        self._bootstrap = bootstrap

    def __call__(self) -> Any:
        """What the user's own set-up gives, which may be a coroutine."""
        stand_ins.update(self._classes)
        return None if self._bootstrap is None else self._bootstrap()


def with_stand_ins(bootstrap: Callable[[], Any] | None) -> Callable[[], Any] | None:
    """The set-up for processes that are spawned now."""
    return SetUp(stand_ins, bootstrap) if stand_ins else bootstrap
