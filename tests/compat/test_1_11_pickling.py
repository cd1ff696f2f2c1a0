"""Section 1.11: pickling.

Elsewhere: code (tests/unit/test_wire_code.py), tensors (test_wire_tensors.py), errors (test_wire_errors.py),
references (tests/cluster/test_actor_references.py), copies (test_actor_values.py), scripts (test_actor_main.py).
"""

import linecache
from typing import Any

import pytest

from monarch.actor import Actor, ActorError, Channel, Extent, Point, ProcMesh, ValueMesh, endpoint, this_host

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("faults")]


class CannotGo:
    def __getstate__(self) -> Any:
        raise RuntimeError("stays here")


class CannotArrive:
    def __getstate__(self) -> Any:
        return {"x": 1}

    def __setstate__(self, state: Any) -> None:
        raise RuntimeError("not welcome")


class Taker(Actor):
    @endpoint
    async def take(self, value: Any) -> Any:
        return value

    @endpoint
    async def kind(self, value: Any) -> str:
        return f"{type(value).__name__} {len(value)}"

    @endpoint
    async def apply(self, function: Any, *args: Any) -> Any:
        return function(*args)

    @endpoint
    async def source(self, function: Any) -> Any:
        return linecache.getline(function.__code__.co_filename, function.__code__.co_firstlineno)


@pytest.fixture(scope="module")
def taker(quad: ProcMesh) -> Any:
    return quad.slice(gpus=0).spawn("taker", Taker)


def test_what_cannot_be_pickled_is_told_at_the_call(taker: Any) -> None:
    with pytest.raises(Exception, match="stays here") as caught:
        taker.take.call_one(CannotGo())
    assert not isinstance(caught.value, ActorError)


def test_what_cannot_be_unpickled_is_told_by_the_actor(taker: Any) -> None:
    future = taker.take.call_one(CannotArrive())
    with pytest.raises(ActorError, match="not welcome"):
        future.get(20)
    assert taker.take.call_one(1).get(20) == 1


def test_meshes_are_sent_before_they_are_there(taker: Any) -> None:
    procs = this_host().spawn_procs(per_host={"gpus": 2}, name="pending")
    actors = procs.spawn("actors", Taker)
    sent = [taker.kind.call_one(mesh) for mesh in (procs, actors)]
    assert [future.get(30) for future in sent] == ["ProcMesh 2", "ActorMesh 2"]
    procs.stop().get(20)


def test_values_points_and_ports_travel(taker: Any) -> None:
    values = ValueMesh(Extent(["x"], [2]), [1, 2])
    assert taker.take.call_one(values).get(20).item(x=1) == 2
    point = Point(1, Extent(["x"], [2]))
    assert taker.take.call_one(point).get(20) == point
    port, receiver = Channel[int].open()
    taker.take.call_one(port).get(20).send(5)
    assert receiver.recv().get(20) == 5


def test_functions_and_classes_of_a_cell_travel_with_their_source(taker: Any) -> None:
    source = "FACTOR = 2\ndef scale(x):\n    return FACTOR * x\n"
    name = "<a cell of compat>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, name, "exec"), scope)
    assert taker.apply.call_one(scope["scale"], 4).get(20) == 8
    scope["FACTOR"] = 3
    assert taker.apply.call_one(scope["scale"], 4).get(20) == 12
    assert taker.source.call_one(scope["scale"]).get(20) == "def scale(x):\n"
    assert taker.apply.call_one(lambda x: x + 1, 1).get(20) == 2
