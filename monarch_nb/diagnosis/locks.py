"""Detection of threads of this process that wait for each other's locks.

Python exposes neither the lock for which a thread waits nor the owner of a Lock. Both are read from the sources: the
expression at which a thread waits is evaluated from its variables, without running code of the program, and a thread
holds the locks of the `with` statements that it is inside. An RLock stores its owner; the owner of a Lock taken by
`acquire()` alone is unknown.
"""

import ast
import dis
import inspect
import linecache
import re
import threading
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import islice
from types import CodeType, FrameType, MemberDescriptorType
from typing import NamedTuple

from monarch_nb.diagnosis.verbs import LockWait, StackLine
from monarch_nb.host.linux import times_paused
from monarch_nb.wire import ENGINE, is_users_file

MOST_FRAMES = 64  # of a stack that are searched for locks
_LOCK, _RLOCK = type(threading.Lock()), type(threading.RLock())
_OWNER = re.compile(r"owner=(\d+) ")
_ENTERS = "BEFORE_WITH" if "BEFORE_WITH" in dis.opmap else "LOAD_SPECIAL"  # since Python 3.14
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_Span = tuple[int, int, int, int]  # first and last line, first and last column


class _Wait(NamedTuple):
    lock: object
    text: str  # the expression: "self.lock"
    line: StackLine


class LockWaits:
    """The threads that wait for a lock, found from their frames at one moment."""

    def __init__(self, frames: Mapping[int, FrameType]) -> None:
        self._frames = frames
        self._waits = {thread: wait for thread, frame in frames.items() if (wait := _awaited_lock(frame))}
        self._owners = {thread: self._owner(thread, wait.lock) for thread, wait in self._waits.items()}
        self._threads = {thread.ident: thread for thread in threading.enumerate()}

    def _owner(self, thread: int, lock: object) -> int | None:
        if isinstance(lock, _RLOCK):
            owner = _OWNER.search(repr(lock))
            return int(owner[1]) if owner and int(owner[1]) != thread else None
        if not isinstance(lock, _LOCK) or not lock.locked():
            return None
        return next((ident for ident, frame in self._frames.items() if any(own is lock for own in _held(frame))), None)

    def of(self, thread: int) -> LockWait | None:
        """Returns the lock for which a thread waits; None if it waits for none whose owner is known."""
        wait, owner = self._waits.get(thread), self._owners.get(thread)
        if wait is None or owner is None:
            return None
        paused = times_paused(self._threads[thread].native_id or 0) if thread in self._threads else -1
        owner_line = _line_of(self._frames[owner]) if owner in self._frames else wait.line
        return LockWait(self._name(thread), wait.text, wait.line, self._name(owner), owner_line, paused)

    def circle(self) -> tuple[LockWait, ...]:
        """Returns threads that wait for each other's locks, or one that waits for its own; empty if there are none."""
        for first in self._waits:
            path = [first]
            while (following := self._owners.get(path[-1])) is not None and following not in path:
                path.append(following)
            if following is not None:
                return tuple(wait for thread in path[path.index(following) :] if (wait := self.of(thread)))
        return ()

    def _name(self, thread: int) -> str:
        return self._threads[thread].name if thread in self._threads else f"thread {thread}"


def _line_of(frame: FrameType) -> StackLine:
    code = frame.f_code
    return StackLine(code.co_filename, frame.f_lineno or 0, code.co_qualname, is_users_file(code.co_filename))


def _awaited_lock(frame: FrameType) -> _Wait | None:
    """Returns the lock that a thread is about to acquire, if any."""
    while frame.f_code.co_filename == threading.__file__ and frame.f_back is not None:
        frame = frame.f_back  # the methods of threading.Condition
    code, operation = frame.f_code, dis.opname[frame.f_code.co_code[frame.f_lasti]]
    may_enter = operation == _ENTERS or (_ENTERS == "LOAD_SPECIAL" and "CALL" in operation)
    may_acquire = "CALL" in operation and "acquire" in code.co_names
    span = _span(frame) if may_enter or may_acquire else None
    if span is None or code.co_filename.startswith(ENGINE):
        return None
    for node in reversed(_path(frame, span)):
        expression: ast.expr | None = None
        if isinstance(node, ast.With):
            index = _entered_count(frame, node, span)
            expression = node.items[index].context_expr if index < len(node.items) else None
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "acquire":
            expression = node.func.value
        if expression is not None and (lock := _lock(_evaluated(expression, frame))):
            return _Wait(lock, ast.unparse(expression), _line_of(frame))
        if isinstance(node, ast.stmt):
            break
    return None


