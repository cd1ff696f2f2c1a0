"""Bad input is refused at the earliest place, in words that help, and harms nobody."""

import pickle
import threading
from typing import Any

import pytest

from monarch_nb.actor import Actor, ActorError, HostMesh, ProcMesh, SupervisionError, endpoint, this_host
from tests.cluster.fault_tools import SOON, Worker

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("faults")]


@pytest.fixture
def host() -> HostMesh:
    return this_host()


@pytest.fixture
def duo(own_procs: ProcMesh) -> ProcMesh:
    return own_procs


@pytest.fixture
def workers(duo: ProcMesh) -> Any:
    return duo.spawn("workers", Worker)


class Loose:
    """Pickles well and cannot be made again."""

    def __reduce__(self) -> Any:
        return _refuse, ("to be unpickled",)


def _refuse(what: str) -> None:
    raise ArithmeticError(f"refused {what}")


class Odd(Actor):
    @endpoint
    def lock(self) -> Any:
        return {"a": [threading.Lock()]}

    @endpoint
    def loose(self) -> Any:
        return Loose()

    @endpoint
    def takes(self, x: Any) -> str:
        return "taken"


class Mixed(Actor):
    @endpoint
    def plain(self) -> None: ...

    @endpoint
    async def awaited(self) -> None: ...


class Clash(Actor):
    @endpoint
    def slice(self) -> None: ...


def test_slicing_an_unknown_dimension_is_refused(workers: Any) -> None:
    with pytest.raises(TypeError, match="hosts") as caught:
        workers.slice(hosts=0)
    assert "gpus" in str(caught.value)  # what there is


@pytest.mark.parametrize("what", [2, -3, slice(2, 2), slice(5, 9)])
def test_an_empty_or_out_of_range_slice(workers: Any, what: Any) -> None:
    with pytest.raises((IndexError, ValueError), match="gpus"):
        workers.slice(gpus=what)


def test_an_uneven_split_is_refused(workers: Any) -> None:
    with pytest.raises(ValueError, match="gpus"):
        workers.split(gpus=("node", "local"), local=3)


@pytest.mark.parametrize("per_host", [{"gpus": 0}, {"gpus": -1}, {"gpus": 1.5}, {"gpus": True}, {"gpus": "two"}])
def test_sizes_that_are_none(host: Any, per_host: Any) -> None:
    with pytest.raises(ValueError, match=r"gpus=.* must be a whole number"):
        host.spawn_procs(per_host=per_host)


def test_dimensions_of_the_hosts_are_not_given_twice(host: Any) -> None:
    from monarch_nb.mesh.host import HostMesh, host_labels

    several = HostMesh("several", [host.host_ids[0]] * 2, host_labels(["a", "b"]))
    with pytest.raises(ValueError, match="hosts is a dimension of the hosts already") as caught:
        several.spawn_procs(per_host={"hosts": 2})
    assert "rename" in str(caught.value)


def test_an_endpoint_may_not_hide_what_meshes_can_do(duo: ProcMesh) -> None:
    with pytest.raises(ValueError, match=r"collides with an endpoint name: Clash\.slice"):
        duo.spawn("clash", Clash)


def test_endpoints_are_all_sync_or_all_async(duo: ProcMesh) -> None:
    with pytest.raises(ValueError, match="Mixed mixes both async and sync endpoints: awaited are async, plain are not"):
        duo.spawn("mixed", Mixed)


def test_spawning_a_class_that_is_no_actor_is_refused(duo: ProcMesh) -> None:
    with pytest.raises(ValueError, match="must be a class derived from"):
        duo.spawn("thread", threading.Thread)


def test_wrong_arguments_are_told_at_the_call(workers: Any, duo: ProcMesh) -> None:
    for adverb in (workers.echo.call, workers.slice(gpus=0).echo.call_one, workers.echo.broadcast, workers.echo.stream):
        with pytest.raises(TypeError, match=r"workers\.echo\(.*value"):
            adverb()
    with pytest.raises(TypeError, match="Worker"):
        duo.spawn("wrong", Worker, 1, 2, 3)
    with pytest.raises(ValueError, match="call_one requires exactly 1 actor, but mesh has 2"):
        workers.pid.call_one()


def test_an_argument_that_cannot_be_sent(workers: Any, duo: ProcMesh) -> None:
    for adverb in (workers.echo.call, workers.echo.broadcast):
        with pytest.raises(TypeError, match=r"argument `value` of workers\.echo") as caught:
            adverb({"a": [threading.Lock()]})
        assert "lock" in str(caught.value)
    with pytest.raises(TypeError, match="argument `value` of Worker"):
        duo.spawn("unsendable", Worker, threading.Lock())
    assert workers.echo.call(1).get(SOON).values() == [1, 1]


def test_a_result_that_cannot_be_sent(duo: ProcMesh) -> None:
    odd = duo.spawn("odd", Odd)
    with pytest.raises(ActorError, match=r"the `result` of odd\.lock") as caught:
        odd.lock.call().get(SOON)
    assert "lock" in str(caught.value)
    assert odd.takes.call(1).get(SOON).values() == ["taken", "taken"]  # the actor lives


def test_a_result_that_cannot_be_made_again(duo: ProcMesh) -> None:
    odd = duo.spawn("odd", Odd)
    with pytest.raises(Exception, match=r"refused to be unpickled") as caught:
        odd.slice(gpus=0).loose.call_one().get(SOON)
    assert "result of odd.loose" in str(caught.value)
    mesh = odd.loose.call().get(SOON)  # each value is made when somebody looks at it
    with pytest.raises(Exception, match="refused to be unpickled"):
        mesh.values()
    assert odd.takes.call(1).get(SOON).values() == ["taken", "taken"]


def test_an_argument_that_cannot_be_made_again(duo: ProcMesh) -> None:
    odd = duo.spawn("odd", Odd)
    with pytest.raises(ActorError, match="refused to be unpickled") as caught:
        odd.takes.call(Loose()).get(SOON)
    assert "odd.takes" in str(caught.value)
    assert odd.takes.call(1).get(SOON).values() == ["taken", "taken"]
    with pytest.raises(ArithmeticError):
        pickle.loads(pickle.dumps(Loose()))


def test_a_call_on_a_stopped_mesh(host: Any) -> None:
    procs = host.spawn_procs(per_host={"gpus": 2}, name="gone")
    first, second = procs.spawn("first", Worker), procs.spawn("second", Worker)
    first.stop().get(SOON)
    for use in (first.echo.call(1).get, first.slice(gpus=0).echo.call_one(1).get):
        with pytest.raises(SupervisionError, match="first has status: stopped") as caught:
            use()
        assert "spawn a new one" in str(caught.value)
    with pytest.raises(SupervisionError, match="first has status: stopped"):
        first.echo.broadcast(1)
    assert second.echo.call(1).get(SOON).values() == [1, 1]
    procs.stop().get(SOON)
    with pytest.raises(SupervisionError, match="proc mesh shutdown"):
        second.echo.call(1).get(SOON)
    with pytest.raises(RuntimeError, match=r"gone .* spawn a new one"):
        procs.spawn("third", Worker)
