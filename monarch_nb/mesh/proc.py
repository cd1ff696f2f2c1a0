"""Proc meshes: references to arrays of processes; the active ones, and callbacks for new ones."""

import itertools
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, Self, TypeVar, cast, overload

from monarch_nb._deferred import asyncio
from monarch_nb.mesh.actor import ActorMesh
from monarch_nb.mesh.console import Console, console_of
from monarch_nb.mesh.handle import Handle, form_of, operations
from monarch_nb.mesh.host_record import GROW_S
from monarch_nb.mesh.registry import MeshRegistry, ProcForm, proc_form, proc_record
from monarch_nb.mesh.value import ValueMesh
from monarch_nb.runtime import Coro, Future, ProcState, Runtime, fail_future, pending_future, resolved_future, started
from monarch_nb.shape import NDSlice, Region
from monarch_nb.wire import Layout, host_name, parse_address, text_table

if TYPE_CHECKING:
    from monarch_nb.mesh.host import HostMesh
    from monarch_nb.mesh.host_record import Resized

logger = logging.getLogger(__name__)
P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A")


class ProcMesh(Handle[ProcState]):
    """A reference to a mesh of processes, or a slice of one."""

    @property
    def name(self) -> str:
        """The name it was spawned with."""
        return self._state.name

    def spawn(self, name: str, Class: type[A], *args: object, **kwargs: object) -> A:  # noqa: N803 - as programs write it
        """Spawns one `Class(*args, **kwargs)` on each proc, as an ActorMesh. Does not block.

        Raises ValueError for a class that is no Actor or mixes sync and async, TypeError for arguments that do not fit.
        """
        if self._state.detached:
            raise RuntimeError(self._state.end_text)
        if self._state.stopped is not None:
            raise RuntimeError(
                f"`ProcMesh` has already been stopped: {self._state.name} ({self._state.stopped}); spawn a new one"
            )
        return cast(A, operations().spawn_actors(self, name, Class, args, kwargs))

    def put(self, value: object) -> Any:
        """Stores a value that many calls share: `monarch.rdma.put`. Send the result, and call `get()` on it there."""
        return operations().put(value)

    @property
    def initialized(self) -> Future[Literal[True]]:
        """Resolves when all processes run and their set-up is done; fails with SupervisionError otherwise."""
        spawn_spec = self._state.spawn_spec
        if self._state.stopped is not None:
            future: Future[Literal[True]] = pending_future()
            fail_future(future, RuntimeError(f"`ProcMesh` has already been stopped: {self._state.name}"))
            return future
        return (
            cast("Future[Literal[True]]", spawn_spec.initialized) if spawn_spec is not None else resolved_future(True)
        )

    @property
    def region(self) -> Region:
        """The labels, sizes and ranks of the processes."""
        return self._region

    @property
    def _proc_mesh(self) -> object:
        return operations().shared(self, self.initialized)  # torchmonarch's programs look there

    @property
    def host_mesh(self) -> "HostMesh":
        """The hosts of a mesh of one process. Raises NotImplementedError for larger ones."""
        if len(self) != 1:
            raise NotImplementedError("host_mesh: only for a ProcMesh of one process; slice it first")
        return operations().host_mesh(self._state.layout.host_of(self._region.ndslice.get(0)))

    def stop(self, reason: str = "stopped by client") -> Future[None]:
        """Stops the processes after their actors' clean-up; that is no failure.

        Resolves when all have ended, and their output is shown; for an actor on them, at once.
        """
        return operations().stop(self._state, reason, self._region)

    @property
    def preempted(self) -> dict[str, float | None]:
        """Its hosts that are about to be ended, and the seconds that each has left; None where that is unknown.

        Does not block: for a loop that saves in time. Only processes that use the mesh know it.
        """
        return operations().preempted({self._state.layout.host_of(rank) for rank in self._region.ranks()})

    def grow(self, *, timeout: float = GROW_S, **more: "int | Sequence[str] | HostMesh") -> "Resized":
        """Extends the mesh to more hosts: `procs.grow(hosts=2)` takes free ones of its host mesh, then asks their job.

        Processes are started there, and the actors of each mesh that spans the whole of this one are created with the
        arguments they were spawned with; `__healed__` notifies survivors. Then this mesh and these meshes of actors,
        wherever they are referenced, have the new places too, behind the others; slices mean the ranks they meant
        before. `hosts=` may also be a HostMesh to grow onto, or names: ids of free hosts, machines of an SSHJob, nodes
        of a SlurmJob. Blocks. Raises NoMoreHostsError if hosts have not arrived within `timeout` seconds, HealError if
        something does not start there: then nothing has changed.
        """
        return operations().grow_procs(self, more, timeout)

    def shrink(self, **fewer: "int | Sequence[int | str]") -> "Resized":
        """Removes hosts from the mesh: `procs.shrink(hosts=-1)` the last one, `hosts=[1]` that one, or by their ids.

        Calls from then on go to the remaining ranks, and places are numbered anew; earlier calls are finished first,
        with the actors' clean-up. A slice that has lost ranks raises SupervisionError where it is used. Hosts that this
        program no longer uses are returned to their job. Blocks until then. Raises ValueError if none would stay.
        """
        return operations().shrink_procs(self, fewer)

    def detach(self, lease: str | float = "1h") -> None:
        """Detaches these processes with all on them: they live on without this program for `lease`, such as "2h".

        `monarch.attach(name)` attaches them again, from here or from another program. Blocks until their hosts
        supervise them; calls under way end with an error here, and go on there. Raises DetachError, and the mesh is as
        before.
        """
        if len(self) != len(self._state.region):
            raise ValueError(f"{self._state.name}: only a whole mesh can be detached, not a slice")
        operations().detach(self._state, lease)

    @overload
    def run(self, function: Callable[P, Coro[R]], *args: P.args, **kwargs: P.kwargs) -> Future[ValueMesh[R]]: ...
    @overload
    def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[ValueMesh[R]]: ...
    def run(self, function: Callable[..., object], *args: object, **kwargs: object) -> Future[ValueMesh[Any]]:
        """Runs `function(*args, **kwargs)` on the main thread of each process; the future gives a ValueMesh."""
        return cast("Future[ValueMesh[Any]]", self._console.run.call(function, args, kwargs))

    async def logging_option(
        self, stream_to_client: bool | None = None, aggregate_window_sec: float | None = None, level: int = logging.INFO
    ) -> None:
        """Sets how the output of these processes is shown here: not at all, or each line with the rank of its origin.

        Without `stream_to_client` it stays as usual: in a notebook shown in the cells, in a script written on arrival.
        Lines of `aggregate_window_sec` seconds are gathered, and equal ones shown once; 0 gathers none, as None does.
        `level` is the lowest level of `logging` records that are written in the processes, healed ones too.
        Raises RuntimeError for a window without streaming, ValueError for a negative one and for a level outside of 0
        to 255.
        """
        if aggregate_window_sec is not None and not stream_to_client:
            raise RuntimeError(
                "logging_option: aggregate_window_sec needs stream_to_client=True, else nothing is shown"
            )
        if isinstance(aggregate_window_sec, bool) or not isinstance(aggregate_window_sec, int | float | None):
            raise TypeError(f"logging_option: aggregate_window_sec={aggregate_window_sec!r} is no number of seconds")
        if aggregate_window_sec is not None and not aggregate_window_sec >= 0:
            raise ValueError(
                f"logging_option: aggregate_window_sec={aggregate_window_sec!r} must be 0 or more, or None"
            )
        if isinstance(level, bool) or not isinstance(level, int) or not 0 <= level <= 255:
            raise ValueError(f"logging_option: level={level!r} must be a whole number from 0 to 255")
        await asyncio.to_thread(operations().show_output, self, stream_to_client, aggregate_window_sec or None, level)

    def to_table(self) -> str:
        """Returns a table of text: for each place of the mesh the host, and the number of its process there."""
        return _proc_table(self._state.layout, self._region)

    def logs(self, grep: str | None = None, **selection: object) -> Any:
        """Returns the last lines of these processes: see `monarch_nb.logs.logs_of` for `level`, `since`, `last`…"""
        return operations().logs(self)(grep, **selection)

    @property
    def metrics(self) -> Any:
        """The values that actors on these processes logged by `monarch.telemetry.log`, by name, with steps."""
        return operations().metrics(self)

    def activate(self) -> AbstractContextManager[Any]:
        """Makes all functions that create tensors create them on each of these processes, in a `with` block.

        `torch.rand(3)` there draws in each process, and returns a `monarch.Tensor`. The context manager's value is the
        `monarch.distributed.Mesh` of these processes. The first use blocks until they are ready.
        """
        return cast("AbstractContextManager[Any]", operations().tensor_mesh(self).activate())

    def rank_tensor(self, dims: str | Sequence[str]) -> Any:
        """Returns a `monarch.Tensor` with each process's coordinate along a dimension; row-major index for several.

        Raises KeyError for an unknown dimension.
        """
        return operations().tensor_mesh(self).rank_tensor(dims)

    def rank_tensors(self) -> dict[str, Any]:
        """Returns the `rank_tensor` of each dimension, by name."""
        return cast("dict[str, Any]", operations().tensor_mesh(self).rank_tensors())

    @property
    def _console(self) -> ActorMesh[Console]:
        return console_of(self._state, self._region)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._state.stopped is None:
            await self.stop()

    async def sync_workspace(self, workspace: object, conda: bool = False, auto_reload: bool = False) -> None:
        """Raises NotImplementedError: workspaces belong to hosts."""
        raise NotImplementedError("processes share their host's files: use HostMesh.sync_workspace")

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuilt, (proc_form(self._state), form_of(self))

    def __repr__(self) -> str:
        return f"<ProcMesh {self._shown()}>"


