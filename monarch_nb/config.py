"""The configuration of this process and of those it starts: `from monarch.config import configure, configured`.

Values that are set here reach processes that are spawned later; running processes keep theirs.
"""

import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar, Unpack, cast

from monarch_nb.settings import ConfigureArgs, Encoding, settings

F = TypeVar("F", bound=Callable[..., object])


def configure(**values: Unpack[ConfigureArgs]) -> None:
    """Sets keys for this process and for processes that are spawned later.

    Durations are text ("30s", "1h 30m"), numbers of seconds or timedeltas. Raises ValueError for an unknown key,
    TypeError for a value of another type; then nothing was set. Warns once about a key that has no effect here.
    """
    settings.configure({**values})


def get_global_config() -> dict[str, Any]:
    """Returns every key with the value in force, durations as text; changing the dictionary changes nothing."""
    return settings.everything()


def get_runtime_config() -> dict[str, Any]:
    """Returns the values that this program has set with `configure`."""
    return settings.runtime()


def clear_runtime_config() -> None:
    """Removes the values that this program has set; those of the environment and of the controller count again."""
    settings.replace({})


@contextlib.contextmanager
def configured(**overrides: Unpack[ConfigureArgs]) -> Iterator[dict[str, Any]]:
    """Sets keys for a `with` block, yields all keys as they are then, and restores the earlier values.

    The configuration belongs to the process: other threads see it too.
    """
    before = settings.runtime()
    try:
        configure(**overrides)
        yield get_global_config()
    finally:
        settings.replace(before)


def parametrize_config(**options: Iterable[object]) -> Callable[[F], F]:
    """Runs a pytest test once for each combination of the values given for each key."""
    if not options:
        raise ValueError("parametrize_config: name a key and its values")
    choices = [list(values) for values in options.values()]
    return _parametrized([dict(zip(options, values, strict=True)) for values in itertools.product(*choices)])


def parametrize_config_pointwise(**options: Sequence[object]) -> Callable[[F], F]:
    """Runs a pytest test once with the first values of all keys, once with the second ones, and so on."""
    if not options:
        raise ValueError("parametrize_config_pointwise: name a key and its values")
    if len({len(values) for values in options.values()}) != 1:
        lengths = ", ".join(f"{name}: {len(values)}" for name, values in options.items())
        raise ValueError(f"parametrize_config_pointwise: all keys need the same number of values; they have {lengths}")
    return _parametrized([dict(zip(options, values, strict=True)) for values in zip(*options.values(), strict=True)])


def _parametrized(sets: list[dict[str, object]]) -> Callable[[F], F]:
    import pytest

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        first = inspect.Parameter("_config", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        run: Any
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def run_async(*args: object, _config: ConfigureArgs, **kwargs: object) -> object:
                with configured(**_config):
                    return await function(*args, **kwargs)

            run = run_async
        else:

            @functools.wraps(function)
            def run_sync(*args: object, _config: ConfigureArgs, **kwargs: object) -> object:
                with configured(**_config):
                    return function(*args, **kwargs)

            run = run_sync
        # A method's `self` stays first.
        own = list(signature.parameters.values())
        index = 1 if own and own[0].name == "self" else 0
        run.__signature__ = signature.replace(parameters=[*own[:index], first, *own[index:]])
        names = ["-".join(f"{name}={value}" for name, value in args.items()) for args in sets]
        return cast(F, pytest.mark.parametrize("_config", sets, ids=names)(run))

    return decorate


__all__ = [
    "Encoding",
    "clear_runtime_config",
    "configure",
    "configured",
    "get_global_config",
    "get_runtime_config",
    "parametrize_config",
    "parametrize_config_pointwise",
]
