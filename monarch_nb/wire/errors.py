"""Exceptions across the wire: errors of other processes are raised here, with their traceback there; and what of an
object cannot be sent, in words for users.
"""

import functools
import pickle
import re
import time
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from monarch_nb._deferred import sysconfig
from monarch_nb.wire.address import with_host_names
from monarch_nb.wire.body import (
    Frame,
    InFrame,
    MemoryFrame,
    OutFrame,
    check_size,
    current_codec,
    decode,
    encode,
    in_memory,
)
from monarch_nb.wire.texts import error_line, full_name, harmless, kind_of, repr_of, text_of, type_name, with_article

# Attribute of an exception that came from another process: its formatted traceback there, a list of str.
_TRACEBACK = "__monarch_traceback__"
_OWN_CLASSES = ("builtins", __name__.partition(".")[0])  # packages of exceptions whose texts are for display only
_traceback_of: Any = vars(BaseException)["__traceback__"].__get__
ENGINE = f"{Path(__file__).parent.parent}/"
_LOOP = f"{Path(traceback.__file__).parent}/asyncio/"
# Errors of an object's own code; an interrupt belongs to the waiting code.
_OBJECT_ERRORS = (Exception, SystemExit, GeneratorExit)
_TRIES = 500  # picklings in the search for what cannot be sent
_SECONDS = 2.0  # of that search, at most
_DEPTH = 20  # of members of members
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


class ActorError(Exception):
    """An endpoint raised.

    `exception` is what it raised, on the first rank to raise; one that only lost its partner in a collective counts
    after those with errors of their own. `exception_formatted` is its traceback as text; `message` names the call;
    `summary` is the first line of this error: mesh, endpoint, ranks and hosts, with a line for each kind of error where
    they differ. `failures` has the exception of each rank that raised, by its index in the mesh that was called, in
    rank order; it is empty for an error created by hand.
    """

    def __init__(
        self,
        exception: BaseException,
        message: str = "A remote actor call has failed.",
        *,
        formatted: str | None = None,
    ) -> None:
        super().__init__(exception, message)
        self.exception = exception
        self.message = message
        self.summary = message
        self.failures: dict[int, BaseException] = {}
        self.origin: tuple[str, int, str] | None = None  # mesh, rank and call, in the process that called
        self.base_ranks: dict[int, int] = {}  # of the ranks in `failures`, in the whole mesh
        self.reproducer: Callable[..., Any] | None = None  # the debugger of the process that called
        self.reproduced: BaseException | None = None  # the last error of `reproduce`
        self.exception_formatted = "".join(format_exception(exception)) if formatted is None else formatted

    @classmethod
    def of_ranks(cls, failures: Mapping[int, BaseException], message: str, summary: str) -> "ActorError":
        """Returns the error of a call that raised on some ranks; the first of `failures` is its `exception`."""
        error = cls(next(iter(failures.values())), message)
        error.failures, error.summary = dict(sorted(failures.items())), summary
        return error

    def reproduce(
        self,
        *,
        rank: int | None = None,
        step: bool | Callable[[], Any] = False,
        limit: int = 1 << 28,
        timeout: float = 60.0,
    ) -> Any:
        """Runs the failed call again, in this process: with the actor of the failed rank in its present state, and with
        the arguments that the rank has kept.

        Raises what the method raises here, with this error as its cause, for a debugger to inspect. If it raises
        nothing, returns its result and warns about differences from the rank. Attributes and arguments that cannot
        be pickled are named, and raise where they are used. `rank` is one of `failures`; with `step` the debugger
        (`pdb.Pdb`, or the result of `step()`) stops at the first line of the method. Waits up to `timeout` seconds for
        the calls that run there now. Raises DebugError if the rank has nothing any more, or more than `limit` bytes.
        """
        if self.reproducer is None:
            raise RuntimeError("this error is of no call of this process, so it does not say which rank can send it")
        return self.reproducer(self, rank=rank, step=step, limit=limit, timeout=timeout)

    def __str__(self) -> str:
        heading = "Traceback of where the remote call failed (most recent call last):"
        return f"{self.summary}\n {heading}\n{self.exception_formatted}"

    def __repr__(self) -> str:
        return f"ActorError({repr_of(self.exception)}, {self.message!r})"

    def __reduce__(self) -> tuple[object, ...]:
        failures = self.failures or {-1: self.exception}
        codec = current_codec()
        frames = {
            rank: [bytes(frame) for frame in encode_exception(failure, codec)] for rank, failure in failures.items()
        }
        return _rebuild_actor_error, (frames, self.message, self.summary, self.exception_formatted)


class RemoteException(Exception):
    """Stands for an exception that could not be sent as an object.

    `type_name` is its type's full name, `text` its str, `traceback` its formatted traceback, `reason` the cause.
    """

    def __init__(self, type_name: str, text: str, traceback: str, reason: str) -> None:
        super().__init__(type_name, text, traceback, reason)
        self.type_name = type_name
        self.text = text
        self.traceback = traceback
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.type_name}: {self.text}" if self.text else self.type_name


