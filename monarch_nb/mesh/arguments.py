"""The arguments of a call: checked against the method's signature, and encoded; errors name unsendable ones."""

import functools
import inspect
from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager

from monarch_nb.runtime import AnyEndpoint, PendingCall, current_runtime
from monarch_nb.wire import OutFrame, encode, pickle_failure, text_of


class HeldByRanksError(TypeError):
    """An argument is a tensor whose values are in other processes, so that it cannot be pickled."""


class LentFrames(list[OutFrame]):
    """The body of a call whose arguments are in its actors' processes already; see `LentArguments`."""

    @abstractmethod
    def sending(self, call: str, pending: PendingCall[object] | None = None) -> AbstractContextManager[None]:
        """Surrounds the sending of a call, by id; then the arguments are passed, in order with their operations.

        `pending` waits for its answers.
        """


def hidden_from_callers(declared: AnyEndpoint) -> int:
    """Returns the number of first parameters that callers do not pass: the object, and the port for its replies."""
    return 2 if declared.explicit_response_port else 1


@functools.lru_cache(maxsize=1024)
def callers_signature(method: Callable[..., object], hidden: int) -> inspect.Signature:
    """Returns the signature of a method without its `hidden` first parameters."""
    signature = inspect.signature(method)
    return signature.replace(parameters=list(signature.parameters.values())[hidden:])


@functools.lru_cache(maxsize=1024)
def _arity(method: Callable[..., object], hidden: int) -> tuple[inspect.Signature, int, int]:
    """Returns the signature without `hidden` first parameters, and the least and most positional arguments that fit."""
    signature = callers_signature(method, hidden)
    parameters = signature.parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if any(p.kind == p.KEYWORD_ONLY and p.default is p.empty for p in parameters):
        return signature, 1, 0  # never surely
    return signature, sum(p.default is p.empty for p in positional), len(positional)


def check_arguments(
    method: Callable[..., object], hidden: int, title: str, args: tuple[object, ...], kwargs: dict[str, object]
) -> None:
    """Raises TypeError here, at the caller, for arguments that do not fit."""
    signature, least, most = _arity(method, hidden)
    if not kwargs and least <= len(args) <= most:
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{title}{signature}: {text_of(error)}") from None


def arguments_that_fit(declared: AnyEndpoint) -> range:
    """Returns the numbers of positional arguments that surely fit an endpoint."""
    _, least, most = _arity(declared.method, hidden_from_callers(declared))
    return range(least, most + 1)


def encode_arguments(
    title: str,
    args: tuple[object, ...],
    kwargs: dict[str, object],
    method: Callable[..., object] | None = None,
    hidden: int = 0,
) -> list[OutFrame]:
    """Returns the body of a call. Raises TypeError with the argument that cannot be sent, and the path to its cause."""
    try:
        runtime = current_runtime()
        return encode((args, kwargs), runtime, gpu=runtime.is_worker)
    except HeldByRanksError:
        raise
    except Exception as error:
        failure = error
    culprit = None if method is None else _unsendable(method, hidden, args, kwargs)
    if culprit is None:
        raise pickle_failure(failure, (args, kwargs), f"`arguments` of {title}")
    name, value = culprit
    raise pickle_failure(failure, value, f"argument `{name}` of {title}")


def _unsendable(
    method: Callable[..., object], hidden: int, args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[str, object] | None:
    """Returns the first argument that cannot be sent by itself."""
    try:
        arguments = _arity(method, hidden)[0].bind(*args, **kwargs).arguments
    except TypeError:
        return None
    for name, value in arguments.items():
        try:
            encode(value, current_runtime())
        except Exception:
            return name, value
    return None
