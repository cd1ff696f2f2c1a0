"""The console of a process: set-up code and cells, run on its main thread in a namespace that lasts."""

import ast
import asyncio
import inspect
import linecache
import sys
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from monarch_nb.mesh.actor import ActorMesh
from monarch_nb.mesh.endpoint import encode_arguments
from monarch_nb.mesh.sending import send_region
from monarch_nb.mesh.value import ValueMesh
from monarch_nb.runtime import (
    EXEC,
    Actor,
    ActorState,
    Context,
    Future,
    PendingCall,
    ProcState,
    current,
    endpoint,
    runtime,
)
from monarch_nb.runtime.context import Instance
from monarch_nb.runtime.display_hooks import open_figures, show_figures

if TYPE_CHECKING:
    from monarch_nb.mesh.proc import ProcMesh


def _remember(filename: str, source: str) -> None:
    """Tracebacks show the cell's own lines."""
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)


def run_source(source: str, filename: str, namespace: dict[str, Any]) -> Any:
    """Executes a cell; gives the value of its last expression, None if it ends otherwise. Top-level await works."""
    _remember(filename, source)
    tree = ast.parse(source, filename)
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    last: ast.Expression | None = None
    if tree.body and isinstance(tree.body[-1], ast.Expr) and not source.rstrip().endswith(";"):
        tail = tree.body.pop()
        assert isinstance(tail, ast.Expr)
        last = ast.Expression(tail.value)
    result = None
    parts: list[tuple[Any, str]] = [(tree, "exec")] if tree.body else []
    if last is not None:
        parts.append((last, "eval"))
    for part, mode in parts:
        code = compile(part, filename, mode, flags=flags, dont_inherit=True)
        result = eval(code, namespace)
        if code.co_flags & inspect.CO_COROUTINE:
            result = asyncio.run(result) if not _has_loop() else result
    return result if last is not None else None


def _run_and_draw(source: str, filename: str, namespace: dict[str, Any]) -> Any:
    """The same; figures that the cell leaves open are displayed at its end, as in a notebook."""
    before = open_figures()
    value = None
    try:
        value = run_source(source, filename, namespace)
    finally:
        show_figures(before, value)
    return value


def _has_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class Console(Actor):
    """Lives in every process, on the main thread, so that Ctrl-C reaches what runs here."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        module = types.ModuleType("__main__")
        module.__dict__["__builtins__"] = __builtins__
        sys.modules["__main__"] = module
        self.namespace = module.__dict__

    @endpoint
    def setup(self, sources: list[tuple[str, str]], bootstrap: Callable[[], Any] | None, mesh: "ProcMesh") -> None:
        """Runs the set-up of the process, once, before any actor is constructed."""
        try:
            runtime().keeper.belongs(mesh)
            self._place(mesh)
            for source, filename in sources:
                run_source(source, filename, self.namespace)
            if bootstrap is not None:
                result = bootstrap()
                if inspect.iscoroutine(result):
                    asyncio.run(result)
        finally:
            runtime().end_setup()

    @endpoint
    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a function here."""
        result = function(*args, **kwargs)
        return asyncio.run(result) if inspect.iscoroutine(result) else result

    @endpoint
    def cell(self, source: str, filename: str, mesh: Any) -> Any:
        """Runs a cell here."""
        self._name(mesh)
        return _run_and_draw(source, filename, self.namespace)

    def _place(self, mesh: "ProcMesh") -> None:
        """Takes the place in the mesh that this process is of."""
        _instance().rank = mesh._region.point_of_base_rank(self.rank)
        self._name(mesh)

    def _name(self, mesh: Any = None) -> None:
        point = _instance().rank
        self.namespace.update(rank=point.rank, point=point)
        if mesh is not None:
            self.namespace["mesh"] = mesh


def _instance() -> Instance:
    context = current.get()
    assert context is not None
    return context.actor_instance


class ConsoleState(ActorState):
    """The consoles of a proc mesh: their lives are those of the processes."""

    def incarnation(self, rank: int) -> int:
        """The current life of a rank."""
        return self.procs.incarnation(rank)

    def _healed(self) -> set[int]:
        return set(self.procs.incarnations)


def console_of(procs: "ProcMesh") -> "ActorMesh[Console]":
    """The consoles of the processes of a mesh (or slice)."""
    state: ProcState = procs._state
    console = ConsoleState(
        uid=state.uid,
        name=state.name,
        region=state.region,
        home=state.home,
        procs=state,
        cls=Console,
        kind="sync",
    )
    return ActorMesh(console, procs._region)


def run_on(mesh: Any, source: str, *, filename: str = "<cell>") -> Future[ValueMesh[Any]]:
    """Runs a cell's source on every rank: on a ProcMesh in the lasting namespace of each process, with `rank`, `point`
    and `mesh` in it; on an ActorMesh between messages, with `self` as well. Gives the values of its last expression.

    Raises SyntaxError here, before anything is sent.
    """
    compile(source, filename, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    _remember(filename, source)
    if isinstance(mesh, ActorMesh):
        return _exec(mesh, source, filename)
    return mesh._console.cell.call(source, filename, mesh)  # type: ignore[no-any-return]


def _exec(mesh: ActorMesh[Any], source: str, filename: str) -> Future[ValueMesh[Any]]:
    engine = runtime()
    state, region = mesh._state, mesh._region
    call = PendingCall(
        engine,
        f"{state.name}[cell]",
        state.uid,
        region.ranks,
        len(region),
        lambda replies: ValueMesh._of_thunks(region, replies, state.region),
    )
    broken = engine.supervisor.check(state, region, call)
    if broken is not None:
        call.fail(broken)
        return call.hand_out()
    frames = encode_arguments(call.title, (source, filename, mesh), {})
    context: Context = engine.context()
    send_region(engine, context, state, region, EXEC, frames, port=call.number, call=call.call)
    return call.hand_out()


def run_in_actor(obj: Any, namespace: dict[str, Any], source: str, filename: str, mesh: Any) -> Any:
    """Runs a cell inside an actor, between its messages."""
    point = _instance().rank
    namespace.update(self=obj, rank=point.rank, point=point, mesh=mesh)
    return _run_and_draw(source, filename, namespace)
