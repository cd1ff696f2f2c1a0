"""Random programs of values of ranks' own come to what NumPy makes of them, rank by rank; also where ranks fail."""

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce

import numpy as np
import pytest
import torch

import monarch_nb
from monarch_nb.actor import ProcMesh, this_host
from monarch_nb.distributed import RankTensorError, TensorError
from tests.effort import tries

pytestmark = pytest.mark.timeout(900)
HOSTS, GPUS = 2, 2
POINTS = [(host, gpu) for host in range(HOSTS) for gpu in range(GPUS)]
KINDS = {"sum": np.add, "product": np.multiply, "min": np.minimum, "max": np.maximum}
PROGRAMS, SEED = 15, 14


@pytest.fixture(scope="module")
def procs() -> Iterator[ProcMesh]:
    made = this_host().spawn_procs({"hosts": HOSTS, "gpus": GPUS}, name="four")
    yield made
    made.stop().get(30)


@dataclass
class Value:
    """A tensor, what each rank should have of it, and the ranks on which it is lost."""

    tensor: monarch_nb.Tensor
    ranks: list[np.ndarray]
    lost: frozenset[int] = frozenset()

    def made(self, tensor: monarch_nb.Tensor, ranks: list[np.ndarray], *others: "Value") -> "Value":
        """A result of this and others."""
        return Value(tensor, ranks, self.lost.union(*(other.lost for other in others)))


@dataclass
class Loan:
    """A value that a stream has borrowed, what it makes of it, where that is lost, and whether it may write to it."""

    value: Value
    borrow: monarch_nb.distributed.Borrow
    made: monarch_nb.Tensor
    ranks: list[np.ndarray]
    lost: frozenset[int]
    mutable: bool


@monarch_nb.remote(propagate=lambda x, rank, bad: x.clone())
def halved(x: torch.Tensor, rank: torch.Tensor, bad: int) -> torch.Tensor:
    if rank == bad:
        raise ValueError(f"not on rank {bad}")
    return x / 2


@monarch_nb.remote(propagate="inspect")
def nap(late: int, seconds: float) -> None:
    if torch.distributed.get_rank() == late:
        time.sleep(seconds)


