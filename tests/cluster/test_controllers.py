"""Controllers: one actor per name in the client's process, for all callers."""

import logging
import os
from typing import Any

import pytest

from monarch_nb import connect
from monarch_nb.actor import Actor, ActorError, SupervisionError, context, endpoint, get_or_spawn_controller
from monarch_nb.lifecycle.controllers import Controllers
from monarch_nb.runtime import current_runtime
from tests.cluster.fault_tools import SOON, spawned
from tests.cluster.worker_tools import light_host  # noqa: F401 - a fixture
from tests.polling import until

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("host")]


class Counter(Actor):
    def __init__(self, start: int) -> None:
        self.count = start

    @endpoint
    def add(self) -> tuple[int, int]:
        self.count += 1
        return self.count, os.getpid()

    @endpoint
    def leave(self) -> None:
        context().actor_instance.stop("on purpose")

    @endpoint
    def abort(self) -> None:
        context().actor_instance.abort("on purpose")


class Failing(Actor):
    def __init__(self) -> None:
        raise LookupError("never to be")


class Asker(Actor):
    @endpoint
    def ask(self, name: str) -> Any:
        return get_or_spawn_controller(name, Counter, 1000).get(SOON).add.call_one().get(SOON)


class Nested(Actor):
    """Needs another controller in its constructor."""

    def __init__(self) -> None:
        self.inner: Any = get_or_spawn_controller("inner", Counter, 7).get(SOON)

    @endpoint
    def ask(self) -> Any:
        return self.inner.add.call_one().get(SOON)


def controller(name: str, cls: type, *args: Any) -> Any:
    return get_or_spawn_controller(name, cls, *args).get(SOON)


def test_all_get_the_one_that_was_made_first(host: Any) -> None:
    assert controller("one", Counter, 10).add.call_one().get(SOON) == (11, os.getpid())
    assert controller("one", Counter, 99).add.call_one().get(SOON) == (12, os.getpid())
    with spawned(host, 2) as procs:
        asker: Any = procs.spawn("asker", Asker)
        assert sorted(asker.ask.call("one").get(SOON).values()) == [(13, os.getpid()), (14, os.getpid())]
        assert sorted(asker.ask.call("made by an actor").get(SOON).values()) == [
            (1001, os.getpid()),
            (1002, os.getpid()),
        ]


def test_one_may_need_another_in_its_constructor() -> None:
    assert controller("outer", Nested).ask.call_one().get(SOON) == (8, os.getpid())


def test_one_that_fails_harms_no_other_and_is_made_anew(caplog: Any, shown: list[Any]) -> None:
    good = controller("good", Counter, 0)
    for _ in range(2):
        with pytest.raises(ActorError, match="never to be"):
            controller("bad", Failing)
    first = controller("bad", Counter, 5)
    with caplog.at_level(logging.WARNING), pytest.raises(SupervisionError, match="on purpose"):
        first.abort.call_one().get(SOON)
    until(lambda: "the controller 'bad' has failed" in caplog.text, "the word of its failure")
    assert controller("bad", Counter, 20).add.call_one().get(SOON)[0] == 21
    assert good.add.call_one().get(SOON)[0] == 1
    assert not shown  # its owner has handled the failure


def test_a_newer_definition_is_taken_over_and_the_state_kept(caplog: Any) -> None:
    def define(text: str) -> type:
        class Changing(Actor):
            def __init__(self) -> None:
                self.count = 0

            @endpoint
            def add(self) -> tuple[str, int]:
                self.count += 1
                return text, self.count

        return Changing

    assert controller("changing", define("old")).add.call_one().get(SOON) == ("old", 1)
    assert controller("changing", define("new")).add.call_one().get(SOON) == ("new", 2)
    with caplog.at_level(logging.WARNING):
        assert controller("changing", Counter, 3).add.call_one().get(SOON) == ("new", 3)
    assert "is not replaced by the Counter that was asked for" in caplog.text


def test_a_class_that_is_no_actor_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="must be a class derived from"):
        get_or_spawn_controller("none", int)


@pytest.mark.parametrize("how", ["from outside", "by itself", "with all"])
def test_one_that_was_stopped_is_made_anew(how: str, shown: list[Any]) -> None:
    name = f"stopped {how}"
    first = controller(name, Counter, 0)
    assert first.add.call_one().get(SOON)[0] == 1
    if how == "from outside":
        first.stop().get(SOON)
    elif how == "with all":  # as `%stop --all` does
        registry: Any = current_runtime().part(Controllers).registry()
        registry.stop("by the user").get(SOON)
    else:
        first.leave.call_one().get(SOON)
    with pytest.raises(SupervisionError):
        first.add.call_one().get(SOON)
    assert controller(name, Counter, 20).add.call_one().get(SOON) == (21, os.getpid())
    assert controller(name, Counter, 99).add.call_one().get(SOON) == (22, os.getpid())
    assert not shown


def test_after_the_programs_end_of_everything_another_one_is_made() -> None:
    first = controller("lasting", Counter, 0)
    assert first.add.call_one().get(SOON)[0] == 1
    connect.shutdown()
    assert controller("lasting", Counter, 40).add.call_one().get(SOON) == (41, os.getpid())
    connect.shutdown()