def format_exception(exc: BaseException) -> list[str]:
    """Returns the lines of `exc`'s traceback, with causes and contexts, without the engine's own frames at its top, and
    at its end where the engine raised on purpose.

    For an exception of another process it is the traceback there. Never raises.
    """
    try:
        formatted = getattr(exc, _TRACEBACK, None)
        if isinstance(formatted, list):
            return [text_of(line) for line in formatted]
        report = traceback.TracebackException.from_exception(exc)
        _trim(report, set())
        return [text_of(line) for line in report.format()]
    except BaseException as failure:  # from the exception's own code, which may also try to end the process
        text = f"{type_name(exc)}: {text_of(exc)} (its traceback could not be formatted: {error_line(failure)})\n"
        return [*_frames(exc), text]


def _frames(exc: BaseException) -> list[str]:
    """Returns the frames of an exception's traceback without calling the exception's own code."""
    try:
        stack = traceback.StackSummary.extract(traceback.walk_tb(_traceback_of(exc)))
        _without_own(stack)
        return ["Traceback (most recent call last):\n", *map(text_of, stack.format())]
    except BaseException:  # from a module's loader, which provides the lines
        return []


def encode_exception(exc: BaseException, context: object = None) -> list[MemoryFrame]:
    """Returns the frames of `exc`. Never raises: parts that cannot be pickled are sent as names and texts."""
    formatted = format_exception(exc)
    reason = ""
    try:
        frames = encode(exc, context)
        check_size(frames)
    except BaseException as failure:
        frames, reason = [], f"it could not be pickled: {type_name(failure)}: {text_of(failure)}"
    return [pickle.dumps((type_name(exc), text_of(exc), formatted, reason), 5), *frames]


class ExceptionText(NamedTuple):
    """An exception as text: the name of its type, its text, its formatted traceback, and why it could not be sent as
    an object, "" if it was."""

    type_name: str
    text: str
    formatted: list[str]
    reason: str

    @property
    def line(self) -> str:
        """Type and the first line of the text."""
        first = next(iter(self.text.strip().splitlines()), "")
        return f"{self.type_name}: {first}" if first else self.type_name

    @property
    def likeness(self) -> tuple[str, str, str]:
        """Type, text and line of the code that raised: errors with equal ones are reported as one."""
        sources = (line for part in self.formatted for line in part.splitlines() if line.startswith("  File "))
        return self.type_name, self.text, max(enumerate(sources), default=(0, ""))[1]


def exception_text(frames: Sequence[OutFrame | InFrame]) -> ExceptionText:
    """Returns the text in the frames of an exception. Unpickles no part of the exception itself."""
    name, text, formatted, reason = pickle.loads(in_memory(frames[0]))
    return ExceptionText(harmless(name), _readable(text), [_readable(line) for line in formatted], reason)


def _readable(text: str) -> str:
    return with_host_names(harmless(text))


def decode_exception(frames: Sequence[InFrame], context: object = None) -> BaseException:
    """Returns the exception in `frames`, or a RemoteException in its place. Raises only on other frames.

    In a controller the texts of exceptions of Python's and the engine's own classes use its names of hosts; texts of a
    user's classes are the user's data.
    """
    name, text, formatted, reason = exception_text(frames)
    if not reason:
        try:
            exc = decode(frames[1:], context)
        except KeyboardInterrupt:
            raise
        except BaseException as failure:  # an exception's own code may raise anything
            reason = f"it could not be unpickled: {type_name(failure)}: {text_of(failure)}"
        else:
            if isinstance(exc, BaseException):
                _name_hosts(exc)
                return _with_traceback(exc, formatted)
            reason = f"it unpickled as {kind_of(exc)}"
    return _with_traceback(RemoteException(name, text, "".join(formatted), reason), formatted)


def unpickle_failure(failure: BaseException, value: str, role: str) -> ActorError:
    """Returns the error for a value (result, argument) that could not be unpickled in the process with this role."""
    return ActorError(failure, f"The {value} could not be unpickled in the {role} process.")


def _with_traceback(exc: BaseException, formatted: list[str]) -> BaseException:
    try:
        setattr(exc, _TRACEBACK, formatted)
    except BaseException:  # an exception that refuses attributes
        pass
    return exc


def _name_hosts(exc: BaseException) -> None:
    if type(exc).__module__.partition(".")[0] not in _OWN_CLASSES:
        return
    args = tuple(with_host_names(arg) if type(arg) is str else arg for arg in exc.args)
    if args != exc.args:
        exc.args = args
    if isinstance(exc, ActorError):
        exc.message, exc.summary = with_host_names(exc.message), with_host_names(exc.summary)
        exc.exception_formatted = with_host_names(exc.exception_formatted)