class Program:
    """A program of random steps, and its model."""

    def __init__(self, procs: ProcMesh, seed: int) -> None:
        self.draw = random.Random(seed)
        self.procs = procs
        with procs.activate() as self.mesh:
            start = torch.arange(4.0).reshape(2, 2)
            rank = self.mesh.rank_tensor(("hosts", "gpus"))
        local = np.arange(4, dtype=np.float32).reshape(2, 2)
        self.values = [Value(start + rank, [local + at for at in range(4)])]
        self.rank = rank
        self.streams = [monarch_nb.Stream(f"stream {at}") for at in range(3)]
        self.loans: list[Loan] = []
        self.steps: list[str] = []

    def run(self, steps: int) -> None:
        """Runs so many steps."""
        for _ in range(steps):
            step = self.draw.choice(
                [
                    *(self.unary, self.binary, self.write, self.reduce, self.reduce, self.move, self.fail),
                    *(self.call, self.lend, self.lend, self.give_back, self.nap, self.overwrite),
                ]
            )
            self.steps.append(step.__name__)
            step()

    def nap(self) -> None:
        """Now and then a rank is late, in what the active stream does."""
        if self.draw.random() < 0.5:
            with self.procs.activate():
                nap(self.draw.randrange(4), self.draw.random() * 0.02)

    def any(self) -> Value:
        """Some value so far."""
        return self.draw.choice(self.values)

    def unary(self) -> None:
        """An operation on one tensor."""
        one = self.any()
        number = self.draw.choice([0.5, -1.0, 0.25])
        with monarch_nb.no_mesh.activate():
            result = (one.tensor * number).t().clamp(-8, 8)
        self.values.append(one.made(result, [np.clip((each * number).T, -8, 8) for each in one.ranks]))

    def binary(self) -> None:
        """An operation on two tensors, in an active mesh or not."""
        one, other = self.any(), self.any()
        if self.draw.random() < 0.5:
            with self.procs.activate():
                result = torch.tanh(one.tensor @ other.tensor)
        else:
            result = torch.tanh(one.tensor @ other.tensor)
        ranks = [np.tanh(a @ b) for a, b in zip(one.ranks, other.ranks, strict=True)]
        self.values.append(one.made(result, ranks, other))

    def write(self) -> None:
        """A write through a view; the memory is that of a copy, which no other value shows."""
        one, other = self.any(), self.any()
        target, ranks = one.tensor.clone(), [each.copy() for each in one.ranks]
        row = self.draw.randrange(2)
        target[row] += other.tensor[1 - row]
        target[:, 0] = 2.0
        for mine, theirs in zip(ranks, other.ranks, strict=True):
            mine[row] += theirs[1 - row]
            mine[:, 0] = 2
        self.values.append(one.made(target, ranks, other))

    def overwrite(self) -> None:
        """A write in place, which is refused while another stream reads the memory."""
        one = self.any()
        if any(loan.value.tensor is one.tensor for loan in self.loans):
            with pytest.raises(RankTensorError, match="MUTATING_BORROW"):
                one.tensor.mul_(0.5)
            return
        one.tensor.mul_(0.5)
        one.ranks = [each * 0.5 for each in one.ranks]

    def reduce(self) -> None:
        """A reduction, gather or scatter along some dimensions."""
        one = self.any()
        dims = self.draw.choice([("gpus",), ("hosts",), ("hosts", "gpus")])
        kind = self.draw.choice([*KINDS, "avg", "stack"] if len(dims) == 1 else list(KINDS))
        scatter = len(dims) == 1 and self.draw.random() < 0.4
        into = not scatter and kind != "stack" and self.draw.random() < 0.3
        given = one.tensor.clone() if into else one.tensor
        result = given.reduce_(dims, kind) if into else given.reduce(dims, kind, scatter=scatter)
        found = []
        for point in POINTS:
            group = [
                at
                for at, other in enumerate(POINTS)
                if ("hosts" in dims or other[0] == point[0]) and ("gpus" in dims or other[1] == point[1])
            ]
            mine = point[0 if dims == ("hosts",) else 1]
            together = [one.ranks[at] for at in group]
            if kind == "stack":
                whole = np.stack(together)
            elif kind == "avg":
                whole = sum(together) / len(together)
            else:
                whole = reduce(KINDS[kind], together)
            found.append((whole[:, mine] if kind == "stack" else whole[mine]) if scatter else whole)
        if found[0].shape != (2, 2):  # all values of a program have one shape
            result = result.sum(0) if kind == "stack" else torch.stack([result, result])
            found = [each.sum(0) if kind == "stack" else np.stack([each, each]) for each in found]
        self.values.append(Value(result, found, frozenset(range(4)) if one.lost else one.lost))

    def move(self) -> None:
        """A way through meshes of parts of the processes, and back."""
        one = self.any()
        source, over = self.draw.randrange(2), self.draw.randrange(2)
        part = self.procs.slice(hosts=over)
        there = one.tensor.slice_mesh(hosts=source).to_mesh(part)
        back = (there + 1).to_mesh(self.procs)
        sources = [source * GPUS + gpu for _, gpu in POINTS]
        lost = frozenset(at for at, rank in enumerate(sources) if rank in one.lost)
        self.values.append(Value(back, [one.ranks[rank] + 1 for rank in sources], lost))

    def fail(self) -> None:
        """An operation that fails on one rank."""
        if self.draw.random() < 0.7:
            return
        one = self.any()
        bad = self.draw.randrange(4)
        index = (self.rank == bad).long() * 9
        result = one.tensor.index_select(0, torch.stack([index, index]))
        self.values.append(Value(result, [np.stack([each[0], each[0]]) for each in one.ranks], one.lost | {bad}))

    def call(self) -> None:
        """A function that runs on each rank, and that may fail on one."""
        one = self.any()
        bad = self.draw.randrange(4) if self.draw.random() < 0.2 else -1
        lost = one.lost | ({bad} if bad >= 0 else set())
        self.values.append(Value(halved(one.tensor, self.rank, bad), [each / 2 for each in one.ranks], lost))

    def lend(self) -> None:
        """What another stream does with a tensor, which it may write to; a loan that lasts for some steps."""
        one, stream, mutable = self.any(), self.draw.choice(self.streams), self.draw.random() < 0.5
        ranks = [each.copy() for each in one.ranks]
        lent = one.made(one.tensor.clone() if mutable else one.tensor, ranks)
        borrowed, borrow = stream.borrow(lent.tensor, mutable=mutable)
        with stream.activate():
            self.nap()
            if self.draw.random() < 0.2:
                bad = self.draw.randrange(4)
                failed = halved(borrowed, self.mesh.rank_tensor(("hosts", "gpus")), bad)
                if mutable:
                    borrowed.add_(failed * 0)
                    lent.lost |= {bad}
            if mutable and self.draw.random() < 0.5:
                borrowed.reduce_("gpus", "max")
                found = [np.maximum(*(ranks[2 * host + at] for at in range(2))) for host, _ in POINTS]
                lent.ranks = ranks = found
                lent.lost = frozenset(range(4)) if lent.lost else lent.lost
            elif mutable:
                borrowed.mul_(0.5)
                lent.ranks = ranks = [each / 2 for each in ranks]
            made, ranks, lost = borrowed.t() + 1, [each.T + 1 for each in ranks], lent.lost
            if self.draw.random() < 0.5:
                self.nap()
                made, ranks = made.reduce(("hosts", "gpus"), "min"), [reduce(np.minimum, ranks)] * 4
                lost = frozenset(range(4)) if lost else lost
        self.loans.append(Loan(lent, borrow, made, ranks, lost, mutable))

    def give_back(self) -> None:
        """The end of a loan, after which the first stream has what the other one made."""
        if not self.loans:
            return
        loan = self.loans.pop(self.draw.randrange(len(self.loans)))
        loan.borrow.drop()
        made, borrow = monarch_nb.get_active_stream().borrow(loan.made)
        with borrow:
            self.values.append(Value(made * 1, loan.ranks, loan.lost))
        if loan.mutable:
            self.values.append(loan.value)

    def judge(self) -> None:
        """Compares all values on all ranks."""
        while self.loans:
            self.give_back()
        asked = [
            [monarch_nb.fetch_shard(value.tensor, hosts=host, gpus=gpu) for host, gpu in POINTS]
            for value in self.values
        ]
        for value, futures in zip(self.values, asked, strict=True):
            for future, wanted in zip(futures, value.ranks, strict=True):
                if value.lost:
                    with pytest.raises(TensorError, match=r"(index_select\.default|halved) failed on rank"):
                        future.get(20)
                else:
                    np.testing.assert_allclose(future.get(20).numpy(), wanted, rtol=1e-4, atol=1e-5)


def test_random_programs_come_to_what_numpy_makes_of_them(procs: ProcMesh) -> None:
    for seed in range(SEED, SEED + tries(PROGRAMS)):
        program = Program(procs, seed)
        try:
            program.run(14)
            program.judge()
        except BaseException as error:
            error.add_note(f"program {seed}: {' '.join(program.steps)}")
            raise
