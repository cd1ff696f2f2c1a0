"""Lines of processes as people see them: which are shown, how long they are gathered, and equal ones once."""

import logging
import re
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import Struct

from monarch_nb.logs.receiver import Written
from monarch_nb.runtime import Future, MeshState, ProcState, Runtime, runtime
from monarch_nb.settings import settings
from monarch_nb.shape import NDSlice, Region, places
from monarch_nb.wire import Display

if TYPE_CHECKING:
    from monarch_nb.mesh.proc import ProcMesh


class Line(NamedTuple):
    """One line that a process wrote."""

    address: str
    text: str
    stream: str = "stdout"
    call: str = ""
    display: Display | None = None


logger = logging.getLogger(__name__)


class LogOption(Struct):
    """What `ProcMesh.logging_option` has set for a mesh."""

    stream: bool | None = None  # None: as usual where this process runs
    window: float | None = None  # seconds
    level: int = 0
    dedup: bool | None = None  # None: as the setting log_dedup says


class LogOptions:
    """Those of the meshes that this process has spawned."""

    def __init__(self, engine: Runtime) -> None:
        self._engine = engine
        self._by_uid: dict[str, LogOption] = {}
        self._ends: weakref.WeakKeyDictionary[Future[None], Future[None]] = weakref.WeakKeyDictionary()
        self.flush: Callable[[], None] = lambda: None  # shows what was written before the replies and ends known here
        engine.keeper.on_event.append(self._happened)

    def of(self, address: str) -> LogOption | None:
        """What is set for the mesh of a process."""
        return self._by_uid.get(mesh_of(address)) if self._by_uid else None

    def merge(self, uid: str, wanted: bool | None) -> None:
        """Whether equal lines of several ranks of a mesh are shown once; None is as the setting log_dedup says."""
        if wanted is None and uid not in self._by_uid:
            return
        self._by_uid.setdefault(uid, LogOption()).dedup = wanted

    def merges(self, address: str) -> bool:
        """The same of the mesh of a process."""
        option = self.of(address)
        wanted = option.dedup if option is not None else None
        return bool(settings.get("log_dedup")) if wanted is None else wanted

    def set(self, mesh: "ProcMesh", option: LogOption) -> None:
        """Sets it for a whole mesh; the level on the processes of this slice. Blocks until they have it."""
        self.flush()  # what came before is shown as it was set before
        known = self._by_uid.get(mesh._state.uid)
        if known is not None:
            option.dedup = known.dedup
        self._by_uid[mesh._state.uid] = option
        mesh.run(set_level, option.level).get()

    def flushed(self, stopped: Future[None]) -> Future[None]:
        """The end of a mesh, once its last words are shown."""
        known = self._ends.get(stopped)  # a second stop gives the first one's future
        if known is not None:
            return known
        whole: Future[None] = Future._make(story=stopped.story)
        self._ends[stopped] = whole

        def show() -> None:
            try:
                self.flush()
            except Exception:  # who shows it has gone
                logger.debug("output could not be shown", exc_info=True)
            error = stopped.exception(0)
            whole._set(None) if error is None else whole._fail(error)

        # Not on the reading thread, which is to bring what is waited for.
        stopped._on_done(lambda _: threading.Thread(target=show, name="monarch-last-words", daemon=True).start())
        return whole

    def _happened(self, kind: str, about: Any) -> None:
        if kind == "healed" and isinstance(about[0], ProcState):
            from monarch_nb.mesh.proc import ProcMesh

            state, lives = about
            option = self._by_uid.get(state.uid)
            for rank, _ in lives if option is not None and option.level else ():
                ProcMesh(state, Region((), NDSlice(rank, (), ()))).run(set_level, option.level)  # type: ignore[union-attr]


def set_level(level: int) -> None:
    """In a process: records of `logging` from this level on are written."""
    root = logging.getLogger()
    if not root.handlers:
        logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    root.setLevel(level)
    for handler in root.handlers:  # loggers with a level of their own, such as those of actors, do not ask the root's
        handler.setLevel(level)


def options() -> LogOptions:
    """Those of this process."""
    keeper = runtime().keeper
    if keeper.log_options is None:
        keeper.log_options = LogOptions(runtime())
    found: LogOptions = keeper.log_options
    return found


