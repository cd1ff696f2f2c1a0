"""The commands that a stopped thread carries out, each with its answer."""

import itertools
import linecache
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from monarch_nb.debug import verbs
from monarch_nb.debug.records import CommandTimeout, RankBreakpoint, Scope, Value, Variable
from monarch_nb.debug.session.machine import CommandError, Paused, Resume
from monarch_nb.debug.session.stack import Frames, is_expression
from monarch_nb.debug.session.values import shorten, value_of
from monarch_nb.wire import error_line, kind_of, text_of, type_name

if TYPE_CHECKING:
    from monarch_nb.debug.session.thread import ThreadDebugger

Handler = Callable[[Any], verbs.CommandAnswer]
LONGEST = 4 << 20  # characters of a file that are sent: proxies of notebooks cut longer messages
PAGE = 200  # variables that are listed by default
_LEAVES = (str, bytes, bytearray, int, float, complex, bool, type(None), type, range)
_ITEMS = (list, tuple, set, frozenset, deque)
_LARGEST = 1 << 128  # of an integer key; Python refuses to write more than 4,300 digits
_OF_TENSORS = ("shape", "dtype", "device", "requires_grad", "grad")
Child = tuple[str, Any, str]  # name, value, and an expression for it in the frame, "" if there is none


@dataclass(frozen=True, slots=True)
class _Holder:
    """A value with children, or a scope of a frame."""

    value: Any
    expression: str
    frame: int
    scope: str = ""


class Variables:
    """Numbers by which front ends refer to values with children."""

    def __init__(self, frames: Frames) -> None:
        self._frames = frames
        self._holders: dict[int, _Holder] = {}
        self._numbers = itertools.count(1)

    def scopes(self, frame: int) -> tuple[Scope, ...]:
        """Returns the scopes of a frame."""
        local_scope = self._scope("locals", frame)
        global_scope = self._scope("globals", frame)
        return (
            Scope("Locals", local_scope, len(self._frames.locals(frame))),
            Scope("Globals", global_scope, len(self._frames.frame(frame).f_globals), expensive=True),
        )

    def _scope(self, scope: str, frame: int) -> int:
        for number, holder in self._holders.items():
            if (holder.scope, holder.frame) == (scope, frame):
                return number
        return self._add(_Holder(None, "", frame, scope))

    def _add(self, holder: _Holder) -> int:
        number = next(self._numbers)
        self._holders[number] = holder
        return number

    def locals(self, frame: int, names: Sequence[str] = ()) -> tuple[Variable, ...]:
        """Returns the local variables of a frame, or those with these names."""
        items = tuple(self._frames.locals(frame).items())
        chosen = ((name, value) for name, value in items if (name in names if names else not name.startswith("__")))
        return self._variables(((name, value, name) for name, value in chosen), frame)

    def _variables(self, children: Iterable[Child], frame: int) -> tuple[Variable, ...]:
        """Variables for sending. After a timeout the remaining ones are described by their types."""
        variables: list[Variable] = []
        timed_out = False
        for name, value, expression in children:
            value_text = None
            if timed_out and not issubclass(type(value), _LEAVES) and not _is_tensor(value):
                value_text = Value(f"<{type_name(value)}>", type_name(value))
            try:
                variables.append(self.variable(name, value, expression, frame, value_text))
            except CommandTimeout:
                timed_out = True
                slow = Value(f"<{type_name(value)}: its repr takes too long>", type_name(value))
                variables.append(self.variable(name, value, expression, frame, slow))
        return tuple(variables)

    def variable(self, name: str, value: Any, expression: str, frame: int, value_text: Value | None = None) -> Variable:
        """Returns a variable for sending, with a number if it has children; `value_text` is its value, if known."""
        text = value_of(value) if value_text is None else value_text
        return Variable(name, text, *self.reference(value, expression, frame), expression)

    def reference(self, value: Any, expression: str, frame: int) -> tuple[int, int, int]:
        """Returns a number for a value with children, else 0; the number of named children, and of elements."""
        named, indexed = _counts(value)
        number = self._add(_Holder(value, expression, frame)) if named or indexed else 0
        return number, named, indexed

    def children(self, number: int, start: int = 0, count: int = 0) -> tuple[tuple[Variable, ...], int]:
        """Returns a page of children, and their total. Raises LookupError for an unknown number."""
        holder = self._holder(number)
        if holder.scope:
            names = self._names(holder)
            page = sorted(names)[start : start + (count or PAGE)]
            return self._variables(((name, names[name], name) for name in page), holder.frame), len(names)
        page_of = itertools.islice(_children(holder.value, holder.expression), start, start + (count or PAGE))
        return self._variables(page_of, holder.frame), sum(_counts(holder.value))

    def _holder(self, number: int) -> _Holder:
        holder = self._holders.get(number)
        if holder is None:
            raise LookupError(f"there is no variable {number}: the rank has resumed since it was listed")
        return holder

    def _names(self, holder: _Holder) -> Mapping[str, Any]:
        scope = self._frames.locals(holder.frame)
        if holder.scope == "globals":
            scope = self._frames.frame(holder.frame).f_globals
        return {name: value for name, value in tuple(scope.items()) if not name.startswith("__")}

    def assign(self, number: int, name: str, value: object, frame: int) -> None:
        """Assigns to a variable of a scope (0: the locals of `frame`), or to a child of a value. Raises what the
        assignment raises; TypeError where nothing can be assigned.
        """
        holder = self._holder(number) if number else _Holder(None, "", frame, "locals")
        target = holder.value
        if holder.scope == "globals":
            self._frames.frame(holder.frame).f_globals[name] = value
        elif holder.scope:
            self._frames.assign(name, value, holder.frame)
        elif isinstance(target, MutableMapping):
            target[_key(target, name)] = value
        elif isinstance(target, MutableSequence):
            target[int(name)] = value
        elif isinstance(target, _ITEMS):
            raise TypeError(f"{kind_of(target)} cannot be changed")
        else:
            setattr(target, name, value)


