"""Calls whose answers are read one by one, as they arrive."""

import contextlib
import functools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Generic, NoReturn, TypeVar

from monarch_nb.runtime import unretrieved
from monarch_nb.runtime.actors.rank_errors import RankError
from monarch_nb.runtime.calls import PendingCall, Thunk, answered
from monarch_nb.runtime.future import Future

if TYPE_CHECKING:
    from monarch_nb.runtime.process import Runtime

R = TypeVar("R")


class _Unclaimed:
    """Placeholder of an answer that is an error, without a reference to the call, which reports it when discarded."""

    def __init__(self, index: int) -> None:
        self.index = index

    def __call__(self) -> NoReturn:
        raise AssertionError("an error is claimed from its call")


class StreamCall(PendingCall[None], Generic[R]):
    """Passes each reply to the next future that is observed, in the order of arrival."""

    def __init__(
        self, process: "Runtime", title: str, mesh: str, ranks: Callable[[], Sequence[int]], size: int
    ) -> None:
        super().__init__(process, title, mesh, ranks, size, lambda replies: None)
        self.future.describe = None  # no caller waits for it, and a cycle would wait for a garbage collection
        self._ready: deque[Thunk] = deque()
        self._claims: deque[Future[R]] = deque()
        self._error: BaseException | None = None
        self._retrieved = False  # True once an error was retrieved
        unretrieved.ready()
        self._taking = threading.Lock()  # answers arrive on the reading thread, failures on any

    @property
    def watched(self) -> bool:
        """True while a thread or task waits for one of its futures."""
        return any(future.watched for future in tuple(self._claims))

    def _take(self, index: int, thunk: Thunk) -> bool:
        with self._taking:
            if self._replies[index] is not None:
                return False
            return super()._take(index, answered)

    def _take_all(self, positions: range, thunk: Thunk) -> bool:
        return False  # each answer resolves its own future

    def _failed(self, index: int, raised: RankError) -> Thunk:
        self._raised[index] = raised
        return _Unclaimed(index)

    def _raise(self, index: int) -> NoReturn:
        """Raises the error of one rank; errors of other ranks are not reported any more."""
        self._retrieved = True
        raise self.restated(self._actor_error({index: self._raised[index]}, 1))

    def __del__(self) -> None:
        if self._raised and not self._retrieved:
            unretrieved.forget(functools.partial(self._raise, min(self._raised)))

    def lose(self, positions: Iterable[int], error: BaseException) -> None:
        """Fails one future for each of `positions`; the others' answers are still awaited."""

        def lost() -> NoReturn:
            raise error

        for position in positions:
            if 0 <= position < self.size and self._take(position, lost):
                self._settle(lost)

    def _settle(self, thunk: Thunk) -> None:
        self._ready.append(thunk)
        if self.missing == 0:
            self.close()
        self._match()

    def _match(self) -> None:
        while self._claims:
            try:
                thunk = self._ready.popleft()
            except IndexError:
                break
            if isinstance(thunk, _Unclaimed):
                thunk = functools.partial(self._raise, thunk.index)
            try:
                self._claims.popleft()._set_lazy(thunk)
            except IndexError:  # another thread matched the last claim
                self._ready.appendleft(thunk)
                continue  # a claim made meanwhile found nothing ready
        if self._error is not None and not self._ready:
            with contextlib.suppress(IndexError):  # another thread may fail the last
                while True:
                    self._claims.popleft()._fail(self._error)

    def fail(self, error: BaseException) -> bool:
        """Fails the futures that still wait; replies that have arrived stay."""
        self._error = error
        self.close()
        self._match()
        return True

    def cancel(self, future: Future[object] | None = None) -> bool:
        """Ends a future, unless it has its answer, and cancels the calls that have no answer yet."""
        if future is None:
            return super().cancel()
        future._observe()
        return not future._done and super().cancel()

    def futures(self) -> Iterator[Future[R]]:
        """Yields one future for each actor."""
        for _ in range(self.size):
            future: Future[R] = Future._make(describe=self.describe)
            future.wait_id = self.call
            future._cancel = self.cancel

            future._start = functools.partial(self._claim, weakref.ref(future))
            yield future

    def _claim(self, reference: "weakref.ref[Future[R]]") -> None:
        future = reference()
        if future is not None:
            self._claims.append(future)
            self._match()