def _rebuild_actor_error(frames: dict[int, list[Frame]], message: str, summary: str, formatted: str) -> ActorError:
    codec = current_codec()
    failures = {rank: decode_exception(failure, codec) for rank, failure in frames.items()}
    error = ActorError(next(iter(failures.values())), message, formatted=formatted)
    error.summary = summary
    if -1 not in failures:
        error.failures = failures
    return error


def _trim(report: traceback.TracebackException, trimmed: set[int]) -> None:
    """Drops the engine's own frames from an exception and its causes, unless there are no others."""
    if id(report) in trimmed:
        return
    trimmed.add(id(report))
    _without_own(report.stack)
    for linked in (report.__cause__, report.__context__, *(report.exceptions or ())):
        if linked is not None:
            _trim(linked, trimmed)


class At(NamedTuple):
    """A frame: its file, and its current source line."""

    file: str
    line: str


@functools.cache
def library_folders() -> tuple[str, ...]:
    """Returns the folders of Python and of installed packages, each with a slash at its end."""
    return tuple({f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")})


@functools.cache
def is_users_file(file: str) -> bool:
    """Returns whether code is the user's: no part of Python, of an installed package, or of the engine."""
    return not file.startswith((*library_folders(), ENGINE, "<frozen "))


def users_frame(frame: types.FrameType | None) -> types.FrameType | None:
    """Returns the innermost frame of the user's own code, from this one outwards."""
    while frame is not None and not is_users_file(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def is_mistake(frames: Sequence[At], own: Sequence[str] = (ENGINE,)) -> bool:
    """Returns whether the engine raised on purpose, about its caller, or only called user code that raised.

    Frames are from the outside in, those of `own` folders are the engine's. Anything else that fails in the engine may
    be an error of its own, for which all frames are useful.
    """
    folders = tuple(own)
    if not any(frame.file.startswith(folders) for frame in frames):
        return False
    last = frames[-1]
    if last.file.startswith(folders):
        return last.line.split(" ", 1)[0] == "raise"
    return is_users_file(last.file)


def without_engine(frames: Sequence[At], own: Sequence[str] = (ENGINE,), through: Sequence[str] = ()) -> list[int]:
    """Returns the frames outside of the engine: up to its first one all, after that those of the user's code. Frames of
    `through` are left out everywhere."""
    folders = tuple(own)
    entered, indices = False, []
    for index, frame in enumerate(frames):
        inside = frame.file.startswith(folders)
        entered = entered or inside
        if not inside and not frame.file.startswith(tuple(through)) and (not entered or is_users_file(frame.file)):
            indices.append(index)
    return indices


def _without_own(stack: traceback.StackSummary) -> None:
    leading = (ENGINE, _LOOP)  # a cell that awaits runs in a loop
    first = next((index for index, frame in enumerate(stack) if not frame.filename.startswith(leading)), len(stack))
    if first == len(stack):
        return
    del stack[:first]
    frames = [At(frame.filename, frame.line or "") for frame in stack]
    if is_mistake(frames):
        stack[:] = [stack[index] for index in without_engine(frames)]


# -- what cannot be sent -----------------------------------------------------------------------------------------------


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
        self.visited: dict[int, object] = {}  # the objects are held, so that their ids are not reused

    def failure(self, obj: object) -> BaseException | None:
        """Returns the error that pickling `obj` raises."""
        self.tries -= 1
        try:
            encode(obj)
        except _OBJECT_ERRORS as failure:
            return failure
        return None

    def smallest(self, obj: object, path: str, failure: BaseException) -> tuple[str, object, BaseException]:
        """Returns the deepest object below `obj` that cannot be pickled, its path and its error."""
        for _ in range(_DEPTH):
            self.visited[id(obj)] = obj
            if _refuses(obj):
                break
            for step, member in _members(obj):
                if self.tries <= 0 or time.monotonic() > self.deadline:
                    return path, obj, failure
                if id(member) in self.visited or isinstance(member, (bool, int, float, str, bytes, type(None))):
                    continue
                if (deeper := self.failure(member)) is not None:
                    obj, path, failure = member, step.format(path), deeper
                    break
                self.visited[id(member)] = member
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
    except _OBJECT_ERRORS:
        return True
    return False


def _attributes(obj: object) -> Iterator[tuple[str, object]]:
    try:
        state = obj.__getstate__()
    except _OBJECT_ERRORS:
        state = None
    parts = state if isinstance(state, tuple) and len(state) == 2 else (state,)
    for part in parts:
        if isinstance(part, dict):
            for name, value in list(part.items())[:_MEMBERS]:
                yield f"{{}}.{_escape(text_of(name))}", value
    for name in ("func", "args", "keywords", "__wrapped__", "fget", "__func__"):
        try:
            yield f"{{}}.{name}", object.__getattribute__(obj, name)
        except _OBJECT_ERRORS:
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