def _key(mapping: Mapping[object, object], name: str) -> object:
    for key in mapping:
        if shorten(key) == name:
            return key
    raise LookupError(f"there is no key {name}")


def _counts(value: object) -> tuple[int, int]:
    """Returns the number of named and of numbered children of a value."""
    if issubclass(type(value), _LEAVES):
        return 0, 0
    if _is_tensor(value):
        return len(tuple(_tensor_attributes(value))), 0
    if isinstance(value, dict):
        return len(value), 0
    if isinstance(value, _ITEMS):
        return 0, len(value)
    return sum(1 for _ in _attributes(value)), 0


def _is_tensor(value: object) -> bool:
    """Returns whether a value is a tensor or an array, which are described by properties, not by elements."""
    from_library = type(value).__module__.partition(".")[0] in ("torch", "numpy")
    return from_library and hasattr(value, "shape") and hasattr(value, "dtype")


def _tensor_attributes(value: object) -> Iterator[str]:
    """The attributes of a tensor or array that are shown."""
    for name in _OF_TENSORS:
        # PyTorch warns when the gradient of a tensor that retains none is read.
        if name == "grad" and not (getattr(value, "is_leaf", False) or getattr(value, "retains_grad", False)):
            continue
        if hasattr(value, name):
            yield name


def _children(value: object, expression: str) -> Iterator[Child]:
    def under(rest: str) -> str:
        return f"{expression}{rest}" if expression else ""

    if _is_tensor(value):
        for name in _tensor_attributes(value):
            yield name, getattr(value, name), under(f".{name}")
    elif isinstance(value, dict):
        for key, child in tuple(value.items()):
            yield shorten(key), child, under(f"[{key!r}]") if _is_short(key) else ""
    elif isinstance(value, (list, tuple, deque)):
        for index, child in enumerate(value):
            yield str(index), child, under(f"[{index}]")
    elif isinstance(value, _ITEMS):
        for index, child in enumerate(tuple(value)):
            yield str(index), child, ""
    else:
        for name, child in _attributes(value):
            yield name, child, under(f".{name}")


def _is_short(key: object) -> bool:
    """Returns whether a key can be written into an expression."""
    return isinstance(key, int) and -_LARGEST < key < _LARGEST if not isinstance(key, str) else len(key) <= 200


def _attributes(value: object) -> Iterator[tuple[str, object]]:
    """Attributes of an instance from its dictionary and slots; nothing is computed."""
    if callable(value) and not hasattr(type(value), "__dict__"):
        return
    try:
        own = object.__getattribute__(value, "__dict__")
    except Exception:  # it has none, or hides it
        own = {}
    if isinstance(own, dict):
        yield from ((name, attribute) for name, attribute in tuple(own.items()) if isinstance(name, str))
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else tuple(slots):
            if name in ("__dict__", "__weakref__"):
                continue
            try:
                yield name, object.__getattribute__(value, name)
            except AttributeError:
                continue


