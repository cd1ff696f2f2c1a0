"""Random programs of values of ranks' own give NumPy's results, rank by rank; also after failures of ranks."""

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
    mesh = this_host().spawn_procs({"hosts": HOSTS, "gpus": GPUS}, name="four")
    yield mesh
    mesh.stop().get(30)


@dataclass
class Value:
    """A tensor, its expected value on each rank, and the ranks on which it is lost."""

    tensor: monarch_nb.Tensor
    ranks: list[np.ndarray]
    lost: frozenset[int] = frozenset()

    def derive(self, tensor: monarch_nb.Tensor, ranks: list[np.ndarray], *operands: "Value") -> "Value":
        """A result of this and other values."""
        return Value(tensor, ranks, self.lost.union(*(operand.lost for operand in operands)))


@dataclass
class Loan:
    """A value that a stream has borrowed, the result there, the ranks that lost it, and whether it is writable."""

    value: Value
    borrow: monarch_nb.distributed.Borrow
    result: monarch_nb.Tensor
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
        self.values = [Value(start + rank, [local + number for number in range(4)])]
        self.rank = rank
        self.streams = [monarch_nb.Stream(f"stream {number}") for number in range(3)]
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
        value = self.any()
        number = self.draw.choice([0.5, -1.0, 0.25])
        with monarch_nb.no_mesh.activate():
            result = (value.tensor * number).t().clamp(-8, 8)
        self.values.append(value.derive(result, [np.clip((array * number).T, -8, 8) for array in value.ranks]))

    def binary(self) -> None:
        """An operation on two tensors, in an active mesh or not."""
        value, second = self.any(), self.any()
        if self.draw.random() < 0.5:
            with self.procs.activate():
                result = torch.tanh(value.tensor @ second.tensor)
        else:
            result = torch.tanh(value.tensor @ second.tensor)
        ranks = [np.tanh(a @ b) for a, b in zip(value.ranks, second.ranks, strict=True)]
        self.values.append(value.derive(result, ranks, second))

    def write(self) -> None:
        """A write through a view; the memory is that of a copy, which no other value shows."""
        value, second = self.any(), self.any()
        target, ranks = value.tensor.clone(), [array.copy() for array in value.ranks]
        row = self.draw.randrange(2)
        target[row] += second.tensor[1 - row]
        target[:, 0] = 2.0
        for target_array, source_array in zip(ranks, second.ranks, strict=True):
            target_array[row] += source_array[1 - row]
            target_array[:, 0] = 2
        self.values.append(value.derive(target, ranks, second))

    def overwrite(self) -> None:
        """A write in place, which is refused while another stream reads the memory."""
        value = self.any()
        if any(loan.value.tensor is value.tensor for loan in self.loans):
            with pytest.raises(RankTensorError, match="MUTATING_BORROW"):
                value.tensor.mul_(0.5)
            return
        value.tensor.mul_(0.5)
        value.ranks = [array * 0.5 for array in value.ranks]

    def reduce(self) -> None:
        """A reduction, gather or scatter along some dimensions."""
        value = self.any()
        dims = self.draw.choice([("gpus",), ("hosts",), ("hosts", "gpus")])
        kind = self.draw.choice([*KINDS, "avg", "stack"] if len(dims) == 1 else list(KINDS))
        scatter = len(dims) == 1 and self.draw.random() < 0.4
        into = not scatter and kind != "stack" and self.draw.random() < 0.3
        tensor = value.tensor.clone() if into else value.tensor
        result = tensor.reduce_(dims, kind) if into else tensor.reduce(dims, kind, scatter=scatter)
        expected = []
        for point in POINTS:
            group = [
                rank
                for rank, member in enumerate(POINTS)
                if ("hosts" in dims or member[0] == point[0]) and ("gpus" in dims or member[1] == point[1])
            ]
            position = point[0 if dims == ("hosts",) else 1]
            parts = [value.ranks[rank] for rank in group]
            if kind == "stack":
                combined = np.stack(parts)
            elif kind == "avg":
                combined = sum(parts) / len(parts)
            else:
                combined = reduce(KINDS[kind], parts)
            expected.append((combined[:, position] if kind == "stack" else combined[position]) if scatter else combined)
        if expected[0].shape != (2, 2):  # all values of a program have one shape
            result = result.sum(0) if kind == "stack" else torch.stack([result, result])
            expected = [array.sum(0) if kind == "stack" else np.stack([array, array]) for array in expected]
        self.values.append(Value(result, expected, frozenset(range(4)) if value.lost else value.lost))

    def move(self) -> None:
        """A way through meshes of parts of the processes, and back."""
        value = self.any()
        source, over = self.draw.randrange(2), self.draw.randrange(2)
        part = self.procs.slice(hosts=over)
        moved = value.tensor.slice_mesh(hosts=source).to_mesh(part)
        back = (moved + 1).to_mesh(self.procs)
        sources = [source * GPUS + gpu for _, gpu in POINTS]
        lost = frozenset(index for index, rank in enumerate(sources) if rank in value.lost)
        self.values.append(Value(back, [value.ranks[rank] + 1 for rank in sources], lost))

    def fail(self) -> None:
        """An operation that fails on one rank."""
        if self.draw.random() < 0.7:
            return
        value = self.any()
        bad = self.draw.randrange(4)
        index = (self.rank == bad).long() * 9
        result = value.tensor.index_select(0, torch.stack([index, index]))
        self.values.append(Value(result, [np.stack([array[0], array[0]]) for array in value.ranks], value.lost | {bad}))

    def call(self) -> None:
        """A function that runs on each rank, and that may fail on one."""
        value = self.any()
        bad = self.draw.randrange(4) if self.draw.random() < 0.2 else -1
        lost = value.lost | ({bad} if bad >= 0 else set())
        self.values.append(Value(halved(value.tensor, self.rank, bad), [array / 2 for array in value.ranks], lost))

    def lend(self) -> None:
        """Operations of another stream on a tensor, which it may write to; a loan that lasts for some steps."""
        value, stream, mutable = self.any(), self.draw.choice(self.streams), self.draw.random() < 0.5
        ranks = [array.copy() for array in value.ranks]
        lent = value.derive(value.tensor.clone() if mutable else value.tensor, ranks)
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
                maxima = [np.maximum(*(ranks[2 * host + gpu] for gpu in range(2))) for host, _ in POINTS]
                lent.ranks = ranks = maxima
                lent.lost = frozenset(range(4)) if lent.lost else lent.lost
            elif mutable:
                borrowed.mul_(0.5)
                lent.ranks = ranks = [array / 2 for array in ranks]
            result, ranks, lost = borrowed.t() + 1, [array.T + 1 for array in ranks], lent.lost
            if self.draw.random() < 0.5:
                self.nap()
                result, ranks = result.reduce(("hosts", "gpus"), "min"), [reduce(np.minimum, ranks)] * 4
                lost = frozenset(range(4)) if lost else lost
        self.loans.append(Loan(lent, borrow, result, ranks, lost, mutable))

    def give_back(self) -> None:
        """The end of a loan, after which the first stream has the result of the other."""
        if not self.loans:
            return
        loan = self.loans.pop(self.draw.randrange(len(self.loans)))
        loan.borrow.drop()
        result, borrow = monarch_nb.get_active_stream().borrow(loan.result)
        with borrow:
            self.values.append(Value(result * 1, loan.ranks, loan.lost))
        if loan.mutable:
            self.values.append(loan.value)

    def judge(self) -> None:
        """Compares all values on all ranks."""
        while self.loans:
            self.give_back()
        requests = [
            [monarch_nb.fetch_shard(value.tensor, hosts=host, gpus=gpu) for host, gpu in POINTS]
            for value in self.values
        ]
        for value, futures in zip(self.values, requests, strict=True):
            for future, expected in zip(futures, value.ranks, strict=True):
                if value.lost:
                    with pytest.raises(TensorError, match=r"(index_select\.default|halved) failed on rank"):
                        future.get(20)
                else:
                    np.testing.assert_allclose(future.get(20).numpy(), expected, rtol=1e-4, atol=1e-5)


def test_random_programs_come_to_what_numpy_makes_of_them(procs: ProcMesh) -> None:
    for seed in range(SEED, SEED + tries(PROGRAMS)):
        program = Program(procs, seed)
        try:
            program.run(14)
            program.judge()
        except BaseException as error:
            error.add_note(f"program {seed}: {' '.join(program.steps)}")
            raise
