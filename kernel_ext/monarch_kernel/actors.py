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


class _ActorOrigin(Struct, frozen=True):
    """The arguments of a %%actor line, and the uid of its mesh."""

    uid: str
    arguments: tuple[tuple[str, ...], tuple[tuple[str, str], ...]]


class Actors:
    """The actor meshes that cells of one notebook define."""

    def __init__(self, shell: InteractiveShell, session: Session) -> None:
        self._shell = shell
        self._session = session
        self._origins: dict[str, _ActorOrigin] = {}

    def define(self, spec: ActorArguments, source: str, filename: str, say: Callable[[str], None]) -> ActorMesh[Any]:
        """Runs the cell, then spawns its class or gives it to the actors of that name; binds the variable.

        Blocks until they are constructed, or have the new class. Raises UsageError, and what the cell, `__init__` or
        `__reload__` raise.
        """
        procs = self._procs(spec)
        living = self._living(spec)
        cls = self._run(spec, source, filename)
        if living is not None and not spec.fresh:
            moved = self._mismatch(living, procs)
            if not moved:
                say(self._reload(spec, living, cls))
                return living
            say(f"{spec.name} is replaced: {moved}")
        mesh = self._spawn(spec, procs, cls, living)
        mesh.initialized.get()
        return mesh

    # -- the mesh and the name ----------------------------------------------------------------------------------------

    def _procs(self, spec: ActorArguments) -> ProcMesh:
        named = spec.mesh.isidentifier()
        procs = self._session.find(spec.mesh) if named else self._value("on", spec.mesh)
        if not isinstance(procs, ProcMesh):
            raise UsageError(
                f"%%actor: {spec.mesh} is {_kind(procs)}; actors live on a mesh of processes: %mesh workers gpus=4"
            )
        stopped = state_of(procs).stopped
        if stopped is not None:
            raise UsageError(f"%%actor: {spec.mesh} was stopped ({stopped}); make a new one with %mesh")
        return procs

    def _living(self, spec: ActorArguments) -> ActorMesh[Any] | None:
        """Returns the actors of that name that can take a class over, or have to make room."""
        bound = self._shell.user_ns.get(spec.name)
        if bound is not None and not isinstance(bound, ActorMesh):
            raise UsageError(f"%%actor: {spec.name} is {_kind(bound)} already; choose another name, or del {spec.name}")
        if bound is None and spec.name in self._origins:
            state = self._session.meshes().get(self._origins[spec.name].uid)
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

    def _run(self, spec: ActorArguments, source: str, filename: str) -> type:
        source = transformed(self._shell, source)
        linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
        tree = parsed(source, filename)
        exec(compile(tree, filename, "exec", dont_inherit=True), self._shell.user_ns)
        names = dict.fromkeys(node.name for node in tree.body if isinstance(node, ast.ClassDef))
        classes = {name: cls for name in names if is_actor_class(cls := self._shell.user_ns.get(name))}
        if spec.cls:
            cls = classes.get(spec.cls) or self._shell.user_ns.get(spec.cls)
            if not is_actor_class(cls):
                defined = f"the cell defines {', '.join(classes)}" if classes else "the cell defines no Actor class"
                raise UsageError(f"%%actor: class={spec.cls} is {_kind(cls)}, no Actor class; {defined}")
            return cls
        # Base classes of other classes in the cell are helpers.
        leaves = {name: cls for name, cls in classes.items() if not any(cls in c.__mro__[1:] for c in classes.values())}
        if not leaves:
            raise UsageError(
                "%%actor: the cell defines no Actor class; begin it with: class Name(Actor):  (from monarch.actor)"
            )
        if len(leaves) > 1:
            raise UsageError(
                f"%%actor: the cell defines several Actor classes, {', '.join(leaves)}: name one, as in "
                f"%%actor {spec.name} on {spec.mesh} class={next(iter(leaves))}"
            )
        (cls,) = leaves.values()
        return cls

    # -- spawning and reloading -------------------------------------------------------------------------------------

    def _mismatch(self, living: ActorMesh[Any], procs: ProcMesh) -> str:
        """Returns the reason why the living actors do not fit the line; "" if they do."""
        state = state_of(living)
        if state.procs is not state_of(procs) or state.region != region_of(procs):
            return f"it ran on {_mesh_text(ProcMesh(state.procs, state.region))} and now runs on {_mesh_text(procs)}"
        view = describe(living)
        return "all its ranks had failed" if len(view.having("failed")) == len(view.ranks) else ""

    def _reload(self, spec: ActorArguments, living: ActorMesh[Any], cls: type) -> str:
        state = state_of(living)
        failed = describe(living).having("failed")
        if failed:
            raise UsageError(
                f"%%actor: {len(failed)} of {len(living)} ranks of {spec.name} have failed: %heal {spec.name} first, "
                "or add --fresh"
            )
        refusal = _refusal(lambda: objection(state, cls))
        if refusal:
            raise UsageError(f"%%actor: {refusal}; --fresh spawns new actors")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            done = reload_mesh(living, cls)
        done.get()
        self._shell.user_ns[spec.name] = living
        lines = [
            f"{spec.name}: {counted(len(living), 'actor')} now run the new {cls.__name__} and have kept their state"
        ]
        origin = self._origins.get(spec.name)
        if origin is not None and origin.uid == state.uid and origin.arguments != spec.constructor:
            lines.append("the arguments have changed, but __init__ does not run again: --fresh spawns new actors")
        return "\n".join([*lines, *(text_of(warning.message) for warning in caught)])

    def _spawn(self, spec: ActorArguments, procs: ProcMesh, cls: type, living: ActorMesh[Any] | None) -> ActorMesh[Any]:
        args = [self._value(f"argument {number}", text) for number, text in enumerate(spec.args, 1)]
        kwargs = {name: self._value(name, text) for name, text in spec.kwargs.items()}
        if living is not None:
            living.stop("replaced by %%actor").get()
        try:
            mesh: ActorMesh[Any] = spawn_actors(procs, spec.name, cls, tuple(args), kwargs)
        except (TypeError, ValueError) as error:
            raise UsageError(f"%%actor: {error}") from None
        self._origins[spec.name] = _ActorOrigin(state_of(mesh).uid, spec.constructor)
        self._shell.user_ns[spec.name] = mesh
        return mesh


def _refusal(check: Callable[[], str]) -> str:
    try:
        return check()
    except ValueError as error:
        raise UsageError(f"%%actor: {error}") from None


def is_actor_class(value: Any) -> TypeGuard[type]:
    """Returns whether a class is an actor class."""
    return isinstance(value, type) and issubclass(value, Actor)


def _mesh_text(procs: ProcMesh) -> str:
    dims = " ".join(f"{label}={size}" for label, size in procs.extent.items())
    return f"{procs.name} {dims}".rstrip()


def _kind(value: object) -> str:
    return "not defined" if value is None else kind_of(value)