class Commands:
    """Commands of one stop. `resume` is set by the command that resumes the thread."""

    def __init__(self, debugger: "ThreadDebugger", frames: Frames, tb: types.TracebackType | None) -> None:
        self.debugger = debugger
        self.machine = debugger.machine
        self.frames = frames
        self.variables = Variables(frames)
        self.traceback = tb
        self.resume: Resume | None = None
        self.quits = False
        self._handlers: dict[type[verbs.Command], Handler] = {
            verbs.Go: self._go,
            verbs.Jump: self._jump,
            verbs.Quit: self._quit,
            verbs.Select: self._select,
            verbs.Evaluate: self._evaluate,
            verbs.GetVariables: self._variables,
            verbs.GetScopes: self._scopes,
            verbs.Assign: self._assign,
            verbs.GetSource: self._source,
            verbs.GetBreakpoints: self._breakpoints,
            verbs.Pdb: self._pdb,
        }

    def carry_out(self, command: verbs.Command) -> verbs.CommandAnswer:
        """Returns the answer to a command, without printed output and location. It reports what the user's code raises;
        raises CommandTimeout and KeyboardInterrupt.
        """
        try:
            if command.frame is not None:
                self.machine.select(command.frame)
            return self._handlers[type(command)](command)
        except CommandError as error:
            reason = str(error)
        except (Exception, SystemExit) as error:
            reason = error_line(error)
        return verbs.CommandAnswer(session=command.session, error=reason)

    @property
    def standing(self) -> Paused:
        """The stop. Raises CommandError if the thread has resumed."""
        standing = self.machine.standing
        if standing is None:
            raise CommandError("the rank is not stopped any more")
        return standing

    # -- resuming ----------------------------------------------------------------------------------------------------

    def _go(self, command: verbs.Go) -> verbs.CommandAnswer:
        self.go(command)
        return verbs.CommandAnswer(session=command.session, resumed=True)

    def go(self, command: verbs.Go) -> None:
        """Resumes the thread after this command."""
        line = self.frames.entries[self.standing.selected][1]
        if command.motion == "until" and command.line is not None and command.line <= line:
            raise CommandError('"until" line number is smaller than current line number')
        self.resume = self.machine.go(command.motion, command.line)

    def _jump(self, command: verbs.Jump) -> verbs.CommandAnswer:
        return verbs.CommandAnswer(session=command.session, resumed=self.jump(command.line))

    def jump(self, line: int) -> bool:
        """Runs another line next; returns whether the thread has to resume for that, up to the next line."""
        self.resume = self.machine.jump(line)
        if self.resume is not None:
            return True
        try:
            self.frames.move(self.standing.selected, line)
        except ValueError as error:
            raise CommandError(f"Jump failed: {error}") from None
        return False

    def _quit(self, command: verbs.Quit) -> verbs.CommandAnswer:
        self.quit()
        return verbs.CommandAnswer(session=command.session, resumed=True)

    def quit(self) -> None:
        """Ends the endpoint after this command."""
        self.machine.released()
        self.quits = True

    # -- inspecting ---------------------------------------------------------------------------------------------------

    def _select(self, command: verbs.Select) -> verbs.CommandAnswer:
        if command.by:
            self.machine.move(command.by)
        return verbs.CommandAnswer(session=command.session)

    def _evaluate(self, command: verbs.Evaluate) -> verbs.CommandAnswer:
        if command.statement and not is_expression(command.text):
            self.frames.execute(command.text, self.standing.selected)
            return verbs.CommandAnswer(session=command.session)
        value = self.frames.evaluate(command.text, self.standing.selected)
        if value is None and command.statement:
            return verbs.CommandAnswer(session=command.session)
        return self._valued(command, command.text, value, much=command.much)

    def _valued(
        self, command: verbs.Command, expression: str, value: object, *, much: bool = False
    ) -> verbs.CommandAnswer:
        reference, named, indexed = self.variables.reference(value, expression, self.standing.selected)
        return verbs.CommandAnswer(
            session=command.session, value=value_of(value, much=much), reference=reference, named=named, indexed=indexed
        )

    def _variables(self, command: verbs.GetVariables) -> verbs.CommandAnswer:
        if command.reference:
            variables, total = self.variables.children(command.reference, command.start, command.count)
        else:
            variables = self.variables.locals(self.standing.selected, command.names)
            total = len(variables)
        return verbs.CommandAnswer(session=command.session, variables=variables, total=total)

    def _scopes(self, command: verbs.GetScopes) -> verbs.CommandAnswer:
        return verbs.Scopes(session=command.session, scopes=self.variables.scopes(self.standing.selected))

    def _assign(self, command: verbs.Assign) -> verbs.CommandAnswer:
        selected = self.standing.selected
        value = self.frames.evaluate(command.text, selected)
        self.variables.assign(command.reference, command.name, value, selected)
        return self._valued(command, "", value)

    def _source(self, command: verbs.GetSource) -> verbs.CommandAnswer:
        names = next((f.f_globals for f, _ in self.frames.entries if f.f_code.co_filename == command.file), None)
        lines = linecache.getlines(command.file, names)
        if not lines:
            raise CommandError(f"the source of {command.file} is not to be had on this rank")
        return verbs.SourceText(session=command.session, content="".join(lines)[:LONGEST])

    def _breakpoints(self, command: verbs.GetBreakpoints) -> verbs.CommandAnswer:
        fields = RankBreakpoint.__struct_fields__
        breakpoints = tuple(
            RankBreakpoint(**{name: getattr(bp, name) for name in fields}) for bp in self.machine.breakpoints
        )
        return verbs.BreakpointList(session=command.session, breakpoints=breakpoints)

    def _pdb(self, command: verbs.Pdb) -> verbs.CommandAnswer:
        value, errors = self.debugger.pdb_text().run_line(self, command.text)
        return verbs.CommandAnswer(
            session=command.session,
            value=value,
            error="; ".join(map(text_of, errors)),
            resumed=self.machine.standing is None,
        )
