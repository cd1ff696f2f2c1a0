"""Controllers after a program has stopped all that it had, as `%stop --all` does."""

from typing import Any

import pytest

from monarch_nb.actor import Actor, endpoint, get_or_spawn_controller
from monarch_nb.lifecycle.controllers import Controllers
from monarch_nb.runtime import current_runtime

pytestmark = pytest.mark.timeout(60)


class Counter(Actor):
    def __init__(self) -> None:
        self.count = 0

    @endpoint
    def add(self) -> int:
        self.count += 1
        return self.count


def counted() -> int:
    controller: Any = get_or_spawn_controller("counter", Counter).get(20)
    count: int = controller.add.call_one().get(20)
    return count


def test_after_they_were_stopped_who_asks_gets_a_new_one() -> None:
    assert (counted(), counted()) == (1, 2)
    registry: Any = current_runtime().part(Controllers).registry()
    registry.stop("by the user").get(20)
    assert (counted(), counted()) == (1, 2)
