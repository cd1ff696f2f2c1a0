"""Actors from a cell: the class that it defines, spawned, or taken over by the actors that live. What %%actor calls."""

import ast
import linecache
import warnings
from collections.abc import Callable
from typing import Any, TypeGuard

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from msgspec import Struct

from monarch_nb._parsing import parsed
from monarch_nb.code import objection, reload_mesh
from monarch_nb.lifecycle import spawn_actors
from monarch_nb.mesh import ActorMesh, ProcMesh, region_of, state_of
from monarch_nb.runtime import Actor, ActorState
from monarch_nb.store import describe
from monarch_nb.wire import counted, error_line, kind_of, text_of

from .arguments import ActorArguments
from .jupyter import transformed
from .session import Session


class _Made(Struct, frozen=True):
    """The arguments of a %%actor line, and the uid of its mesh."""

    uid: str
    arguments: tuple[tuple[str, ...], tuple[tuple[str, str], ...]]


class Actors:
    """The actor meshes that cells of one notebook define."""

    def __init__(self, shell: InteractiveShell, session: Session) -> None:
        self._shell = shell
        self._session = session
        self._made: dict[str, _Made] = {}

    def define(self, given: ActorArguments, source: str, filename: str, say: Callable[[str], None]) -> ActorMesh[Any]:
        """Runs the cell, then spawns its class or gives it to the actors of that name; binds the variable.

        Blocks until they are constructed, or have the new class. Raises UsageError, and what the cell, `__init__` or
        `__reload__` raise.
        """
        procs = self._procs(given)
        living = self._living(given)
        cls = self._run(given, source, filename)
        if living is not None and not given.fresh:
            moved = self._elsewhere(living, procs)
            if not moved:
                say(self._reload(given, living, cls))
                return living
            say(f"{given.name} is replaced: {moved}")
        mesh = self._spawn(given, procs, cls, living)
        mesh.initialized.get()
        return mesh

    # -- what is asked for ------------------------------------------------------------------------------------------

    def _procs(self, given: ActorArguments) -> ProcMesh:
        named = given.mesh.isidentifier()
        procs = self._session.find(given.mesh) if named else self._value("on", given.mesh)
        if not isinstance(procs, ProcMesh):
            raise UsageError(
                f"%%actor: {given.mesh} is {_a(procs)}; actors live on a mesh of processes: %mesh workers gpus=4"
            )
        stopped = state_of(procs).stopped
        if stopped is not None:
            raise UsageError(f"%%actor: {given.mesh} was stopped ({stopped}); make a new one with %mesh")
        return procs

    def _living(self, given: ActorArguments) -> ActorMesh[Any] | None:
        """The actors of that name that can take a class over, or have to make room."""
        bound = self._shell.user_ns.get(given.name)
        if bound is not None and not isinstance(bound, ActorMesh):
            raise UsageError(f"%%actor: {given.name} is {_a(bound)} already; choose another name, or del {given.name}")
        if bound is None and given.name in self._made:
            state = self._session.meshes().get(self._made[given.name].uid)
            bound = ActorMesh(state, state.region) if isinstance(state, ActorState) else None
        living = None if bound is None else state_of(bound)
        if living is None or living.stopped is not None or living.spawn_spec is None:
            return None
        return ActorMesh(living, living.region)

    def _value(self, label: str, text: str) -> Any:
        try:
            return eval(text, self._shell.user_ns)
        except Exception as error:
            raise UsageError(f"%%actor: {label}={text} gives {error_line(error)}") from None

    # -- the cell ---------------------------------------------------------------------------------------------------

    def _run(self, given: ActorArguments, source: str, filename: str) -> type:
        source = transformed(self._shell, source)
        linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
        tree = parsed(source, filename)
        exec(compile(tree, filename, "exec", dont_inherit=True), self._shell.user_ns)
        names = dict.fromkeys(node.name for node in tree.body if isinstance(node, ast.ClassDef))
        classes = {name: cls for name in names if is_actor_class(cls := self._shell.user_ns.get(name))}
        if given.cls:
            cls = classes.get(given.cls) or self._shell.user_ns.get(given.cls)
            if not is_actor_class(cls):
                defined = f"the cell defines {', '.join(classes)}" if classes else "the cell defines no Actor class"
                raise UsageError(f"%%actor: class={given.cls} is {_a(cls)}, no Actor class; {defined}")
            return cls
        # Those that others in the cell are derived from are helpers.
        leaves = {name: cls for name, cls in classes.items() if not any(cls in c.__mro__[1:] for c in classes.values())}
        if not leaves:
            raise UsageError(
                "%%actor: the cell defines no Actor class; begin it with: class Name(Actor):  (from monarch.actor)"
            )
        if len(leaves) > 1:
            raise UsageError(
                f"%%actor: the cell defines several Actor classes, {', '.join(leaves)}: name one, as in "
                f"%%actor {given.name} on {given.mesh} class={next(iter(leaves))}"
            )
        (cls,) = leaves.values()
        return cls

    # -- spawning and reloading -------------------------------------------------------------------------------------

    def _elsewhere(self, living: ActorMesh[Any], procs: ProcMesh) -> str:
        """The reason why the living actors do not fit the line; "" if they do."""
        state = state_of(living)
        if state.procs is not state_of(procs) or state.region != region_of(procs):
            return f"it ran on {_place(ProcMesh(state.procs, state.region))} and now runs on {_place(procs)}"
        view = describe(living)
        return "all its ranks had failed" if len(view.having("failed")) == len(view.ranks) else ""

    def _reload(self, given: ActorArguments, living: ActorMesh[Any], cls: type) -> str:
        state = state_of(living)
        failed = describe(living).having("failed")
        if failed:
            raise UsageError(
                f"%%actor: {len(failed)} of {len(living)} ranks of {given.name} have failed: %heal {given.name} first, "
                "or add --fresh"
            )
        refusal = _refused(lambda: objection(state, cls))
        if refusal:
            raise UsageError(f"%%actor: {refusal}; --fresh spawns new actors")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            done = reload_mesh(living, cls)
        done.get()
        self._shell.user_ns[given.name] = living
        lines = [
            f"{given.name}: {counted(len(living), 'actor')} now run the new {cls.__name__} and have kept their state"
        ]
        made = self._made.get(given.name)
        if made is not None and made.uid == state.uid and made.arguments != given.constructor:
            lines.append("the arguments have changed, but __init__ does not run again: --fresh spawns new actors")
        return "\n".join([*lines, *(text_of(warning.message) for warning in caught)])

    def _spawn(
        self, given: ActorArguments, procs: ProcMesh, cls: type, living: ActorMesh[Any] | None
    ) -> ActorMesh[Any]:
        args = [self._value(f"argument {number}", text) for number, text in enumerate(given.args, 1)]
        kwargs = {name: self._value(name, text) for name, text in given.kwargs.items()}
        if living is not None:
            living.stop("replaced by %%actor").get()
        try:
            mesh: ActorMesh[Any] = spawn_actors(procs, given.name, cls, tuple(args), kwargs)
        except (TypeError, ValueError) as error:
            raise UsageError(f"%%actor: {error}") from None
        self._made[given.name] = _Made(state_of(mesh).uid, given.constructor)
        self._shell.user_ns[given.name] = mesh
        return mesh


def _refused(look: Callable[[], str]) -> str:
    try:
        return look()
    except ValueError as error:
        raise UsageError(f"%%actor: {error}") from None


def is_actor_class(value: Any) -> TypeGuard[type]:
    """True for an actor class."""
    return isinstance(value, type) and issubclass(value, Actor)


def _place(procs: ProcMesh) -> str:
    dims = " ".join(f"{label}={size}" for label, size in procs.extent.items())
    return f"{procs.name} {dims}".rstrip()


def _a(value: object) -> str:
    return "not defined" if value is None else kind_of(value)
