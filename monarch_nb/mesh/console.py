"""The console of a process: set-up code and cells, run on its main thread in a namespace that lasts."""

import ast
import inspect
import linecache
import sys
import types
from collections.abc import Callable
from typing import NoReturn

from monarch_nb._deferred import asyncio
from monarch_nb._parsing import parsed
from monarch_nb.mesh.actor import ActorMesh
from monarch_nb.mesh.handle import Handle, region_of, state_of
from monarch_nb.mesh.registry import MeshRegistry
from monarch_nb.runtime import Actor, ActorState, ProcState, current, current_runtime, endpoint
from monarch_nb.runtime.context import Instance
from monarch_nb.runtime.output.displays import may_be_rich, open_figures, show_figures
from monarch_nb.shape import Region
from monarch_nb.wire import Encoded, check_size, encode, error_line, repr_of, size_of, type_name

LARGE = 1 << 20  # bytes of an object that has no display but a repr
LONGEST = 10_000  # characters of a repr
_CONTENTS = ("torch", "numpy", "pandas", "polars", "pyarrow")  # their values are data, which a cell may want here


def remember_source(filename: str, source: str) -> None:
    """Makes tracebacks show the cell's own lines."""
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)


def run_source(source: str, filename: str, namespace: dict[str, object]) -> object:
    """Executes a cell; returns the value of its last expression, None if there is none. Top-level await works."""
    remember_source(filename, source)
    tree = parsed(source, filename)
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    last: ast.Expression | None = None
    if tree.body and isinstance(tree.body[-1], ast.Expr) and not source.rstrip().endswith(";"):
        tail = tree.body.pop()
        assert isinstance(tail, ast.Expr)
        last = ast.Expression(tail.value)
    result = None
    parts: list[tuple[ast.Module | ast.Expression, str]] = [(tree, "exec")] if tree.body else []
    if last is not None:
        parts.append((last, "eval"))
    for part, mode in parts:
        code = compile(part, filename, mode, flags=flags, dont_inherit=True)
        result = eval(code, namespace)
        if code.co_flags & inspect.CO_COROUTINE:
            result = asyncio.run(result) if not _has_loop() else result
    return result if last is not None else None


class StayedOnRank:
    """A stand-in for a cell's value that stayed on its rank: shows its repr; `reason` is why it is not here."""

    text = kind = reason = ""

    def __init__(self, text: str, kind: str, reason: str) -> None:
        self.text, self.kind, self.reason = text, kind, reason

    def __repr__(self) -> str:
        return self.text

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"{name!r}: this {self.kind} stayed on its rank, since {self.reason}. Use it in another %%on cell; what "
            "an endpoint returns is brought here whole"
        )


def _sendable(value: object) -> object:
    """Returns the value of a cell in the form to send: itself, encoded, or a stand-in."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    try:
        frames = encode(value, current_runtime())
        check_size(frames)
    except Exception as error:
        return _stand_in(value, f"it cannot be sent ({next(iter(error_line(error).splitlines()), '')})")
    size = size_of(frames)
    if size > LARGE and _is_object(value):
        return _stand_in(value, f"it has {size / 1e6:.1f} MB")
    return Encoded(frames)


def _is_object(value: object) -> bool:
    """Returns whether a value is neither data nor a container, and has no rich display: its repr would be shown."""
    if isinstance(value, (bytes, bytearray, memoryview, list, tuple, dict, set, frozenset)) or may_be_rich(value):
        return False
    library = type(value).__module__.partition(".")[0] in _CONTENTS
    return not (library and hasattr(value, "shape"))


def _stand_in(value: object, reason: str) -> StayedOnRank:
    text = repr_of(value)
    text = text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
    return StayedOnRank(text, type_name(value), reason)


def run_and_draw(source: str, filename: str, namespace: dict[str, object]) -> object:
    """Like `run_source`, with the value in the form to send; displays figures that the cell leaves open, as in a
    notebook."""
    before = open_figures()
    value = None
    try:
        value = run_source(source, filename, namespace)
    finally:
        show_figures(before, value)
    return _sendable(value)


def _has_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class Console(Actor):
    """An actor on the main thread of every process, so that Ctrl-C reaches what runs here."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        module = types.ModuleType("__main__")
        module.__dict__["__builtins__"] = __builtins__
        sys.modules["__main__"] = module
        self.namespace = module.__dict__

    @endpoint
    def setup(
        self, sources: list[tuple[str, str]], bootstrap: Callable[[], object] | None, mesh: Handle[ProcState]
    ) -> None:
        """Runs the set-up of the process, once, before any actor is constructed."""
        try:
            current_runtime().part(MeshRegistry).belongs(state_of(mesh))
            self._place(mesh)
            for source, filename in sources:
                run_source(source, filename, self.namespace)
            if bootstrap is not None:
                result = bootstrap()
                if inspect.iscoroutine(result):
                    asyncio.run(result)
        finally:
            current_runtime().end_setup()

    @endpoint
    def run(self, function: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Runs a function here."""
        result = function(*args, **kwargs)
        return asyncio.run(result) if inspect.iscoroutine(result) else result

    @endpoint
    def cell(self, source: str, filename: str, mesh: object) -> object:
        """Runs a cell here."""
        self._name(mesh)
        return run_and_draw(source, filename, self.namespace)

    def _place(self, mesh: Handle[ProcState]) -> None:
        """Sets the place of this process in its mesh."""
        _instance().rank = region_of(mesh).point_of_base_rank(self.rank)
        self._name(mesh)

    def _name(self, mesh: object = None) -> None:
        point = _instance().rank
        self.namespace.update(rank=point.rank, point=point)
        if mesh is not None:
            self.namespace["mesh"] = mesh


def _instance() -> Instance:
    context = current.get()
    assert context is not None
    return context.actor_instance


class ConsoleState(ActorState):
    """The consoles of a proc mesh: their incarnations are those of the processes."""

    def incarnation(self, rank: int) -> int:
        """Returns the current incarnation of a rank."""
        return self.procs.incarnation(rank)

    def _healed(self) -> set[int]:
        return set(self.procs.incarnations)


def console_state(procs: ProcState) -> ConsoleState:
    """Returns the record of the consoles of all processes of a mesh."""
    return ConsoleState(
        uid=procs.uid,
        name=procs.name,
        region=procs.region,
        owner_process=procs.owner_process,
        procs=procs,
        cls=Console,
        kind="sync",
    )


def console_of(procs: ProcState, region: Region) -> ActorMesh[Console]:
    """Returns the consoles of the processes of a slice."""
    return ActorMesh(console_state(procs), region)
