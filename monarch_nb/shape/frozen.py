"""A base for small values that never change once made."""

from typing import NoReturn


class Frozen:
    """Refuses assignment to and deletion of attributes; subclasses fill their slots with `_fill`."""

    __slots__ = ()

    def _fill(self, **slots: object) -> None:
        for name, value in slots.items():
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"{type(self).__name__} cannot be changed (tried to set {name!r}); make a new one instead")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{type(self).__name__} cannot be changed (tried to delete {name!r})")
