"""The caller's error when an endpoint raises, or when a value cannot be sent."""

import signal
import sys
import threading
import time
from typing import Any

import pytest

from monarch_nb.actor import Actor, ActorError, Channel, Port, ProcMesh, SupervisionError, current_rank, endpoint
from tests.cluster.actor_tools import Faults

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("faults")]


class Custom(Exception):
    def __init__(self, code: int, *, note: str) -> None:
        super().__init__(f"code {code}")
        self.code = code
        self.note = note

    def __reduce__(self) -> Any:
        return _custom, (self.code, self.note)


def _custom(code: int, note: str) -> Custom:
    return Custom(code, note=note)


class Unpicklable(Exception):
    def __init__(self) -> None:
        super().__init__("holds a lock")
        self.lock = threading.Lock()


class BadState:
    def __getstate__(self) -> Any:
        raise ValueError("cannot be saved")


class BadLoad:
    def __getstate__(self) -> Any:
        return 1

    def __setstate__(self, state: Any) -> None:
        raise ValueError("cannot be loaded")


class Raiser(Actor):
    def __init__(self, fine: Any = 0) -> None:
        self.fine = fine

    @endpoint
    def plain(self) -> None:
        raise ValueError("plain words")

    @endpoint
    def chained(self) -> None:
        try:
            {}["missing"]
        except KeyError as error:
            raise RuntimeError("while looking") from error

    @endpoint
    def custom(self) -> None:
        raise Custom(7, note="kept")

    @endpoint
    def unpicklable_error(self) -> None:
        raise Unpicklable

    @endpoint
    def unpicklable_result(self) -> Any:
        return {"deep": [threading.Lock()]}

    @endpoint
    def bad_load(self) -> Any:
        return BadLoad()

    @endpoint
    def take(self, x: Any) -> str:
        return "taken"

    @endpoint
    def exits(self) -> None:
        raise NotOrdinary(3)

    @endpoint(explicit_response_port=True)
    def fails_by_port(self, port: Port[int]) -> None:
        raise ValueError("nobody catches this")

    @endpoint(explicit_response_port=True)
    def answers_an_error(self, port: Port[int]) -> None:
        port.exception(ValueError("on purpose"))

    @endpoint
    def alive(self) -> bool:
        return True


class NotOrdinary(BaseException):
    """No Exception, and no end of a program."""


class Mixed(Actor):
    @endpoint
    def raise_then_leave(self) -> None:
        rank = current_rank().rank
        if rank == 0:
            raise ValueError("came first")
        time.sleep(0.2 if rank == 1 else 0.6)  # rank 0 has answered by then, and ranks 2 and 3 have not
        raise NotOrdinary(3)


class Leaver(Actor):
    @endpoint
    def leaves(self, status: Any) -> str:
        sys.exit(status)


class AsyncLeaver(Actor):
    @endpoint
    async def leaves(self, status: Any) -> str:
        sys.exit(status)


class AsyncRaiser(Actor):
    @endpoint
    async def plain(self) -> None:
        raise ValueError("plain words")

    @endpoint
    async def exits(self) -> None:
        raise NotOrdinary(3)

    @endpoint
    async def alive(self) -> bool:
        return True


@pytest.fixture(scope="module")
def raisers(quad: ProcMesh) -> Any:
    return quad.spawn("raisers", Raiser)


@pytest.fixture
def raiser(quad: ProcMesh) -> Any:
    return quad.slice(gpus=0).spawn("one", Raiser)


def test_an_exception_goes_to_the_caller_and_the_actor_lives(raisers: Any) -> None:
    with pytest.raises(ActorError) as caught:
        raisers.plain.call().get(20)
    error = caught.value
    text = str(error)
    assert text.startswith("Actor call raisers.plain failed on 4 of 4 ranks: gpus=0-3; the same error (host ")
    assert "Traceback of where the remote call failed (most recent call last):" in text
    assert 'raise ValueError("plain words")' in text
    assert "test_errors.py" in text
    assert isinstance(error.exception, ValueError)
    assert error.exception.args == ("plain words",)
    assert error.message == "Actor call raisers.plain failed."
    assert error.exception_formatted in text
    assert raisers.alive.call().get(20).values() == [True] * 4