def _held(innermost: FrameType) -> Iterator[object]:
    """Yields the locks of the `with` statements that a thread is inside."""
    frame: FrameType | None = innermost
    for _ in range(MOST_FRAMES):
        if frame is None:
            return
        span = _span(frame)
        for node in _path(frame, span) if span else ():
            if isinstance(node, ast.With) and span:
                for item in node.items[: _entered_count(frame, node, span)]:
                    value = _evaluated(item.context_expr, frame)
                    if isinstance(value, _LOCK):  # not a Condition, which releases its lock while its owner waits
                        yield value
        frame = frame.f_back


def _entered_count(frame: FrameType, node: ast.With, span: _Span) -> int:
    """Returns how many items of a `with` statement a frame that executes its part `span` has entered."""
    if span == _span_of(node):  # an item is being entered, or the items are being left
        code = frame.f_code
        offsets = (offset for offset in _enter_offsets(code) if offset < frame.f_lasti)
        return sum(_position(code, offset) == span for offset in offsets)
    items = (_contains(_span_of(item.context_expr), span) for item in node.items)
    return next((index for index, is_inside in enumerate(items) if is_inside), len(node.items))


def _enter_offsets(code: CodeType) -> Iterator[int]:
    """Yields the offsets of the instructions that enter items of `with` statements."""
    before = None
    for instruction in dis.get_instructions(code):
        if instruction.opname == "BEFORE_WITH":
            yield instruction.offset
        elif before is not None and before.opname == "LOAD_SPECIAL" and "enter" in str(before.argrepr):
            yield instruction.offset  # the call
        before = instruction


def _span(frame: FrameType) -> _Span | None:
    """Returns the part of the source that a frame executes."""
    return _position(frame.f_code, frame.f_lasti)


def _position(code: CodeType, offset: int) -> _Span | None:
    first, last, begins, ends = next(islice(code.co_positions(), offset // 2, None), (None,) * 4)
    if first is None or last is None or begins is None or ends is None:
        return None
    return first, last, begins, ends


def _span_of(node: ast.expr | ast.stmt) -> _Span:
    return node.lineno, node.end_lineno or node.lineno, node.col_offset, node.end_col_offset or 0


def _contains(outer: _Span, inner: _Span) -> bool:
    return (outer[0], outer[2]) <= (inner[0], inner[2]) and (inner[1], inner[3]) <= (outer[1], outer[3])


def _path(frame: FrameType, span: _Span) -> list[ast.expr | ast.stmt]:
    """Returns the nodes around a part of the source, from the function that contains it inwards."""
    file = frame.f_code.co_filename
    tree = _parsed("".join(linecache.getlines(file, frame.f_globals)))
    path: list[ast.expr | ast.stmt] = []
    nodes: list[ast.AST] = [tree] if tree else []
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.expr | ast.stmt):
            if not _contains(_span_of(node), span):
                continue
            path = [] if isinstance(node, _SCOPES) else [*path, node]
            nodes = []
        nodes += ast.iter_child_nodes(node)
    return path


@lru_cache(maxsize=64)
def _parsed(source: str) -> ast.Module | None:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return None  # a cell with magics, or a file that has changed


def _lock(value: object) -> object | None:
    """Returns the value if it is a lock, or the lock of a Condition; None for other values."""
    if isinstance(value, threading.Condition):
        value = vars(value).get("_lock")
    return value if isinstance(value, _LOCK | _RLOCK) else None


def _evaluated(expression: ast.expr, frame: FrameType) -> object:
    """Evaluates names, attributes and items of plain containers; None for other expressions, which may run code."""
    match expression:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return frame.f_locals.get(name, frame.f_globals.get(name))
        case ast.Attribute(value=owner, attr=name):
            return _attribute(_evaluated(owner, frame), _mangled(name, frame))
        case ast.Subscript(value=owner, slice=key):
            container, index = _evaluated(owner, frame), _evaluated(key, frame)
            if type(index) not in (str, int):
                return None
            if type(container) is dict:
                return container.get(index)
            if isinstance(container, list | tuple) and type(container) in (list, tuple) and isinstance(index, int):
                return container[index] if -len(container) <= index < len(container) else None
    return None


def _attribute(owner: object, name: str) -> object:
    value = inspect.getattr_static(owner, name, None)
    if isinstance(value, MemberDescriptorType):  # of a class with slots
        try:
            return value.__get__(owner)
        except (AttributeError, TypeError):
            return None
    return value


def _mangled(name: str, frame: FrameType) -> str:
    """Returns a private name in the form in which its class stores it."""
    if not name.startswith("__") or name.endswith("__"):
        return name
    scopes = frame.f_code.co_qualname.split(".")[:-1]
    while scopes and scopes[-1] == "<locals>":
        del scopes[-2:]  # a function around this one
    return f"_{scopes[-1].lstrip('_')}{name}" if scopes else name
