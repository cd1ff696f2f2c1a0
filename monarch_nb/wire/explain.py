"""The part of an object that cannot be pickled, in words for users."""

import pickle
import re
import time
import types
from collections.abc import Iterator

from monarch_nb.wire.body import encode
from monarch_nb.wire.texts import full_name, repr_of, text_of, type_name, with_article

# Errors of an object's own code; an interrupt belongs to the waiting code.
_OWN = (Exception, SystemExit, GeneratorExit)
_TRIES = 500
_SECONDS = 2.0
_DEPTH = 20
_MEMBERS = 200  # the most members checked of one container

# Alternatives to unpicklable objects, by the start of their type's full name.
_ADVICE = {
    "_thread.": "locks belong to one process: make it where it is used",
    "threading.": "threads and their tools belong to one process: make it where it is used",
    "_io.": "open files belong to one process: send the path",
    "socket.": "sockets belong to one process: connect where it is used",
    "builtins.generator": "a running generator cannot be sent: send a list, or the function that makes it",
    "builtins.coroutine": "a coroutine cannot be sent: await it, or send the function that makes it",
    "builtins.frame": "frames belong to one process",
    "_asyncio.": "futures and tasks belong to one event loop: send the result",
}


class PickleFailure(TypeError, pickle.PicklingError):
    """An object cannot be sent; the text names the culprit and the path to it."""


def pickle_failure(failure: Exception, obj: object, label: str) -> Exception:
    """Returns the error to raise from `failure`, which encoding `obj` raised, with the culprit named.

    An error of the object's own code (raised by its `__getstate__` or `__reduce__`) is returned unchanged; any other
    error is the cause of the result.
    """
    usual = (TypeError, pickle.PicklingError, AttributeError, NotImplementedError, RecursionError)
    if not isinstance(failure, usual) or isinstance(failure, PickleFailure):
        return failure
    named = PickleFailure(explain_unpicklable(obj, label))
    named.__cause__ = failure
    return named


def explain_unpicklable(obj: object, label: str) -> str:
    """Returns a sentence on why `obj` cannot be sent: "<label> cannot be sent: `config.lock` is a _thread.lock…".

    Paths start with the part of `label` in backquotes. Searches for at most about two seconds.
    """
    quoted = re.search("`([^`]+)`", label)
    search = _Search()
    failure = search.failure(obj)
    if failure is None:
        return f"{label} can be sent"
    path, culprit, failure = search.smallest(obj, quoted[1] if quoted else "it", failure)
    name = full_name(culprit)
    kind = with_article(name.removeprefix("builtins."))
    advice = next((text for start, text in _ADVICE.items() if name.startswith(start)), "")
    finding = f"`{path}` is {kind}" if path != "it" else f"it is {kind}"
    reason = _first_line(failure)
    return f"{label} cannot be sent: {finding} ({reason})" + (f"; {advice}" if advice else "")


class _Search:
    def __init__(self) -> None:
        self.tries = _TRIES
        self.deadline = time.monotonic() + _SECONDS
        self.seen: dict[int, object] = {}  # the objects are held, so that their ids are not reused

    def failure(self, obj: object) -> BaseException | None:
        """Returns the error that pickling `obj` raises."""
        self.tries -= 1
        try:
            encode(obj)
        except _OWN as failure:
            return failure
        return None

    def smallest(self, obj: object, path: str, failure: BaseException) -> tuple[str, object, BaseException]:
        """Returns the deepest object below `obj` that cannot be pickled, its path and its error."""
        for _ in range(_DEPTH):
            self.seen[id(obj)] = obj
            if _refuses(obj):
                break
            for step, member in _members(obj):
                if self.tries <= 0 or time.monotonic() > self.deadline:
                    return path, obj, failure
                if id(member) in self.seen or isinstance(member, (bool, int, float, str, bytes, type(None))):
                    continue
                if (deeper := self.failure(member)) is not None:
                    obj, path, failure = member, step.format(path), deeper
                    break
                self.seen[id(member)] = member
            else:
                break
        return path, obj, failure


def _members(obj: object) -> Iterator[tuple[str, object]]:
    """Yields the members of `obj`, each with the continuation of its path: `{}` is the path so far."""
    if isinstance(obj, dict):
        for key, value in list(obj.items())[:_MEMBERS]:
            yield _index(key), value
            yield f"key {_short(key)} of {{}}", key
    elif isinstance(obj, (list, tuple)):
        for index, value in enumerate(obj[:_MEMBERS]):
            yield f"{{}}[{index}]", value
    elif isinstance(obj, (set, frozenset)):
        for value in list(obj)[:_MEMBERS]:
            yield f"member {_short(value)} of {{}}", value
    elif isinstance(obj, types.MethodType):
        yield "{}.__self__", obj.__self__
        yield "{}.__func__", obj.__func__
    elif isinstance(obj, types.FunctionType):
        for name, cell in zip(obj.__code__.co_freevars, obj.__closure__ or (), strict=True):
            try:
                yield f"{name}, which {{}} closes over", cell.cell_contents
            except ValueError:  # not bound yet
                pass
        for name in _globals_of(obj.__code__):
            if name in obj.__globals__:
                yield f"global {name} of {{}}", obj.__globals__[name]
        for index, value in enumerate(obj.__defaults__ or ()):
            yield f"default {index} of {{}}", value
    elif isinstance(obj, type):
        for name, value in list(obj.__dict__.items()):
            if not name.startswith("__") or isinstance(value, types.FunctionType):
                yield f"{{}}.{name}", value
    else:
        yield from _attributes(obj)


def _refuses(obj: object) -> bool:
    """Returns whether the object itself explains that it cannot be sent, better than any of its members could."""
    if not isinstance(getattr(type(obj), "__reduce__", None), types.FunctionType):
        return False
    try:
        obj.__reduce__()
    except _OWN:
        return True
    return False


def _attributes(obj: object) -> Iterator[tuple[str, object]]:
    try:
        state = obj.__getstate__()
    except _OWN:
        state = None
    parts = state if isinstance(state, tuple) and len(state) == 2 else (state,)
    for part in parts:
        if isinstance(part, dict):
            for name, value in list(part.items())[:_MEMBERS]:
                yield f"{{}}.{_escape(text_of(name))}", value
    for name in ("func", "args", "keywords", "__wrapped__", "fget", "__func__"):
        try:
            yield f"{{}}.{name}", object.__getattribute__(obj, name)
        except _OWN:
            pass
    yield "type of {}", type(obj)


def _globals_of(code: types.CodeType) -> list[str]:
    names = list(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names += _globals_of(constant)
    return names


def _index(key: object) -> str:
    return f"{{}}[{_short(key)}]"


def _short(value: object) -> str:
    text = repr_of(value)
    return _escape(text if len(text) <= 40 else text[:37] + "...")


def _escape(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


def _first_line(failure: BaseException) -> str:
    return (text_of(failure).strip().splitlines() or [type_name(failure)])[0]
