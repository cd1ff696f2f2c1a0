"""Which thread waits for which lock, and which one holds it: real threads."""

import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from monarch_nb.diagnosis.locks import LockWaits

pytestmark = pytest.mark.timeout(60)


class Locks:
    """Locks in all the ways in which a program may name them, and threads that take two of them."""

    def __init__(self) -> None:
        self.__hidden = threading.Lock()
        self.lock, self.reentrant = threading.Lock(), threading.RLock()
        self.condition, self.plain_condition = threading.Condition(), threading.Condition(threading.Lock())
        self.by_name = {"x": threading.Lock()}
        self.at = [threading.Lock()]
        self.done = False
        self.meet = threading.Barrier(2)

    def attribute(self) -> None:
        with self.lock:
            self.meet.wait()
            with self.reentrant:
                pass

    def reentrant_owner(self) -> None:
        with self.reentrant:
            self.meet.wait()
            self.lock.acquire()

    def private(self) -> None:
        with self.__hidden:
            self.meet.wait()
            with self.condition:
                pass

    def condition_owner(self) -> None:
        with self.condition:
            self.meet.wait()

            def inner() -> None:
                with self.__hidden:
                    pass

            inner()

    def several(self) -> None:
        with self.by_name["x"], self.pause(), self.at[0]:
            pass

    def item(self) -> None:
        lock = self.at[0]
        with lock:
            self.meet.wait()
            self.by_name["x"].acquire()

    def pause(self) -> threading.RLock:  # type: ignore[valid-type]
        self.meet.wait()
        return threading.RLock()

    def waiter(self) -> None:
        """Releases the lock of its condition while it waits."""
        with self.plain_condition:
            self.meet.wait()
            self.plain_condition.wait_for(lambda: self.done)
            with self.lock:
                pass

    def unrelated(self) -> None:
        with self.lock:
            self.meet.wait()
            while not self.done:
                with self.plain_condition:
                    self.plain_condition.notify_all()
                time.sleep(0.01)

    def own(self) -> None:
        with self.lock, self.lock:
            pass

    def twice(self) -> None:
        """A lock that may be taken twice."""
        with self.reentrant, self.reentrant:
            self.meet.wait()
            with self.lock:
                pass


def waits_of(*targets: Callable[[], None]) -> LockWaits:
    """The waits of threads that run these functions, after they have stopped running."""
    threads = [threading.Thread(target=target, name=target.__name__, daemon=True) for target in targets]
    for thread in threads:
        thread.start()
    idents = {thread.ident for thread in threads}
    before: dict[int, int] = {}
    while True:
        frames = {ident: frame for ident, frame in sys._current_frames().items() if ident in idents}
        lines = {ident: frame.f_lasti for ident, frame in frames.items()}
        if lines == before:
            return LockWaits(frames)
        before = lines
        time.sleep(0.05)


@pytest.fixture
def locks() -> Iterator[Locks]:
    locks = Locks()
    yield locks
    locks.done = True


@pytest.mark.parametrize(
    ("targets", "names"),
    [
        (("attribute", "reentrant_owner"), {"self.reentrant", "self.lock"}),
        (("private", "condition_owner"), {"self.condition", "self.__hidden"}),
        (("several", "item"), {"self.at[0]", "self.by_name['x']"}),
    ],
)
def test_two_threads_that_take_locks_in_other_orders_are_a_circle(
    locks: Locks, targets: tuple[str, str], names: set[str]
) -> None:
    circle = waits_of(*(getattr(locks, target) for target in targets)).circle()
    assert {wait.lock for wait in circle} == names
    assert {wait.thread for wait in circle} == {wait.owner for wait in circle} == set(targets)


def test_a_thread_that_takes_a_lock_twice_waits_for_itself(locks: Locks) -> None:
    (wait,) = waits_of(locks.own).circle()
    assert (wait.thread, wait.owner, wait.lock) == ("own", "own", "self.lock")


def test_conditions_and_reentrant_locks_make_no_circle(locks: Locks) -> None:
    assert waits_of(locks.waiter, locks.unrelated).circle() == ()
    locks.done = True
    second = Locks()
    waits = waits_of(second.twice, second.unrelated)
    assert waits.circle() == ()
    second.done = True


def test_a_wait_names_the_thread_that_holds_the_lock(locks: Locks) -> None:
    waits = waits_of(locks.unrelated, locks.twice)
    wait = next(wait for ident in sys._current_frames() if (wait := waits.of(ident)))
    assert (wait.thread, wait.owner, wait.lock) == ("twice", "unrelated", "self.lock")
    assert wait.owner_line.file == threading.__file__ or wait.owner_line.function == "Locks.unrelated"


def test_what_runs_code_of_the_program_is_not_evaluated() -> None:
    class Guarded:
        evaluated = 0

        @property
        def lock(self) -> threading.Lock:
            self.evaluated += 1
            return plain

        def work(self) -> None:
            with self.lock, self.lock:
                pass

    plain, guarded = threading.Lock(), Guarded()
    assert waits_of(guarded.work).circle() == ()
    assert guarded.evaluated == 2
