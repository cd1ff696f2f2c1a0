"""Concurrent execution of several functions."""

import threading
from collections.abc import Callable, Sequence

__all__ = ["side_by_side"]


def side_by_side(works: Sequence[Callable[[], object]]) -> None:
    """Calls all functions concurrently, the first on this thread. Blocks until all are done; raises the first error."""
    errors: list[BaseException] = []

    def run(work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works[1:]]
    for thread in threads:
        thread.start()
    run(works[0])
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
