"""The interfaces of higher layers to the runtime: supervision, and features, which are loaded when first needed."""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast

from monarch_nb.wire import ActorError, Frame, Header

if TYPE_CHECKING:
    from monarch_nb.runtime.actors.cell import ActorCell
    from monarch_nb.runtime.calls import PendingCall
    from monarch_nb.runtime.cause import Cause
    from monarch_nb.runtime.context import Instance
    from monarch_nb.runtime.future import Future
    from monarch_nb.runtime.meshes import MeshState, ProcState
    from monarch_nb.shape import Region
    from monarch_nb.transport import Parcel

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Supervising(Protocol):
    """Determines causes of failures, and notifies owners."""

    def cause_of(self, kind: str, error: BaseException, text: str, actor: "ActorCell", method: str) -> "Cause":
        """Returns the cause of an actor's failure."""

    def stopped_cause(self, actor: "ActorCell", reason: str) -> "Cause":
        """Returns the cause that callers of a stopped actor get."""

    def lost_cause(self, header: Header, reason: str) -> "Cause":
        """Returns the cause for the caller of a message that could not be delivered."""

    def lost(self, header: Header, reason: str, call: "PendingCall[object]") -> BaseException:
        """Returns the error of a call whose message could not be delivered."""

    def encode(self, cause: "Cause", request: Header) -> bytes:
        """Returns the cause for which a call is refused, as bytes."""

    def reason(self, cause: "Cause") -> str:
        """Returns a cause in a few words."""

    def check(self, state: "MeshState", region: "Region", call: "PendingCall[object] | None") -> BaseException | None:
        """Returns the error that a call on a slice raises at once, if any."""

    def error(self, data: Frame, call: "PendingCall[object] | None") -> BaseException:
        """Returns the error a call raises for an encoded cause."""

    def actor_spawned(self, actor: "ActorCell") -> None:
        """Registers an actor that lives here from now on."""

    def actor_failed(self, actor: "ActorCell") -> None:
        """Handles the failure of an actor of this process."""

    def actor_ended(self, actor: "ActorCell") -> None:
        """Handles the end of an actor of this process, failed or stopped."""

    def stop_children(self, instance: "Instance") -> None:
        """Stops the meshes of an ending actor; blocks."""

    def undeliverable(self, header: Header, reason: str) -> None:
        """Handles an undelivered message without a waiter."""


FaultHook = Callable[[Any], None]  # of the program: it takes a `MeshFailure`, of a row above


def _no_hook() -> FaultHook | None:
    return None


_lookup = _no_hook


def set_hook_lookup(lookup: Callable[[], FaultHook | None]) -> None:
    """Sets `lookup`, which returns the program's current hook; None if it has not set one."""
    global _lookup
    _lookup = lookup


def fault_hook(default: FaultHook) -> FaultHook:
    """Returns the function that is called with an unhandled failure."""
    return _lookup() or default


class Feature(Generic[T]):
    """The name of a part that a process loads when it is first needed, and its type."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class DebuggerFeature(Protocol):
    """The debugger of a process, as the runtime needs it; the feature "debug", which is loaded when something stops."""

    def stop(self, frame: FrameType, reason: str) -> None:
        """Stops the calling thread at a frame; returns when it may go on."""

    def freeze(self, error: BaseException) -> None:
        """Stops the calling thread at an error's raise."""

    def held_at(self, mesh: str, rank: int) -> str:
        """Returns where an actor is stopped, and takes no messages; "" if it is not."""

    def wanted(self) -> bytes:
        """Returns the breakpoints for actors spawned from this process."""

    def arm(self, cell: "ActorCell", cls: type) -> None:
        """Sets breakpoints in an actor that is about to be constructed, on its thread."""

    def reproduce(self, error: ActorError, **options: Any) -> Any:
        """Runs a failed call again in this process."""


class CollectivesFeature(Protocol):
    """Waits in process groups of torch.distributed, as the runtime needs them ended; the feature "collectives"."""

    def release(self, call: "PendingCall[object]", done: Callable[[], None]) -> None:
        """Frees ranks that wait for others that have raised in a call, and calls `done`. Does not block."""

    def renew(self, procs: "ProcState", mesh: str) -> "Future[None]":
        """Continues broken groups of a mesh's processes, or gives them up, once its calls have ended. Never blocks."""

    def renew_after_loss(
        self, procs: "ProcState", ranks: Sequence[int], world: Any, lost: tuple[int, ...]
    ) -> "Future[set[str]]":
        """Gives up groups that contained lost ranks, and sets the environment of these ranks of a mesh again.

        Resolves to the uids of actor meshes whose `__init__` had made such a group. Does not block.
        """

    def interrupted(self, cell: "ActorCell") -> bool:
        """Ends waits of an actor that an interrupt has not ended; False if it waits in no process group."""


DEBUG: Feature[DebuggerFeature] = Feature("debug")
COLLECTIVES: Feature[CollectivesFeature] = Feature("collectives")


class Features:
    """The features of one process by name, which is the first word of their engine verbs."""

    def __init__(self, loaders: Mapping[str, Callable[[], object]]) -> None:
        """A loader returns the feature of this process, which handles its verbs from then on."""
        self._loaders = loaders
        self._loaded: dict[str, object] = {}
        self._lock = threading.RLock()

    def get(self, feature: Feature[T]) -> T:
        """Returns a feature; loads it if necessary."""
        return cast("T", self._get(feature.name))

    def _get(self, name: str) -> object:
        feature = self._loaded.get(name)
        if feature is None:
            with self._lock:
                feature = self._loaded.get(name)
                if feature is None:
                    feature = self._loaded[name] = self._loaders[name]()
        return feature

    def close(self) -> None:
        """Calls `close` of loaded features that have one."""
        for feature in tuple(self._loaded.values()):
            close = getattr(feature, "close", None)
            if close is not None:
                close()

    def loaded(self, feature: Feature[T]) -> T | None:
        """Returns a feature, if it has been loaded."""
        return cast("T | None", self._loaded.get(feature.name))

    def load_for(self, header: Header, parcel: "Parcel", take: Callable[[Header, "Parcel"], None]) -> bool:
        """Handles a message with an unknown verb: True if it is a feature's, which is loaded and gets it."""
        name = header.method.partition(".")[0]
        if name not in self._loaders or name in self._loaded:
            return False

        def load() -> None:
            try:
                self._get(name)
            except Exception:
                logger.exception("%s could not be loaded", name)
                self._loaded.setdefault(name, None)
            take(header, parcel)

        threading.Thread(target=load, name="monarch-feature", daemon=True).start()
        return True
