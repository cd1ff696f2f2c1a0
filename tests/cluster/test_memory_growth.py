"""Memory that grows on real ranks, and the line that allocates it."""

import pytest
import torch

from monarch_nb.actor import Actor, endpoint, this_host
from monarch_nb.diagnosis import MemoryWatch, compare_memory
from tests.cluster.actor_tools import SECONDS, line_of

pytestmark = pytest.mark.timeout(180)


class Trainer(Actor):
    """Trains, and keeps more than it needs if it is asked to."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.net = torch.nn.Linear(64, 64)
        self.optimizer = torch.optim.AdamW(self.net.parameters())
        self.losses: list[torch.Tensor] = []
        self.texts: list[list[str]] = []

    @endpoint
    def step(self, keeps: str, number: int) -> None:
        for _ in range(number):
            loss = self.net(torch.randn(512, 64)).square().mean()
            loss.backward(retain_graph=True)
            self.optimizer.step()
            self.optimizer.zero_grad()
            if keeps == "graph":
                self.losses.append(loss)
            elif keeps == "objects":
                self.texts.append([str(each) * 9 for each in range(600)])

    @endpoint
    def hold(self, size: int) -> None:
        self.held = torch.ones(size)


@pytest.mark.parametrize(
    ("keeps", "line", "held"), [("graph", "randn(512, 64)", "tensors"), ("objects", "str(each) * 9", "objects")]
)
def test_the_line_that_allocates_what_stays_is_found(keeps: str, line: str, held: str) -> None:
    procs = this_host().spawn_procs(per_host={"gpus": 2}, name="trainers")
    trainers = procs.spawn("trainers", Trainer)
    trainers.step.call("", 2).get(SECONDS)
    with MemoryWatch(trainers) as found:
        trainers.slice(gpus=1).step.call(keeps, 60).get(SECONDS)
    (finding,) = found.diagnosis.findings
    assert (finding.kind, finding.ranks, finding.mesh, finding.sure) == ("memory", (1,), "trainers", True)
    assert finding.source.endswith(line_of(__file__, line))
    assert held in finding.text
    with MemoryWatch(trainers) as found:
        trainers.step.call("", 20).get(SECONDS)
    assert found.diagnosis.findings == (), found
    procs.stop().get(SECONDS)


def test_a_rank_that_uses_much_more_is_named_while_it_runs() -> None:
    procs = this_host().spawn_procs(per_host={"gpus": 3}, name="trainers")
    trainers = procs.spawn("trainers", Trainer)
    trainers.hold.call(10).get(SECONDS)
    trainers.slice(gpus=2).hold.call(200_000_000).get(SECONDS)
    (finding,) = compare_memory(trainers).findings
    assert (finding.kind, finding.ranks, finding.sure) == ("memory", (2,), False)
    assert "1 tensor float32 [200000000] take" in finding.text
    procs.stop().get(SECONDS)
