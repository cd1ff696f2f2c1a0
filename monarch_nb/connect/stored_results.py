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
    """Not all ranks' results of a call are available; the text says which, and why."""


class Result:
    """The result of one call on some or all ranks of the mesh."""

    def __init__(self, runtime: Runtime, state: MeshState, kept: "Sequence[tuple[str, StoredResult]]") -> None:
        self._runtime, self._state = runtime, state
        self._stored = {one.index: (address, one) for address, one in sorted(kept, key=lambda each: each[1].index)}
        first = kept[0][1]
        self.call = first.call
        self.endpoint = first.endpoint.lstrip("@!")
        self.ranks = tuple(one.rank for _, one in self._stored.values())
        self.at = max(one.at for _, one in kept)  # wall clock, when the last of these ranks finished
        self.size = sum(one.size for _, one in kept)  # bytes
        self._extent = None if first.extent is None else Extent(*first.extent)
        self._asked = len(self._stored) if self._extent is None else self._extent.nelements  # number of ranks called
        self._bodies: dict[int, list[bytes]] = {}

    @property
    def ok(self) -> bool:
        """Whether all called ranks have returned without an error, and their results are available."""
        return not (self._errors or self._lacks())

    @property
    def _errors(self) -> dict[int, StoredResult]:
        return {place: one for place, (_, one) in self._stored.items() if one.error}

    @property
    def _dropped(self) -> dict[int, StoredResult]:
        return {place: one for place, (_, one) in self._stored.items() if not (one.stored or one.error)}

    @property
    def _missing(self) -> list[int]:
        return [place for place in range(self._asked) if place not in self._stored]

    def get(self) -> Any:
        """Returns what the future of the call would have given: a ValueMesh of `call`, one value of `call_one`. Blocks.

        Raises ActorError for what was raised, as the future would have, and ResultLostError if results are missing.
        """
        raised = {place: RankError(self._frames(place), None) for place, one in self._errors.items() if one.stored}
        if raised:
            ranks = [self._stored[place][1].rank if place in self._stored else -1 for place in range(self._asked)]
            title = f"{self._state.name}.{self.endpoint}"
            raise actor_error(self._runtime, title, in_order(raised), self._asked, (), RankNames(self._state, ranks))
        if self._lacks():
            raise ResultLostError(f"{self._title} is not complete: {self._lacks()}; .values() has what there is")
        if self._extent is None or not self._extent.labels:
            return self._value(next(iter(self._stored)))
        return ValueMesh(self._extent, [self._value(place) for place in range(self._asked)])

    def values(self) -> dict[int, Any]:
        """Returns the available results by rank, an exception for a rank that has raised. Blocks."""
        found = {}
        for place, (_, one) in self._stored.items():
            if one.stored:
                error = RankError(self._frames(place), None) if one.error else None
                found[one.rank] = self._value(place) if error is None else error.exception(self._runtime)
        return found

    def _frames(self, place: int) -> list[bytes]:
        if place not in self._bodies:
            address, one = self._stored[place]
            body = request(self._runtime, address, RESULT, WantedResult(one.number)).get(_BODY_S)
            if body.frames is None:
                raise ResultLostError(
                    f"{self._title}: the answer of {self._where([place])} has made event for later ones; "
                    "kept_results_size says how much is kept"
                )
            self._bodies[place] = list(body.frames)
        return self._bodies[place]

    def _value(self, place: int) -> Any:
        first, *others = self._frames(place)
        return decode([first, *map(bytearray, others)], self._runtime)

    @property
    def _title(self) -> str:
        return f"{self._state.name}.{self.endpoint}()"

    def _where(self, places: Sequence[int]) -> str:
        ranks = [self._stored[place][1].rank for place in places]
        return places_of(self._state.region, ranks) or "its rank"

    def _lacks(self) -> str:
        lacks = []
        if self._missing:
            here = self._where(list(self._stored))
            lacks.append(f"{len(self._stored)} of {counted(self._asked, 'rank')} ({here}) ended while nobody was there")
        for place, one in self._errors.items():
            if not one.stored:
                lacks.append(f"{self._where([place])}: {one.error}, of which no more is kept")
        if self._dropped:
            size = size_text(sum(one.size for one in self._dropped.values()))
            lacks.append(f"what {self._where(list(self._dropped))} answered ({size}) was more than kept_results_size")
        return "; ".join(lacks)

    def __repr__(self) -> str:
        text = f"{clock(self.at)} {self._title} on {self._where(list(self._stored))}"
        if raised := self._errors:
            some = f" on {self._where(list(raised))}" if len(raised) < len(self._stored) else ""
            text += f": raised {', '.join(dict.fromkeys(one.error for one in raised.values()))}{some}"
        elif not self._dropped:
            text += f": {size_text(self.size)}"
        lacks = self._lacks()
        return f"{text}; {lacks}" if lacks else text


