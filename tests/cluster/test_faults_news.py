"""The agent's news of deaths may come twice or late: no living process fails."""

from typing import Any

import pytest

from monarch_nb.actor import MeshFailure, SupervisionError, heal_mesh
from monarch_nb.host import protocol as p
from monarch_nb.host.verbs import PROC_EXITED
from monarch_nb.mesh.mesh_events import Event, MeshEvents, ProcExited
from monarch_nb.runtime import current_runtime
from monarch_nb.transport import Parcel
from monarch_nb.wire import Header, Kind, encode_body
from tests.cluster.fault_tools import SOON, kill
from tests.polling import until

pytestmark = pytest.mark.timeout(120)


def tell(address: str, reason: str) -> None:
    runtime = current_runtime()
    exited = p.Exited(address=address, host=runtime.host, pid=1, at=0.0, reason=reason)
    header = Header(Kind.CONTROL, runtime.address, f"{runtime.host}/agent", method=PROC_EXITED.name)
    runtime.node.send(header, Parcel([encode_body(exited)]), lane=1)


@pytest.mark.slow
def test_a_death_told_twice_and_late(workers: Any, shown: list[MeshFailure]) -> None:
    events = current_runtime().part(MeshEvents)
    exits: list[str] = []
    killed = workers._state.procs.address(1)

    def hear(event: Event) -> None:  # not of processes that an earlier test has stopped
        if isinstance(event, ProcExited) and event.address == killed:
            exits.append(event.reason)

    events.listeners.append(hear)
    kill(workers.slice(gpus=1).pid.call_one().get(SOON))
    until(lambda: shown and exits)
    tell(killed, exits[0])
    until(lambda: len(exits) == 2)
    assert len(shown) == 1
    with pytest.raises(SupervisionError):
        workers.rank.call().get(SOON)
    heal_mesh(workers, timeout=SOON)
    tell(killed, exits[0])  # of the old incarnation
    until(lambda: len(exits) == 3)
    assert workers.rank.call().get(SOON).values() == [0, 1]
    assert len(shown) == 1


def test_the_death_of_nobody(workers: Any, shown: list[MeshFailure]) -> None:
    addresses: list[str] = []
    nobodies = ("hx/p1.0.0", "hx/agent", f"{current_runtime().host}/p77.3.9", f"{current_runtime().host}/nonsense")

    def hear(event: Event) -> None:  # not of processes that an earlier test has stopped
        if isinstance(event, ProcExited) and event.address in nobodies:
            addresses.append(event.address)

    current_runtime().part(MeshEvents).listeners.append(hear)
    for address in nobodies:
        tell(address, "never was")
    until(lambda: len(addresses) == 4)
    assert workers.rank.call().get(SOON).values() == [0, 1]
    assert not shown
