"""Folding the answers of a mesh into one value."""

from collections.abc import Callable, Iterator
from typing import Generic, ParamSpec, TypeVar

from monarch_nb.mesh.endpoint import Endpoint
from monarch_nb.runtime import Future, returns_future

P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A")


class Accumulator(Generic[P, R, A]):
    """Calls an endpoint on a whole mesh and folds the answers, in the order they arrive: `combine(so_far, answer)`."""

    def __init__(self, endpoint: Endpoint[P, R], identity: A, combine: Callable[[A, R], A]) -> None:
        self._endpoint = endpoint
        self._identity = identity
        self._combine = combine

    def accumulate(self, *args: P.args, **kwargs: P.kwargs) -> Future[A]:
        """Sends the call now; the answers are folded when the future is looked at, by whoever looks."""
        answers = self._endpoint.stream(*args, **kwargs)

        @returns_future
        async def fold(answers: Iterator[Future[R]]) -> A:
            value = self._identity
            for answer in answers:
                value = self._combine(value, await answer)
            return value

        return fold(answers)
