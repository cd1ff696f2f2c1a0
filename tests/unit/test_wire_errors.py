import asyncio
import linecache
import threading
import time

import pytest

from monarch_nb.wire import (
    ActorError,
    PickleFailure,
    RemoteException,
    decode,
    decode_exception,
    encode,
    encode_exception,
    explain_unpicklable,
    format_exception,
    pickle_failure,
    unpickle_failure,
)


def raised(exc, cause=None):
    try:
        raise exc from cause
    except BaseException as caught:
        return caught


def trip(exc):
    return decode_exception([bytes(frame) for frame in encode_exception(exc)])


class TwoArguments(Exception):
    def __init__(self, code, location):
        super().__init__(f"{code} at {location}")
        self.code = code


class WithLock(Exception):
    def __init__(self):
        super().__init__("holds a lock")
        self.lock = threading.Lock()


class Bomb(Exception):
    def __reduce__(self):
        return explode, ()


def explode():
    raise RuntimeError("boom in unpickling")


class Liar(Exception):
    def __reduce__(self):
        return int, ()


class Rude(Exception):
    def __str__(self):
        raise ValueError("no str")

    def __reduce__(self):
        raise SystemExit("no pickle")


@pytest.mark.parametrize(
    "exc",
    [
        ValueError("x", 3),
        KeyError("k"),
        OSError(2, "No such file", "name"),
        UnicodeDecodeError("utf8", b"\xff", 0, 1, "bad"),
        StopIteration(5),
        KeyboardInterrupt(),
        SystemExit(3),
        asyncio.CancelledError("why"),
        TimeoutError("late"),
        ImportError("no", name="mod"),
        AttributeError("a", name="n"),
    ],
    ids=lambda exc: type(exc).__name__,
)
def test_ordinary_exceptions_come_back_as_themselves(exc):
    copy = trip(raised(exc))
    assert type(copy) is type(exc)
    assert copy.args == exc.args
    assert str(copy) == str(exc)
    for name in ("value", "code", "errno", "filename", "start"):
        assert getattr(copy, name, None) == getattr(exc, name, None)


def test_exception_whose_init_takes_other_arguments_is_survived():
    copy = trip(raised(TwoArguments(4, "x")))
    assert type(copy) is TwoArguments
    assert copy.code == 4
    assert str(copy) == "4 at x"


def test_notes_attributes_and_groups_survive():
    exc = ValueError("v")
    exc.add_note("a note")
    exc.extra = [1]
    group = raised(ExceptionGroup("many", [exc, TwoArguments(1, "y"), ExceptionGroup("in", [KeyError(1)])]))
    copy = trip(group)
    assert type(copy) is ExceptionGroup
    assert copy.message == "many"
    assert copy.exceptions[0].__notes__ == ["a note"]
    assert copy.exceptions[0].extra == [1]
    assert type(copy.exceptions[1]) is TwoArguments
    assert "a note" in "".join(format_exception(copy))


@pytest.mark.parametrize(
    ("exc", "reason"),
    [
        (WithLock(), "could not be pickled"),
        (Bomb("b"), "could not be unpickled: RuntimeError: boom"),
        (Liar("l"), "unpickled as an int"),
        (Rude(), "could not be pickled: SystemExit"),
    ],
    ids=["unpicklable", "unpickling raises", "no exception", "raises everywhere"],
)
def test_a_faithful_stand_in_replaces_an_error_that_cannot_travel(exc, reason):
    copy = trip(raised(exc, KeyError("the cause")))
    assert isinstance(copy, RemoteException)
    assert copy.type_name.endswith(type(exc).__qualname__)
    assert reason in copy.reason
    assert "the cause" in copy.traceback
    assert "direct cause" in copy.traceback
    if not isinstance(exc, Rude):
        assert copy.text == str(exc)
        assert str(exc) in str(copy)
    assert type(trip(copy)) is RemoteException


def test_traceback_text_has_the_chain_and_cell_lines_without_engine_frames():
    text = "def cell():\n    raise ValueError('from a cell')  # this line\n"
    name = "<ipython-input-7-abc>"
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    space = {}
    exec(compile(text, name, "exec"), space)
    engine = {}
    import monarch_nb.wire.body as module

    exec(compile("def run(f):\n    return f()\n", module.__file__, "exec"), engine)
    try:
        try:
            engine["run"](space["cell"])
        except ValueError as error:
            error.__traceback__ = error.__traceback__.tb_next  # as the runtime, at whose top the engine is
            raise KeyError("second") from error
    except KeyError as error:
        trace = "".join(format_exception(error))
    assert "# this line" in trace
    assert "direct cause" in trace
    assert trace.index("from a cell") < trace.index("second")
    assert "body.py" not in trace


