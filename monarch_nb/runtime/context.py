"""The context of running code: its process, its actor instance, and the message it handles."""

import functools
import hashlib
import sys
import threading
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, Self

from monarch_nb._package import become_controller
from monarch_nb.routing import Outbox
from monarch_nb.runtime.ids import Uid
from monarch_nb.shape import Extent, Point
from monarch_nb.transport import held_back
from monarch_nb.wire import Harmless, Header, parse_address

if TYPE_CHECKING:
    from monarch_nb.runtime.actors.cell import ActorCell
    from monarch_nb.runtime.process import Runtime

_NOWHERE = Point(0, Extent((), ()))


class ActorId(str):
    """Names an actor instance: as text for people, `<root>` or `<root>.<module.Class name{'gpus': 0/2}>`.

    Programs read its parts, which are "" (and rank 0) where they are not known.
    """

    actor_name: str = ""  # as it was spawned; "client" for the root
    proc_id: str = ""  # the address of its process
    uid: str = ""  # unique for this incarnation: "name<number>"
    rank: int = 0  # in the mesh that was spawned

    @classmethod
    def of(cls, lineage: "tuple[Ancestor, ...]", *, proc_id: str = "", life: str = "") -> Self:
        """Makes the id of the last of a line of actors; `life` is any text unique to its incarnation."""
        self = cls(".".join(ancestor.shown for ancestor in lineage))
        last = lineage[-1]
        self.actor_name = "client" if last.class_name is None else last.name
        self.proc_id, self.rank = proc_id, last.rank
        if life:
            number = int.from_bytes(hashlib.blake2b(life.encode(), digest_size=8).digest(), "big")
            self.uid = f"{self.actor_name}{Uid.instance_from_value(number)}"
        return self

    @property
    def label(self) -> str:
        """The same as `actor_name`."""
        return self.actor_name

    @property
    def pid(self) -> str:
        """The same as `uid`; a process's number is `os.getpid()`."""
        return self.uid

    @property
    def addr(self) -> str:
        """The same as `proc_id`: processes are addressed, and actors by their process and uid."""
        return self.proc_id

    @property
    def proc_name(self) -> str:
        """The name of the process on its host."""
        return parse_address(self.proc_id).name


class Ancestor(Harmless, array_like=True, frozen=True):
    """An actor in a chain of creators, as it is sent between processes."""

    shown: str  # its part of an actor's name
    name: str
    class_name: str | None  # None: a root
    labels: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    rank: int = 0


ROOT = Ancestor("<root>", "root", None)


@dataclass(frozen=True, slots=True, repr=False)
class CreatorInstance:
    """The actor that spawned another one, by name and point; it may have ended."""

    name: str
    class_name: str | None
    rank: Point
    creator: "CreatorInstance | None"
    actor_id: ActorId

    def __repr__(self) -> str:
        return str(self.actor_id)


def _creator(lineage: tuple[Ancestor, ...]) -> CreatorInstance | None:
    if not lineage:
        return None
    last = lineage[-1]
    point = Point(last.rank, Extent(last.labels, last.sizes))
    return CreatorInstance(last.name, last.class_name, point, _creator(lineage[:-1]), ActorId.of(lineage))


class StopRequested(BaseException):
    """Unwinds an endpoint whose actor requested its own stop, kill or abort."""