def test_an_async_actor_does_likewise(quad: ProcMesh) -> None:
    raiser: Any = quad.slice(gpus=0).spawn("raiser", AsyncRaiser)
    with pytest.raises(ActorError, match="plain words"):
        raiser.plain.call_one().get(20)
    assert raiser.alive.call_one().get(20)


def test_causes_are_part_of_the_story(raisers: Any) -> None:
    with pytest.raises(ActorError) as caught:
        raisers.chained.choose().get(20)
    assert "KeyError: 'missing'" in str(caught.value)
    assert "direct cause" in str(caught.value)
    assert "RuntimeError: while looking" in str(caught.value)


def test_an_exception_keeps_its_type_and_fields(raisers: Any) -> None:
    with pytest.raises(ActorError) as caught:
        raisers.custom.choose().get(20)
    error = caught.value.exception
    assert isinstance(error, Custom)
    assert (error.code, error.note) == (7, "kept")


def test_an_exception_that_cannot_travel_is_told_in_words(raisers: Any) -> None:
    with pytest.raises(ActorError) as caught:
        raisers.unpicklable_error.choose().get(20)
    assert "holds a lock" in str(caught.value)
    assert "Unpicklable" in str(caught.value)


def test_an_argument_that_cannot_be_sent_is_named_at_the_call(quad: ProcMesh, raisers: Any) -> None:
    with pytest.raises(
        TypeError, match=r"argument `x` of raisers.take cannot be sent: `x\['a'\]\[0\]` is a _thread.lock"
    ):
        raisers.take.broadcast({"a": [threading.Lock()]})
    with pytest.raises(ValueError, match="cannot be saved"):
        raisers.take.call(BadState())
    with pytest.raises(TypeError, match="argument `fine` of Raiser"):
        quad.spawn("unsendable", Raiser, threading.Lock())
    assert raisers.take.call(1).get(20).values() == ["taken"] * 4


def test_an_argument_that_cannot_be_loaded_is_told_by_the_actor(raisers: Any) -> None:
    with pytest.raises(ActorError, match="cannot be loaded"):
        raisers.take.call(BadLoad()).get(20)
    assert raisers.alive.call().get(20).values() == [True] * 4


class TimeIsOver(Exception):
    """Raised by a signal's handler."""


def alarm() -> str:
    if threading.current_thread() is threading.main_thread():
        signal.raise_signal(signal.SIGUSR1)
    return "rang"


class Alarm:
    """Whose loading, and if it is `armed` its pickling, a signal cuts into."""

    def __init__(self, armed: bool = False) -> None:
        self.armed = armed

    def __reduce__(self) -> Any:
        if self.armed:
            alarm()
        return alarm, ()


class Ringing(Actor):
    @endpoint
    def ring(self, argument: object = None) -> Any:
        return Alarm()


def test_the_error_of_a_signals_handler_is_not_one_of_pickling(quad: ProcMesh) -> None:
    def stop(signum: int, frame: object) -> None:
        raise TimeIsOver

    bells: Any = quad.slice(gpus=0).spawn("bells", Ringing)
    before = signal.signal(signal.SIGUSR1, stop)
    try:
        with pytest.raises(TimeIsOver):
            bells.ring.call_one().get(20)
        with pytest.raises(TimeIsOver):
            bells.ring.call_one(Alarm(armed=True))
        with pytest.raises(TimeIsOver):
            Channel[Any].open()[0].send(Alarm(armed=True))
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_result_that_cannot_be_sent_is_named(raisers: Any) -> None:
    with pytest.raises(ActorError, match=r"`result\['deep'\]\[0\]` is a _thread.lock"):
        raisers.unpicklable_result.choose().get(20)
    assert raisers.alive.call().get(20).values() == [True] * 4