def test_an_error_of_the_engine_itself_keeps_its_frames():
    with pytest.raises(Exception, match="pickle") as caught:
        decode([b"garbage"])
    error = caught.value
    error.__traceback__ = error.__traceback__.tb_next
    assert "body.py" in "".join(format_exception(error))


def test_the_remote_traceback_stays_over_several_hops():
    copy = trip(trip(raised(ValueError("far away"))))
    assert "in raised" in "".join(format_exception(copy))


def test_actor_error_tells_what_failed_where():
    error = ActorError(raised(ValueError("bad value"), KeyError("root")), "Actor call trainer.step failed.")
    for variant in (error, trip(error), decode(encode(error))):
        assert type(variant) is ActorError
        assert isinstance(variant.exception, ValueError)
        assert variant.message == "Actor call trainer.step failed."
        text = str(variant)
        assert text.endswith(variant.exception_formatted)
        head = "Actor call trainer.step failed.\n Traceback of where the remote call failed (most recent call last):\n"
        assert text.startswith(head)
        assert "KeyError: 'root'" in text
        assert text.rstrip().endswith("ValueError: bad value")


def test_actor_error_around_something_unpicklable_still_arrives():
    copy = trip(ActorError(raised(WithLock()), "Actor call a.b failed."))
    assert type(copy) is ActorError
    assert type(copy.exception) is RemoteException
    assert "holds a lock" in str(copy)


def test_encoding_an_exception_never_fails_however_deep_or_circular():
    def recurse():
        return recurse()

    with pytest.raises(RecursionError) as caught:
        recurse()
    assert type(trip(caught.value)) is RecursionError
    first, second = ValueError(1), ValueError(2)
    first.__context__, second.__context__ = second, first
    assert isinstance(trip(first), ValueError)


def test_unpickling_failure_says_what_and_where():
    error = unpickle_failure(raised(ModuleNotFoundError("No module named 'x'")), "result", "controller")
    assert str(error).startswith("The result could not be unpickled in the controller process.")
    assert "No module named 'x'" in str(error)


class Config:
    def __init__(self):
        self.name = "n"
        self.parts = {"a": [1, threading.Lock()]}


def test_the_culprit_is_named_with_the_way_to_it():
    text = explain_unpicklable(Config(), "argument `config` of trainers.step")
    assert text.startswith(
        "argument `config` of trainers.step cannot be sent: `config.parts['a'][1]` is a _thread.lock"
    )
    assert "cannot pickle '_thread.lock' object" in text
    assert explain_unpicklable(threading.Lock(), "argument `lock` of t.step").startswith(
        "argument `lock` of t.step cannot be sent: `lock` is a _thread.lock"
    )
    assert "it is a generator" in explain_unpicklable((n for n in [1]), "the result of t.step")


def test_the_culprit_is_found_in_closures_globals_slots_and_keys():
    lock = threading.Lock()
    space = {"__name__": "__main__", "lock": lock}
    exec("def f():\n    return lock\nclass C:\n    def m(self): return f()", space)
    assert "lock, which" in explain_unpicklable(lambda: lock, "argument `f`")
    assert "global lock of f" in explain_unpicklable(space["f"], "argument `f`")
    assert "global lock of " in explain_unpicklable(space["C"](), "argument `c`")

    class Slotted:
        __slots__ = ("inner",)

    slotted = Slotted()
    slotted.inner = {(1, lock): 2}
    text = explain_unpicklable(slotted, "argument `s`")
    assert "s.inner" in text
    assert "_thread.lock" in text


def test_explaining_ends_in_time_on_large_and_circular_objects():
    loop = [threading.Lock()]
    big = [[{"x": n} for n in range(100)] for _ in range(1000)]
    big.append(loop)
    loop.insert(0, big)
    start = time.monotonic()
    assert "cannot be sent" in explain_unpicklable(big, "argument `big`")
    assert time.monotonic() - start < 20


def test_failures_of_the_objects_own_making_are_left_alone():
    own = RuntimeError("from __getstate__")
    assert pickle_failure(own, object(), "argument `x`") is own
    failure = pickle_failure(TypeError("cannot pickle"), Config(), "argument `config`")
    assert isinstance(failure, PickleFailure)
    assert isinstance(failure, TypeError)
    assert "config.parts" in str(failure)
