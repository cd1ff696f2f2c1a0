"""Results of calls that ended while their mesh had no controller, stored by the processes that made them."""

from collections.abc import Sequence
from typing import Any, overload

from monarch_nb.host.mesh_files import clock
from monarch_nb.mesh.handle import Handle, state_of
from monarch_nb.mesh.requests import request
from monarch_nb.mesh.value import ValueMesh
from monarch_nb.mesh.verbs import RESULT, RESULTS, StoredResult, WantedResult, WantedResults
from monarch_nb.runtime import ActorState, MeshState, Runtime, current_runtime, proc_state_of
from monarch_nb.runtime.actors.rank_errors import RankError, RankNames, actor_error, in_order
from monarch_nb.shape import Extent, places_of
from monarch_nb.wire import counted, decode, size_text

_ANSWER_S = 10.0
_BODY_S = 600.0  # for one rank's answer, however large


class ResultLostError(RuntimeError):
    """Not all ranks' results of a call are available; the text names the missing ones and the reasons."""


class Result:
    """The result of one call on some or all ranks of the mesh."""

    def __init__(self, runtime: Runtime, state: MeshState, answers: "Sequence[tuple[str, StoredResult]]") -> None:
        self._runtime, self._state = runtime, state
        self._stored = {pair[1].index: pair for pair in sorted(answers, key=lambda pair: pair[1].index)}
        first = answers[0][1]
        self.call = first.call
        self.endpoint = first.endpoint.lstrip("@!")
        self.ranks = tuple(answer.rank for _, answer in self._stored.values())
        self.at = max(answer.at for _, answer in answers)  # wall clock, when the last of these ranks finished
        self.size = sum(answer.size for _, answer in answers)  # bytes
        self._extent = None if first.extent is None else Extent(*first.extent)
        self._count = len(self._stored) if self._extent is None else self._extent.nelements  # number of ranks called
        self._bodies: dict[int, list[bytes]] = {}

    @property
    def ok(self) -> bool:
        """True if all called ranks have returned without an error, and their results are available."""
        return not (self._errors or self._gaps())

    @property
    def _errors(self) -> dict[int, StoredResult]:
        return {index: answer for index, (_, answer) in self._stored.items() if answer.error}

    @property
    def _dropped(self) -> dict[int, StoredResult]:
        return {index: answer for index, (_, answer) in self._stored.items() if not (answer.stored or answer.error)}

    @property
    def _missing(self) -> list[int]:
        return [index for index in range(self._count) if index not in self._stored]

    def get(self) -> Any:
        """Returns the value of the call's future: a ValueMesh for `call`, one value for `call_one`. Blocks.

        Raises ActorError for a rank's error, as the future would have, and ResultLostError if results are missing.
        """
        raised = {
            index: RankError(self._frames(index), None) for index, answer in self._errors.items() if answer.stored
        }
        if raised:
            ranks = [self._stored[index][1].rank if index in self._stored else -1 for index in range(self._count)]
            title = f"{self._state.name}.{self.endpoint}"
            raise actor_error(self._runtime, title, in_order(raised), self._count, (), RankNames(self._state, ranks))
        if self._gaps():
            raise ResultLostError(f"{self._title} is not complete: {self._gaps()}; .values() has what there is")
        if self._extent is None or not self._extent.labels:
            return self._value(next(iter(self._stored)))
        return ValueMesh(self._extent, [self._value(index) for index in range(self._count)])

    def values(self) -> dict[int, Any]:
        """Returns the available results by rank, an exception for a rank that has raised. Blocks."""
        values = {}
        for index, (_, answer) in self._stored.items():
            if answer.stored:
                error = RankError(self._frames(index), None) if answer.error else None
                values[answer.rank] = self._value(index) if error is None else error.exception(self._runtime)
        return values

    def _frames(self, index: int) -> list[bytes]:
        if index not in self._bodies:
            address, answer = self._stored[index]
            body = request(self._runtime, address, RESULT, WantedResult(answer.number)).get(_BODY_S)
            if body.frames is None:
                raise ResultLostError(
                    f"{self._title}: the answer of {self._label([index])} has made room for later ones; "
                    "kept_results_size says how much is kept"
                )
            self._bodies[index] = list(body.frames)
        return self._bodies[index]

    def _value(self, index: int) -> Any:
        first, *buffers = self._frames(index)
        return decode([first, *map(bytearray, buffers)], self._runtime)

    @property
    def _title(self) -> str:
        return f"{self._state.name}.{self.endpoint}()"

    def _label(self, indices: Sequence[int]) -> str:
        ranks = [self._stored[index][1].rank for index in indices]
        return places_of(self._state.region, ranks) or "its rank"

    def _gaps(self) -> str:
        gaps = []
        if self._missing:
            ranks = self._label(list(self._stored))
            gaps.append(f"{len(self._stored)} of {counted(self._count, 'rank')} ({ranks}) ended while nobody was there")
        for index, answer in self._errors.items():
            if not answer.stored:
                gaps.append(f"{self._label([index])}: {answer.error}, of which no more is kept")
        if self._dropped:
            size = size_text(sum(answer.size for answer in self._dropped.values()))
            gaps.append(f"what {self._label(list(self._dropped))} answered ({size}) was more than kept_results_size")
        return "; ".join(gaps)

    def __repr__(self) -> str:
        text = f"{clock(self.at)} {self._title} on {self._label(list(self._stored))}"
        if raised := self._errors:
            suffix = f" on {self._label(list(raised))}" if len(raised) < len(self._stored) else ""
            text += f": raised {', '.join(dict.fromkeys(answer.error for answer in raised.values()))}{suffix}"
        elif not self._dropped:
            text += f": {size_text(self.size)}"
        gaps = self._gaps()
        return f"{text}; {gaps}" if gaps else text