class Results(Sequence[Result]):
    """Stored results of one mesh of processes, and of the actors on it, the oldest first."""

    def __init__(self, runtime: Runtime, name: str, found: Sequence[Result]) -> None:
        self._runtime, self._name, self._found = runtime, name, list(found)

    @overload
    def __getitem__(self, place: int) -> Result: ...
    @overload
    def __getitem__(self, place: slice) -> "Results": ...
    def __getitem__(self, place: int | slice) -> "Result | Results":
        if isinstance(place, slice):
            return Results(self._runtime, self._name, self._found[place])
        return self._found[place]

    def __len__(self) -> int:
        return len(self._found)

    def forget(self) -> None:
        """Deletes these results in the processes that store them. Blocks until they have agreed."""
        numbers: dict[str, list[int]] = {}
        for result in self._found:
            for address, one in result._stored.values():
                numbers.setdefault(address, []).append(one.number)
        asked = [request(self._runtime, address, RESULTS, WantedResults((), tuple(mine)))
                 for address, mine in numbers.items()]  # fmt: skip
        for answer in asked:
            answer.get(_ANSWER_S)
        self._found.clear()

    def __repr__(self) -> str:
        if not self._found:
            return f"no call of {self._name} has ended while nobody was there"
        lines = [f"[{place}] {result!r}" for place, result in enumerate(self._found)]
        return "\n".join([f"calls of {self._name} that ended while nobody was there, for .get():", *lines])


def results(mesh: "Handle[Any] | str") -> Results:
    """Returns what calls on a detached mesh have returned, or raised, while it had no controller.

    For a mesh of processes, or its name, it has the results of all actors on it. Each has `endpoint`, `ranks`, `at`,
    and `get()`, which returns what the future of that call would have. Calls that were under way when the mesh was
    attached are included once they have ended. Each process stores `kept_results_size` bytes of results, the newest.
    Blocks; lost ranks have none. Raises LookupError for a name that no mesh here has.
    """
    runtime = current_runtime()
    state = _named(runtime, mesh) if isinstance(mesh, str) else state_of(mesh)
    procs = proc_state_of(state)
    wanted = {state.uid: state} if isinstance(state, ActorState) else {procs.uid: procs, **procs.actors}
    addresses = [procs.address(rank) for rank in state.ranks]
    body = WantedResults(tuple(wanted))
    asked = {address: request(runtime, address, RESULTS, body) for address in addresses}
    calls: dict[tuple[str, str, int], list[tuple[str, StoredResult]]] = {}
    for address, answer in asked.items():
        try:
            found = answer.get(_ANSWER_S).results
        except (RuntimeError, TimeoutError):  # ended or stopped
            continue
        for one in found:
            alone = one.index if one.extent is None else -1  # sent to each rank by itself
            calls.setdefault((one.mesh, one.call, alone), []).append((address, one))
    every = [Result(runtime, wanted[uid], kept) for (uid, _, _), kept in calls.items()]
    return Results(runtime, state.name, sorted(every, key=lambda result: result.at))


def _named(runtime: Runtime, name: str) -> MeshState:
    for state in reversed(tuple(runtime.meshes.values())):
        if state.name == name and state.stopped is None and state.owner_process == runtime.address:
            return state
    raise LookupError(f"there is no mesh {name!r} here: attach it first, monarch.attach({name!r})")
