"""Arguments and results are snapshots between processes, small ones and those that go through memory files."""

from typing import Any

import numpy as np
import pytest

from monarch_nb.actor import Actor, Channel, Port, ProcMesh, endpoint

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("faults")]


class Keeper(Actor):
    @endpoint
    def hold(self, port: Port[Port[None]]) -> None:
        mine, receiver = Channel[None].open()
        port.send(mine)
        receiver.recv().get(60)

    @endpoint
    def keep(self, value: Any) -> None:
        self.value = value

    @endpoint
    def fill(self, x: int) -> None:
        self.value[:] = x

    @endpoint
    def give(self) -> Any:
        return self.value


@pytest.mark.parametrize("nbytes", [1 << 10, 8 << 20])
def test_caller_and_receivers_may_write_to_what_was_sent(own_procs: ProcMesh, nbytes: int) -> None:
    keepers: Any = own_procs.spawn("keepers", Keeper)
    port, receiver = Channel[Port[None]].open()
    busy = keepers.slice(gpus=0).hold.call_one(port)  # so that the argument is not looked at before it is changed here
    value = np.zeros(nbytes, np.uint8)
    kept = keepers.keep.call(value)
    value[:] = 7
    receiver.recv().get(60).send(None)
    busy.get(60)
    kept.get(60)
    keepers.slice(gpus=1).fill.call_one(1).get(60)
    given = keepers.give.call()
    keepers.fill.call(3).get(60)
    results = given.get(60).values()
    assert [int(result.sum()) for result in results] == [0, nbytes]
    results[0][:] = 9
    assert [int(result[-1]) for result in keepers.give.call().get(60).values()] == [3, 3]
