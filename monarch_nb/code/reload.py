"""The reload of classes: living actors adopt a changed class between messages, and keep their state."""

import inspect
import types
import warnings

from monarch_nb._package import more
from monarch_nb.code.class_versions import ClassVersions
from monarch_nb.code.modules import Newest, newest
from monarch_nb.mesh.actor import ActorMesh, check_class, init_of
from monarch_nb.mesh.arguments import encode_arguments
from monarch_nb.mesh.handle import region_of, state_of
from monarch_nb.mesh.requests import gather
from monarch_nb.mesh.sending import send_region
from monarch_nb.runtime import RELOAD, ActorState, Future, PendingCall, Thunk, current_runtime, kind_of
from monarch_nb.wire import travels_by_value


def _code(code: types.CodeType) -> tuple[object, ...]:
    """Returns a comparable value of a function's code, without line numbers."""
    consts = tuple(_code(const) if isinstance(const, types.CodeType) else repr(const) for const in code.co_consts)
    return code.co_code, code.co_names, code.co_varnames, consts


def _init(cls: type) -> object:
    method = init_of(cls)
    return (_code(method.__code__), repr(method.__defaults__)) if inspect.isfunction(method) else None


def reload_mesh(mesh: object, cls: type | None = None) -> Future[None]:
    """Gives the actors of a mesh the newest definition of their class, or `cls`; their state stays.

    The reload is a message in order: calls sent before run with the old class, calls sent after with the new one. An
    actor's `__reload__(old_class)` runs when it has the new class. The class of a module whose file was edited is read
    from that file. The future resolves when all holders of references to the mesh know the class too.
    Warns when `__init__` has changed, since that is not run again. Raises TypeError when the two cannot be swapped
    (other `__slots__`, sync against async): spawn anew then. Raises SupervisionError for a mesh with failed ranks.
    """
    if not isinstance(mesh, ActorMesh):
        raise TypeError(f"reload_mesh takes an actor mesh, not {type(mesh).__name__}")
    state, region = state_of(mesh), region_of(mesh)
    if state.spawn_spec is None:
        raise RuntimeError(f"{state.name} was spawned by another process: reload it there")
    if len(region) != len(state.region):
        raise ValueError(f"reload the whole of {state.name}, not a slice: its ranks would run different classes")
    old, new = state.cls, cls or _newest(state)
    problem = objection(state, new)
    if problem:
        raise TypeError(f"{problem}: spawn a new mesh")
    if _init(old) != _init(new):
        warnings.warn(
            f"{new.__name__}.__init__ has changed, but it does not run again: the living actors of {state.name} "
            "lack what it sets now. Set that in __reload__(self, old), or spawn a new mesh"
            + more("manual/editing.md#a-class-from-a-cell-or-a-script"),
            stacklevel=2,
        )
    runtime = current_runtime()
    call = PendingCall(
        runtime, f"{state.name}.{RELOAD}", state.uid, region.ranks, len(region), lambda replies: _check_all(replies)
    )
    try:
        broken = runtime.supervisor.check(state, region, call)
        if broken is not None:
            raise broken
        frames = encode_arguments(call.title, (Newest(new),), {})
        state.cls = new
        if state.spawn_spec is not None:
            state.spawn_spec.cls = new
        send_region(runtime, runtime.context(), state, region, RELOAD, frames, pending=call)
    except BaseException:
        call.close()
        raise
    published = runtime.part(ClassVersions).publish(state)
    return gather([call.future, published], lambda: f"{state.name} does not have its new class on all ranks yet")


def _newest(state: ActorState) -> type:
    """Returns the current definition of the class, from its file if that was edited."""
    cls = state.cls
    if not travels_by_value(cls):
        newest(cls.__module__, cls.__qualname__)
    return cls if state.spawn_spec is None else state.spawn_spec.newest()


def objection(state: ActorState, new: type) -> str:
    """Returns why living actors cannot adopt a class; "" if they can. Raises ValueError if it is no actor class."""
    check_class(new)
    if kind_of(new) != state.kind:
        return f"{new.__name__} is {kind_of(new)} now and was {state.kind}"
    if getattr(new, "__slots__", None) != getattr(state.cls, "__slots__", None):
        return f"the __slots__ of {new.__name__} have changed, which living objects cannot follow"
    return ""


def _check_all(replies: list[Thunk]) -> None:
    for reply in replies:
        reply()