class Results(Sequence[Result]):
    """Stored results of one mesh of processes, and of the actors on it, the oldest first."""

    def __init__(self, runtime: Runtime, name: str, results: Sequence[Result]) -> None:
        self._runtime, self._name, self._results = runtime, name, list(results)

    @overload
    def __getitem__(self, index: int) -> Result: ...
    @overload
    def __getitem__(self, index: slice) -> "Results": ...
    def __getitem__(self, index: int | slice) -> "Result | Results":
        if isinstance(index, slice):
            return Results(self._runtime, self._name, self._results[index])
        return self._results[index]

    def __len__(self) -> int:
        return len(self._results)

    def forget(self) -> None:
        """Deletes these results in the processes that store them. Blocks until they have agreed."""
        numbers: dict[str, list[int]] = {}
        for result in self._results:
            for address, answer in result._stored.values():
                numbers.setdefault(address, []).append(answer.number)
        requests = [request(self._runtime, address, RESULTS, WantedResults((), tuple(ids)))
                 for address, ids in numbers.items()]  # fmt: skip
        for reply in requests:
            reply.get(_ANSWER_S)
        self._results.clear()

    def __repr__(self) -> str:
        if not self._results:
            return f"no call of {self._name} has ended while nobody was there"
        lines = [f"[{index}] {result!r}" for index, result in enumerate(self._results)]
        return "\n".join([f"calls of {self._name} that ended while nobody was there, for .get():", *lines])


def results(mesh: "Handle[Any] | str") -> Results:
    """Returns the results, or errors, of calls on a detached mesh that have ended while it had no controller.

    For a mesh of processes, or its name, it has the results of all actors on it. Each has `endpoint`, `ranks`, `at`,
    and `get()`, which returns the value of that call's future. Calls that were under way when the mesh was attached are
    included once they have ended. Each process stores `kept_results_size` bytes of results, the newest.
    Blocks; lost ranks have none. Raises LookupError for a name that no mesh here has.
    """
    runtime = current_runtime()
    state = _named(runtime, mesh) if isinstance(mesh, str) else state_of(mesh)
    procs = proc_state_of(state)
    meshes = {state.uid: state} if isinstance(state, ActorState) else {procs.uid: procs, **procs.actors}
    addresses = [procs.address(rank) for rank in state.ranks]
    body = WantedResults(tuple(meshes))
    requests = {address: request(runtime, address, RESULTS, body) for address in addresses}
    calls: dict[tuple[str, str, int], list[tuple[str, StoredResult]]] = {}
    for address, reply in requests.items():
        try:
            answers = reply.get(_ANSWER_S).results
        except (RuntimeError, TimeoutError):  # ended or stopped
            continue
        for answer in answers:
            index = answer.index if answer.extent is None else -1  # sent to each rank separately
            calls.setdefault((answer.mesh, answer.call, index), []).append((address, answer))
    entries = [Result(runtime, meshes[uid], group) for (uid, _, _), group in calls.items()]
    return Results(runtime, state.name, sorted(entries, key=lambda result: result.at))


def _named(runtime: Runtime, name: str) -> MeshState:
    for state in reversed(tuple(runtime.meshes.values())):
        if state.name == name and state.stopped is None and state.owner_process == runtime.address:
            return state
    raise LookupError(f"there is no mesh {name!r} here: attach it first, monarch.attach({name!r})")
