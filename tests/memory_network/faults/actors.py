"""Actors for tests of a simulated network, and the adverbs: ways to call, with their answers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from monarch_nb.actor import (
    Accumulator,
    Actor,
    Channel,
    Future,
    Port,
    RankedPortReceiver,
    current_rank,
    endpoint,
    heal_mesh,
    send,
)
from monarch_nb.runtime import current_runtime
from monarch_nb.testing import Cluster

SOON = 10.0  # real seconds; nothing here takes as long
LEASE = 60.0  # simulated seconds for which a host may be silent


class Worker(Actor):
    """Records its items; rests for simulated seconds."""

    def __init__(self) -> None:
        self.done: list[Any] = []

    @endpoint
    def do(self, item: Any) -> tuple[int, Any]:
        self.done.append(item)
        return current_rank().rank, item

    @endpoint
    def rest(self, item: Any, seconds: float) -> tuple[int, Any]:
        """Records the item, and answers after that time."""
        self.done.append(item)
        key, receiver = Channel[None].open()
        current_runtime().later(seconds, lambda: key.send(None))
        receiver.recv().get()
        return current_rank().rank, item

    @endpoint
    def history(self) -> list[Any]:
        return self.done

    @endpoint
    def fail(self, text: str) -> None:
        raise ValueError(text)

    @endpoint
    def echo(self, value: Any) -> Any:
        return value

    @endpoint
    def ask(self, mesh: Any, item: Any) -> list[Any]:
        return list(mesh.do.call(item).get().values())

    @endpoint
    def ask_through(self, helper: Any, mesh: Any, item: Any) -> list[Any]:
        """Has another actor call the mesh."""
        return list(helper.ask.call_one(mesh, item).get())

    @endpoint
    def tell(self, mesh: Any, items: list[Any]) -> None:
        """Sends all items without waiting."""
        for item in items:
            mesh.do.broadcast(item)

    @endpoint
    def fill(self, port: Port[Any], items: list[Any]) -> None:
        for item in items:
            port.send(item)

    @endpoint
    def heal(self, mesh: Any) -> bool:
        return heal_mesh(mesh) is mesh


class AsyncWorker(Actor):
    """The same on an event loop, with the endpoints that tests need."""

    def __init__(self) -> None:
        self.done: list[Any] = []

    @endpoint
    async def do(self, item: Any) -> tuple[int, Any]:
        self.done.append(item)
        return current_rank().rank, item

    @endpoint
    async def rest(self, item: Any, seconds: float) -> tuple[int, Any]:
        self.done.append(item)
        key, receiver = Channel[None].open()
        current_runtime().later(seconds, lambda: key.send(None))
        await receiver.recv()
        return current_rank().rank, item

    @endpoint
    async def history(self) -> list[Any]:
        return self.done


Answers = list[tuple[int, Any]]  # rank and value of each


class Pending:
    """A running call with any adverb."""

    def __init__(self, futures: list[Future[Any]], unpack: Callable[[list[Any]], Answers]) -> None:
        self.futures = futures
        self._unpack = unpack

    @property
    def done(self) -> bool:
        return all(future.done() for future in self.futures)

    def answers(self, cluster: Cluster, within: float = LEASE) -> Answers:
        """Answers in the order of ranks; lets time pass for them. Raises the first error."""
        return sorted(self._unpack([cluster.result(future, within) for future in self.futures]))

    def errors(self, cluster: Cluster, within: float = LEASE) -> list[BaseException]:
        return [error for future in self.futures if (error := outcome(cluster, future, within)) is not None]

    def errors_now(self) -> list[BaseException]:
        """Errors that exist without time passing."""
        return [error for future in self.futures if (error := future.exception(SOON)) is not None]


def outcome(cluster: Cluster, future: Future[Any], within: float = LEASE) -> BaseException | None:
    """The error of a future, or None."""
    try:
        cluster.result(future, within)
    except Exception as error:
        return error
    return None


def _call(endpoint: Any, *args: Any) -> Pending:
    return Pending([endpoint.call(*args)], lambda results: list(results[0].values()))


def _stream(endpoint: Any, *args: Any) -> Pending:
    return Pending(list(endpoint.stream(*args)), list)


def _accumulate(endpoint: Any, *args: Any) -> Pending:
    folded = Accumulator(endpoint, [], lambda so_far, answer: [*so_far, answer]).accumulate(*args)
    return Pending([folded], lambda results: results[0])


def _choose(endpoint: Any, *args: Any) -> Pending:
    return Pending([endpoint.choose(*args)], list)


def _call_one(endpoint: Any, *args: Any) -> Pending:
    return Pending([endpoint.call_one(*args)], list)


@dataclass(frozen=True)
class Adverb:
    """A way to call an endpoint, on a mesh whose part on host 1 is disturbed."""

    name: str
    begin: Callable[..., Pending]
    part: dict[str, int]  # of hosts x gpus, to which it is applied

    def on(self, mesh: Any) -> Any:
        return mesh.slice(**self.part) if self.part else mesh

    def __call__(self, mesh: Any, method: str, *args: Any) -> Pending:
        return self.begin(getattr(self.on(mesh), method), *args)

    def ranks(self, hosts: int, gpus: int) -> int:
        return 1 if self.name in ("choose", "call_one") else hosts * gpus


ADVERBS = (
    Adverb("call", _call, {}),
    Adverb("stream", _stream, {}),
    Adverb("accumulate", _accumulate, {}),
    Adverb("choose", _choose, {"hosts": 1}),
    Adverb("call_one", _call_one, {"hosts": 1, "gpus": 0}),
)


def workers(cluster: Cluster, gpus: int = 2, cls: Any = Worker, name: str = "workers") -> tuple[Any, Any]:
    """Processes on all hosts, and a worker on each."""
    procs = cluster.hosts().spawn_procs(per_host={"gpus": gpus}, name=f"{name}_procs")
    mesh = procs.spawn(name, cls)
    cluster.result(mesh.initialized)
    return procs, mesh


def send_ranked(endpoint: Any, *args: Any) -> RankedPortReceiver[Any]:
    """Calls all members; the answers come to a port."""
    port, receiver = Channel[Any].open_ranked()
    send(endpoint, args, {}, port)
    return receiver