def test_a_result_that_cannot_be_loaded_says_where(raisers: Any) -> None:
    with pytest.raises(ActorError, match=r"result of raisers.bad_load could not be unpickled in the calling process"):
        raisers.bad_load.choose().get(20)


def test_an_error_answered_through_the_port_is_the_callers(raisers: Any) -> None:
    with pytest.raises(ActorError, match="on purpose"):
        raisers.answers_an_error.choose().get(20)
    assert raisers.alive.call().get(20).values() == [True] * 4


def test_an_exception_that_escapes_with_an_explicit_port_fails_the_actor(raiser: Any, faults: Faults) -> None:
    with pytest.raises(SupervisionError, match="nobody catches this"):
        raiser.fails_by_port.call_one().get(20)
    assert "nobody catches this" in faults.next().report()
    with pytest.raises(SupervisionError, match=r"Endpoint call one.alive\(\) failed"):
        raiser.alive.call_one().get(20)


def test_an_extraordinary_exception_fails_the_actor(raiser: Any, faults: Faults) -> None:
    with pytest.raises(SupervisionError, match="NotOrdinary: 3"):
        raiser.exits.call_one().get(20)
    failure = faults.next()
    assert failure.mesh_name == "one"
    assert "NotOrdinary: 3" in str(failure.cause.text)


def test_the_same_holds_for_async_actors(quad: ProcMesh, faults: Faults) -> None:
    raiser: Any = quad.slice(gpus=0).spawn("raiser", AsyncRaiser)
    with pytest.raises(SupervisionError, match="NotOrdinary"):
        raiser.exits.call_one().get(20)
    assert faults.next().mesh_name == "raiser"


@pytest.mark.parametrize("name", ["leaves", "leaves_a_loop"])
def test_sys_exit_fails_its_call_unless_the_status_is_0(quad: ProcMesh, faults: Faults, name: str) -> None:
    leavers: Any = quad.spawn("leavers", Leaver if name == "leaves" else AsyncLeaver)
    for status in (0, None):
        assert leavers.leaves.call(status).get(20).values() == [None] * 4
    for status, text in ((2, "SystemExit: 2"), ("no such file", "SystemExit: no such file")):
        with pytest.raises(ActorError, match=text):
            leavers.leaves.call(status).get(20)
    assert leavers.leaves.call(0).get(20).values() == [None] * 4
    leavers.leaves.broadcast(0)
    assert leavers.leaves.call(0).get(20).values() == [None] * 4
    assert faults.left() == []


def test_a_dead_actor_does_not_hurt_its_neighbours(quad: ProcMesh, faults: Faults) -> None:
    meshes: list[Any] = [quad.spawn(name, Raiser) for name in ("a", "b")]
    with pytest.raises(SupervisionError):
        meshes[0].slice(gpus=2).exits.call_one().get(20)
    assert faults.next().crashed_ranks == [2]
    assert meshes[1].alive.call().get(20).values() == [True] * 4
    assert meshes[0].slice(gpus=slice(0, 2)).alive.call().get(20).values() == [True] * 2
    with pytest.raises(SupervisionError):
        meshes[0].slice(gpus=slice(1, 3)).alive.call().get(20)
    assert quad.spawn("c", Raiser).alive.call().get(20).values() == [True] * 4  # type: ignore[attr-defined]


def test_a_rank_dying_after_another_raised_is_reported_with_the_error(quad: ProcMesh, faults: Faults) -> None:
    raisers: Any = quad.spawn("mixed", Mixed)
    with pytest.raises(SupervisionError) as caught:
        raisers.raise_then_leave.call().get(20)
    assert "NotOrdinary: 3" in str(caught.value)
    [note] = caught.value.__notes__
    assert note == "Before that, mixed.raise_then_leave had raised on gpus=0: ValueError: came first"
    assert faults.next().mesh_name == "mixed"