@dataclass(eq=False, repr=False)
class Instance:
    """One incarnation of one actor: its names, its rank, and how it can end itself."""

    process: "Runtime"
    stream: str  # unique per incarnation: the sender of its messages
    lineage: tuple[Ancestor, ...]  # the root first, itself last
    rank: Point = _NOWHERE
    mesh: str = ""
    base_rank: int = 0
    incarnation: int = 0
    cell: "ActorCell | None" = None
    outbox: Outbox = field(default_factory=Outbox)
    numbering: threading.Lock = field(default_factory=threading.Lock)
    actor_id: ActorId = field(init=False)
    name: str = field(init=False)
    class_name: str | None = field(init=False)
    text: str = field(init=False)  # its name for people, in headers

    def __post_init__(self) -> None:
        last = self.lineage[-1]
        self.name, self.class_name = last.name, last.class_name
        self.actor_id = ActorId.of(self.lineage, proc_id=self.process.address, life=self.stream)
        self.text = str(self.actor_id)

    @property
    def creator(self) -> CreatorInstance | None:
        """The actor that spawned it; None for the root."""
        return _creator(self.lineage[:-1])

    @property
    def proc_id(self) -> str:
        """The address of the process it lives in."""
        return self.process.address

    @property
    def proc(self) -> Any:
        """The process it lives in, as a ProcMesh of one."""
        return self.process.this_proc()

    @property
    def proc_mesh(self) -> Any:
        """The ProcMesh its process belongs to."""
        return self.process.proc_mesh()

    def _end(self, how: str, reason: str | None) -> None:
        if self.cell is None:
            raise RuntimeError(f"the root client cannot {how} itself; leave the program, or shutdown_context()")
        self.cell.end_self(how, reason)

    def abort(self, reason: str | None = None) -> None:
        """Fails this actor: its owner is notified, with `reason`."""
        self._end("abort", reason)

    def kill(self, reason: str | None = None) -> None:
        """Like `abort`."""
        self._end("kill", reason)

    def stop(self, reason: str | None = None) -> None:
        """Stops this actor gracefully after the current message; that is no failure."""
        self._end("stop", reason)

    def _as_rust(self) -> "Instance":
        return self

    @property
    def _children(self) -> list[Any]:
        """The living ProcMeshes of its process. Tests of torchmonarch's programs stop what a test has left."""
        return [*self.process.proc_meshes()]

    @_children.setter
    def _children(self, meshes: object) -> None: ...  # stopped meshes leave by themselves

    def __repr__(self) -> str:
        return str(self.actor_id)

    def __reduce__(self) -> NoReturn:
        raise TypeError("an actor instance cannot be sent; send a reference to its mesh")


@dataclass(slots=True)
class Context:
    """The running actor instance, and the point of this message in the slice it was sent to."""

    actor_instance: Instance
    message_rank: Point = _NOWHERE
    call: str = field(default="", repr=False)  # id of the call being handled
    chain: tuple[str, ...] = field(default=(), repr=False)  # calls that wait for it, outermost first, itself last
    trace: str = field(default="", repr=False)  # W3C traceparent that came with the message
    cause: str = field(default="", repr=False)  # outside of calls: the call that led to it
    judging: bool = field(default=False, repr=False)  # True while it handles an undelivered message

    @property
    def origin(self) -> str:
        """The outermost call that the code belongs to, "" for none."""
        return self.chain[0] if self.chain else self.cause


current: ContextVar[Context | None] = ContextVar("monarch_context", default=None)


_extent = functools.lru_cache(maxsize=64)(Extent)  # the extents of slices, used for many calls


def stream_of(header: Header, process: "Runtime") -> str:
    """Returns a name that no other actor's messages have.

    The actor's incarnation is not enough: a controller that ends before it has recorded a heal leaves the same one to
    the next controller.
    """
    proc_incarnation = parse_address(process.address).incarnation
    return f"{header.mesh}.{header.rank}.{header.incarnation}.{proc_incarnation}.{process.node.incarnation:x}"


@functools.lru_cache(maxsize=256)
def point_of(index: int, extent: tuple[tuple[str, ...], tuple[int, ...]]) -> Point:
    """Returns the point of a message in the slice it was sent to."""
    return Point(index, _extent(*extent))


def running_actor() -> Instance | None:
    """Returns the actor whose code is running, None outside of actors."""
    context = current.get()
    return None if context is None else context.actor_instance


def running_call() -> str:
    """Returns the outermost call that the running code belongs to, "" for none."""
    context = current.get()
    return "" if context is None else context.origin


_process: "Runtime | None" = None
_several = False  # several are simulated here, and an actor's context names its process
_starting = threading.RLock()


def current_runtime() -> "Runtime":
    """Returns the process of the calling code; one without a role yet becomes a controller now."""
    if _several:
        return _of_context() or _process or _start()
    return _process or _start()


def started() -> "Runtime | None":
    """Returns the process of the calling code, if it has a role yet."""
    return (_of_context() if _several else None) or _process


def make_current(new: "Runtime | None", *, several: bool = False) -> None:
    """Makes `new` the process of all code, or with `several` of the code that runs outside of actors.

    None after the old one was closed.
    """
    global _process, _several
    _process, _several = new, several


def _of_context() -> "Runtime | None":
    context = current.get()
    return None if context is None else context.actor_instance.process


def _start() -> "Runtime":
    if sys.is_finalizing():  # a finalizer of the program
        raise RuntimeError("Python is exiting: the meshes of this program have ended, and no others can be started")
    with _starting:
        if _process is None:
            held_back(become_controller)
    assert _process is not None
    return _process