def _rebuilt(form: ProcForm, region: Region | None) -> ProcMesh:
    state = proc_record(form)
    return ProcMesh(state, state.region if region is None else region)


def _proc_table(layout: Layout, region: Region) -> str:
    """Formats the host and local number of each process: the last dimension to the right, the others down."""
    cells = [f"{host_name(layout.host_of(rank))}[{rank % layout.per_host}]" for rank in region.ranks()]
    if not region.labels:
        return cells[0]
    *down, right = region.labels
    *sizes, width = region.ndslice.sizes
    points = itertools.product(*(range(size) for size in sizes))
    rows = [[*map(str, point), *cells[index * width : (index + 1) * width]] for index, point in enumerate(points)]
    return text_table([[*down, *(f"{right}={column}" for column in range(width))], *rows])


class ThisProc:
    """Handles to the process itself."""

    def __init__(self, runtime: Runtime, registry: MeshRegistry) -> None:
        self._runtime, self._registry = runtime, registry

    def proc_mesh(self) -> ProcMesh:
        """Returns the mesh this process belongs to."""
        state = self._registry.started_in
        return ProcMesh(state, state.region) if state is not None else self.this_proc()

    def this_proc(self) -> ProcMesh:
        """Returns this process, as a ProcMesh of one."""
        runtime = self._runtime
        uid, rank, _ = parse_address(runtime.address).place
        region = Region((), NDSlice(rank, (), ()))
        if self._registry.started_in is not None:
            return ProcMesh(self._registry.started_in, region)
        state = runtime.meshes.get(uid)
        if not isinstance(state, ProcState):
            layout = Layout(uid, (runtime.host,), 1)
            state = ProcState(uid, "this_proc", region, runtime.address, layout=layout)
            self._registry.own(runtime.root, state)
        return ProcMesh(state, state.region)


Callback = Callable[[ProcMesh], object]
_callbacks: list[Callback] = []


def register_proc_mesh_spawn_callback(callback: Callback) -> None:
    """Calls `callback(proc_mesh)` whenever this process has spawned a mesh, before the caller gets it."""
    _callbacks.append(callback)


def unregister_proc_mesh_spawn_callback(callback: Callback) -> None:
    """Unregisters a callback. Raises ValueError if it is not registered."""
    _callbacks.remove(callback)


def announce(mesh: ProcMesh) -> None:
    """Runs the callbacks; logs errors in them, since the processes exist all the same."""
    for callback in tuple(_callbacks):
        try:
            callback(mesh)
        except Exception:
            logger.exception("a spawn callback failed on %r", mesh)


def get_active_proc_meshes() -> list[ProcMesh]:
    """Returns the proc meshes that this process has spawned and not stopped, referenced or not."""
    runtime = started()
    states = tuple(runtime.meshes.values()) if runtime is not None else ()
    return [
        ProcMesh(state, state.region)
        for state in states
        if isinstance(state, ProcState) and state.spawn_spec is not None and state.stopped is None
    ]