class Gathered:
    """Lines on their way: those of meshes with a window are held until it is over. Any thread may put."""

    def __init__(self, engine: Runtime) -> None:
        self._engine = engine
        self._new: deque[Line] = deque()
        self._held: dict[str, tuple[float, list[Line]]] = {}  # by mesh: when they are due

    def put(self, written: Iterable[Written]) -> None:
        """More of them. Does not block."""
        for one in written:
            self._new.extend(lines_of(one))

    def take(self, *, all_of_it: bool = False) -> tuple[list[Line], list[Line]]:
        """What is to be shown now: lines one by one, and lines of windows that are over. One thread at a time."""
        options: LogOptions | None = self._engine.keeper.log_options
        now = time.monotonic()
        single: list[Line] = []
        while self._new:
            line = self._new.popleft()
            option = options.of(line.address) if options is not None else None
            if option is None or (option.stream is not False and not option.window):
                single.append(line)
            elif option.stream is not False and option.window:
                uid = mesh_of(line.address)
                self._held.setdefault(uid, (now + option.window, []))[1].append(line)
        due = [uid for uid, (at, _) in self._held.items() if all_of_it or at <= now]
        return single, [line for uid in due for line in self._held.pop(uid)[1]]

    def wait(self) -> float | None:
        """Seconds until the next window is over; None when nothing is held."""
        held = tuple(self._held.values())
        return max(0.0, min(at for at, _ in held) - time.monotonic()) if held else None


# -- text --------------------------------------------------------------------------------------------------------------


class Source(NamedTuple):
    """Which rank of which mesh a process is."""

    uid: str
    name: str
    labels: tuple[str, ...]
    point: tuple[int, ...]
    sizes: tuple[int, ...] = ()


def mesh_of(address: str) -> str:
    """The uid of the mesh that a process belongs to."""
    return address.partition("/")[2].rsplit(".", 2)[0]


def lines_of(written: Written) -> list[Line]:
    """One by one."""
    address, stream, call, _, _, text, display = written
    if display is not None:
        return [Line(address, text.removesuffix("\n"), stream, call, display)]
    return [Line(address, line, stream, call) for line in text.removesuffix("\n").split("\n")] if text else []


_ACTOR = re.compile(r"\[actor=<root>(?:\.<[^<>]*>)*\.<\S+ ([^<>{}]+)(?:\{[^{}]*\})?>\] ")


def briefly(written: Written) -> Written:
    """Records of `logging` with the name of their actor alone: its rank stands before the line, and equal ones meet."""
    if not written.level or "[actor=" not in written.text:
        return written
    return written._replace(text=_ACTOR.sub(r"[\1] ", written.text))


def source_of(engine: Runtime, address: str) -> Source:
    """Where a line comes from."""
    uid, rank, _ = address.partition("/")[2].rsplit(".", 2)
    state: MeshState | None = engine.meshes.get(uid)
    if state is None:
        return Source(uid, uid, ("rank",), (int(rank),))
    point = state.region.point_of_base_rank(int(rank))
    return Source(uid, state.name, tuple(point.labels), tuple(point.values()), tuple(point.extent.sizes))


def prefix(sources: Sequence[Source], *, named: bool) -> str:
    """`[workers gpus=0-3] `, or without the mesh's name."""
    first = sources[0]
    where = places(first.labels, (source.point for source in sources), first.sizes)
    both = " ".join(filter(None, (first.name if named else "", where)))
    return f"[{both}] " if both else ""


def merged(engine: Runtime, lines: Iterable[Line], *, named: bool, prefixed: bool = True) -> list[str]:
    """Equal lines once, with the ranks they come from, and how often if some rank wrote them more than once."""
    groups: dict[tuple[str, str], list[Source]] = {}
    for line in lines:
        if line.display is not None and not line.text:
            continue
        source = source_of(engine, line.address)
        groups.setdefault((source.uid, line.text), []).append(source)
    return [
        f"{prefix(found, named=named) if prefixed else ''}{line}{_times(found)}\n"
        for (_, line), found in groups.items()
    ]


def _times(sources: Sequence[Source]) -> str:
    return f" ({len(sources)} times)" if len(set(sources)) < len(sources) else ""
