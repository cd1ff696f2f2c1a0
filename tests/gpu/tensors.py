"""Sharded tensors on a GPU: one rank with NCCL, and several ranks that share it."""

import contextlib
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import monarch
from monarch.actor import Actor, current_rank, endpoint, this_host
from monarch.distributed import Mesh, load, save
from tests.gpu import DEVICE, NotTried, fact, need_gpu

ANSWER_S = 60.0


@contextlib.contextmanager
def mesh_of(ranks: int, names: tuple[str, ...] = ("data",), shape: tuple[int, ...] | None = None) -> Iterator[Mesh]:
    """A mesh on the device of the report."""
    if DEVICE == "cuda":
        need_gpu()
    sizes = dict(zip(names, shape or (ranks,), strict=True))
    procs = this_host().spawn_procs(per_host=sizes)
    try:
        yield Mesh.of(procs, device=DEVICE)
    finally:
        procs.stop().get(20)


def close(first: torch.Tensor, second: torch.Tensor, tolerance: float = 1e-4) -> None:
    """Asserts that values are equal, up to rounding."""
    first, second = first.detach().cpu().double(), second.detach().cpu().double()
    assert first.shape == second.shape, f"{tuple(first.shape)} and {tuple(second.shape)}"
    assert torch.allclose(first, second, tolerance, tolerance), f"off by {(first - second).abs().max():.3g}"


class _Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 32, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        return self.head(self.norm(x + self.down(functional.gelu(self.up(x)))))  # type: ignore[no-any-return]


def _train(
    place: Callable[[nn.Module], nn.Module], put: Callable[[torch.Tensor], torch.Tensor], make: Callable[[], nn.Module]
) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = place(make())
    words, targets = put(torch.randint(0, 32, (8, 12))), put(torch.randint(0, 32, (8, 12)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
    losses = []
    for _ in range(5):
        loss = functional.cross_entropy(model(words).flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    tensors = [*losses, *(parameter.detach() for parameter in model.parameters())]
    return [tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor for tensor in tensors]


def _reference(connection: Any, make: Callable[[], nn.Module]) -> None:
    tensors = _train(lambda model: model.to(DEVICE), lambda tensor: tensor.to(DEVICE), make)
    connection.send([tensor.cpu().numpy() for tensor in tensors])


def _train_locally(make: Callable[[], nn.Module]) -> list[torch.Tensor]:
    """In a process apart: PyTorch computes no gradients of CUDA tensors beside the device of a mesh."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe()
    process = context.Process(target=_reference, args=(sender, make), daemon=True)
    process.start()
    assert receiver.poll(ANSWER_S), "no local result"
    tensors = [torch.from_numpy(array) for array in receiver.recv()]
    process.join()
    return tensors


def compare(mesh: Mesh, plan: Any = None, rows: str = "data", make: Callable[[], nn.Module] = _Layers) -> str:
    """Trains a module of words on a mesh and on the device alone; asserts that losses and parameters are equal."""
    local = _train_locally(make)
    results = _train(
        lambda model: monarch.module_to_mesh(model, mesh, plan) if plan else monarch.module_to_mesh(model, mesh),
        lambda tensor: monarch.distribute(tensor, mesh, [rows, None]),
        make,
    )
    for expected, actual in zip(local, results, strict=True):
        close(expected, actual)
    assert results[0].device.type == "cpu", "a whole tensor arrives in the notebook on the CPU"
    return f"losses {float(results[0]):.4f} to {float(results[4]):.4f}, all parameters equal to local {DEVICE}"


@fact(limit_s=120)
def one_rank() -> str:
    """A Mesh on one rank, with NCCL: training steps are those of local tensors"""
    with mesh_of(1) as mesh:
        x = torch.randn(8, 8, device=mesh.device)
        devices = {str(shard.device) for shard in mesh.execute(lambda: [torch.ones(1, device=DEVICE)]).values()[0]}
        close((x @ x).full_tensor(), x.full_tensor() @ x.full_tensor(), 1e-2)
        return f"{compare(mesh)}; values of ranks arrive on {devices}"


@fact(limit_s=120)
def kernel_keeps_off_the_gpu() -> str:
    """The controller never initialises CUDA"""
    with mesh_of(1) as mesh:
        x = torch.randn(64, 64, device=mesh.device)
        y = (x @ x.T).softmax(-1)
        y.sum().item()
        y.full_tensor()
        assert not torch.cuda.is_initialized()
    return "after a product, an item and a full_tensor torch.cuda.is_initialized() is False"


@fact(limit_s=120)
def two_ranks_share_the_gpu() -> str:
    """A Mesh of two ranks that share the GPU: data-parallel training is that of local tensors"""
    with mesh_of(2) as mesh:
        return compare(mesh)


@fact(limit_s=150)
def four_ranks_share_the_gpu() -> str:
    """A 2×2 mesh on one GPU: data times tensor parallel training is that of local tensors"""
    plan = monarch.distributed.Plan({"up": "column", "down": "row", "head": "column"})
    with mesh_of(4, ("data", "model"), (2, 2)) as mesh:
        return compare(mesh, plan)


@fact(limit_s=120)
def redistributions() -> str:
    """Every way from one placement to another, on two ranks of one GPU"""
    from torch.distributed.tensor import Partial, Replicate, Shard

    torch.manual_seed(0)
    data = torch.randn(6, 4)
    ways: list[Any] = [Replicate(), Shard(0), Shard(1), Partial()]
    done, failed = 0, []
    with mesh_of(2) as mesh:
        for source in ways[:3]:
            for target in ways:
                for dtype in (torch.float32, torch.bfloat16, torch.int64):
                    x = data.to(dtype)
                    try:
                        result = monarch.distribute(x, mesh, [source]).redistribute(placements=[target]).full_tensor()
                        close(result, x, 1e-2)
                        done += 1
                    except Exception as error:
                        failed.append(f"{source} to {target} of {dtype}: {type(error).__name__}: {str(error)[:160]}")
        summed = monarch.distribute(data, mesh, [Shard(0)]).sum(0)
        close(summed.full_tensor(), data.sum(0))
    assert not failed, f"{len(failed)} of {done + len(failed)}: {failed[0]}"
    return f"{done} ways and types"


@fact(limit_s=120)
def checkpoints() -> str:
    """A checkpoint of two ranks on one GPU loads on one"""
    with tempfile.TemporaryDirectory() as folder:
        with mesh_of(2) as mesh:
            torch.manual_seed(0)
            model = monarch.module_to_mesh(_Layers(), mesh)
            before = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
            save({"model": model.state_dict()}, folder)
        with mesh_of(1) as mesh:
            second = monarch.module_to_mesh(_Layers(), mesh)
            state = {"model": second.state_dict()}
            load(state, folder)
            for name, tensor in state["model"].items():
                close(tensor.full_tensor(), before[name], 0)
    return f"{len(before)} tensors equal"


@fact(limit_s=120)
def autocast() -> str:
    """Autocast to bfloat16 casts as local CUDA does"""
    torch.manual_seed(0)
    x, w = torch.randn(8, 16), torch.randn(16, 16)
    with torch.autocast(DEVICE, torch.bfloat16):
        local = (x.to(DEVICE) @ w.to(DEVICE)).softmax(-1)
    with mesh_of(2) as mesh:
        rows, weights = monarch.distribute(x, mesh, ["data", None]), monarch.distribute(w, mesh)
        with torch.autocast("mesh", torch.bfloat16):
            product = rows @ weights
            result = product.softmax(-1)
        assert product.dtype == torch.bfloat16, product.dtype
        assert DEVICE == "cpu" or result.dtype == local.dtype, f"{result.dtype} and {local.dtype}"
        close(result.full_tensor(), local, 2e-2)
    return f"product in {product.dtype}, softmax in {result.dtype}"


def _step_of(mesh: Mesh) -> Callable[[], torch.Tensor]:
    torch.manual_seed(0)
    model = monarch.module_to_mesh(_Layers(), mesh)
    words = monarch.distribute(torch.randint(0, 32, (8, 12)), mesh, ["data", None])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)

    def step() -> torch.Tensor:
        loss = functional.cross_entropy(model(words).flatten(0, 1), words.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


@fact(limit_s=200)
def compiled_steps() -> str:
    """Compiled steps, replayed, as a CUDA graph and by inductor, give the losses of the step as it is written"""
    texts = []
    with mesh_of(1) as mesh:
        expected = [float(step().full_tensor()) for step in [_step_of(mesh)] for _ in range(8)]
        for backend in ("python", "cudagraphs", "inductor") if DEVICE == "cuda" else ("python", "inductor"):
            run = monarch.compile(_step_of(mesh), backend=backend)
            losses = [float(run().full_tensor()) for _ in range(8)]
            close(torch.tensor(expected), torch.tensor(losses), 1e-3)
            texts.append(f"{backend}: {losses[-1]:.4f}")
    return "; ".join(texts)


@fact(limit_s=120)
def random_numbers() -> str:
    """Dropout draws the same on replicas, others on shards, and the same again after a seed"""
    with mesh_of(2) as mesh:
        torch.manual_seed(5)
        draws = torch.rand(64, device=mesh.device)
        x = monarch.distribute(torch.ones(4, 64), mesh, ["data", None])
        dropped = functional.dropout(x, 0.5).full_tensor()
        torch.manual_seed(5)
        again = torch.rand(64, device=mesh.device)
        assert torch.equal(draws.full_tensor(), again.full_tensor())
        shards = draws.local_shards() if hasattr(draws, "local_shards") else None
        assert not torch.equal(dropped[0], dropped[2]), "two shards drew the same"
        assert 0.3 < float((dropped == 0).float().mean()) < 0.7
    return "as on the CPU" + ("" if shards is None else "; replicas equal")


@fact(limit_s=120)
def out_of_memory() -> str:
    """Out of memory on the ranks is an error that names the line, and leaves the mesh usable"""
    if DEVICE != "cuda":
        raise NotTried("the CPU's memory is not to be filled")
    with mesh_of(2) as mesh:
        x = torch.ones(4, device=mesh.device)
        big = torch.empty(1 << 38, device=mesh.device)
        try:
            big.sum().item()
        except Exception as error:
            text = str(error)
        else:
            raise AssertionError("a TB was given")
        assert float(x.sum()) == 4.0, "the mesh is not usable"
        del big
        assert "memory" in text.lower(), text
    return text.splitlines()[0][:300]


def _allocate(share: float) -> int:
    torch.cuda.set_per_process_memory_fraction(share)
    return os.getpid()


@fact(limit_s=120)
def out_of_memory_on_one_rank() -> str:
    """Out of memory on one of two ranks is an error of that rank, and leaves the mesh usable"""
    if DEVICE != "cuda":
        raise NotTried("the CPU's memory is not to be filled")
    need_gpu()
    procs = this_host().spawn_procs(per_host={"data": 2})
    try:
        mesh = Mesh.of(procs, device=DEVICE)
        x = torch.ones(4, device=mesh.device)
        x.sum().item()
        mesh.slice(data=1).execute(_allocate, 0.01) if hasattr(mesh, "slice") else None
        big = torch.ones(1 << 29, device=mesh.device)  # 2 GB
        try:
            big.sum().item()
        except Exception as error:
            text = str(error)
        else:
            raise AssertionError("rank 1 had room")
        began = time.monotonic()
        assert float(torch.ones(4, device=mesh.device).sum()) == 4.0, "the mesh is not usable"
        took = time.monotonic() - began
    finally:
        procs.stop().get(20)
    return f"usable after {took:.1f} s; {text.splitlines()[0][:250]}"


@fact(limit_s=120)
def a_dead_rank_frees_the_others() -> str:
    """A rank that is killed while others wait for it in a collective on the GPU: the error comes within seconds"""
    import signal

    with mesh_of(2) as mesh:
        x = monarch.distribute(torch.ones(4, 4), mesh, ["data", None])
        x.sum().item()
        pids = [int(pid) for pid in mesh.execute(os.getpid).values()]
        os.kill(pids[1], signal.SIGSTOP)
        y = x.sum(0)
        shown = y.full_tensor
        time.sleep(1.0)
        os.kill(pids[1], signal.SIGKILL)
        began = time.monotonic()
        try:
            shown()
        except Exception as error:
            took, text = time.monotonic() - began, str(error)
        else:
            raise AssertionError("a sum over a dead rank came out")
    assert took < 10, f"{took:.1f} s"
    return f"{took:.1f} s: {text.splitlines()[0][:200]}"


@fact(limit_s=150)
def random_programs() -> str:
    """500 random programs on ranks that share the GPU, against local tensors"""
    # Those of a CPU, which choose others among equal numbers: up to 4 % cannot be judged.
    if DEVICE == "cuda":
        need_gpu()
    began, count = time.monotonic(), 500 if DEVICE == "cuda" else 20
    jobs = max(1, min(8, (os.cpu_count() or 2) // 2))
    done = subprocess.run(
        [sys.executable, "-m", "tests.random_programs", "--seed", "3000000000", "--count", str(count), "--no-shrink",
         "--jobs", str(jobs), "--device", DEVICE, "--meshes", "2", "2x2", "3"],
        capture_output=True, text=True, check=False, timeout=140,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    tally = next((line for line in lines if " programs: " in line), "no end")
    wrong = [line for line in lines if line.startswith("seed ") and "unjudged" not in line]
    kinds = Counter(" ".join(line.split(": ", 1)[-1].split()[:14]) for line in wrong)
    assert not wrong, f"{tally}: {kinds.most_common(4)} {wrong[0][:120]}"
    unjudged = sum(": unjudged, " in line for line in lines)
    assert f"{count} programs: " in tally, f"{tally} {lines[-3:]} {done.stderr[-300:]}"
    assert unjudged <= count / 25, tally
    return f"{tally}; {time.monotonic() - began:.0f} s"


@fact(limit_s=150)
def operations() -> str:
    """200 operations with PyTorch's own samples, sharded over two ranks of one GPU, give what local CUDA gives"""
    from torch.distributed.tensor import Replicate, Shard
    from torch.utils._pytree import tree_map

    from tests.cluster import opinfo_cases as cases

    if DEVICE == "cuda":
        need_gpu()
    warnings.simplefilter("ignore")
    operations_of = cases.operations()
    random.Random(0).shuffle(operations_of)
    end = time.monotonic() + 110
    counts: Counter[str] = Counter()
    wrong = []
    with mesh_of(2) as mesh:

        def place(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            cut = value.dim() and value.shape[0] > 1
            return monarch.distribute(value.detach().cpu(), mesh, [Shard(0) if cut else Replicate()])

        for op in operations_of:
            if counts.total() >= (200 if DEVICE == "cuda" else 12) or time.monotonic() > end:
                break
            if not op.supports_dtype(torch.float32, DEVICE):
                continue
            try:
                torch.manual_seed(0)
                sample = next(iter(op.sample_inputs("cpu", torch.float32)))
                draws = cases.Draws()
                move = lambda v: v.to(DEVICE) if isinstance(v, torch.Tensor) else v  # noqa: E731
                args, kwargs = tree_map(move, (sample.input, *sample.args)), tree_map(move, sample.kwargs)
                with draws:
                    local = [t.cpu() for t in cases.tensors_of(op(*args, **kwargs))]
            except Exception:
                counts["untried"] += 0
                continue
            try:
                args, kwargs = tree_map(place, (sample.input, *sample.args)), tree_map(place, sample.kwargs)
                results = cases.tensors_of(op(*args, **kwargs))
                values = [t.full_tensor() if hasattr(t, "full_tensor") else t for t in results]
            except Exception as error:
                counts["refused"] += 1
                if type(error).__name__ in ("ContentsLostError", "SupervisionError"):
                    raise
                if cases.name_of(op).startswith("jiterator"):  # compiles kernels for CUDA tensors alone
                    continue
                if "CUDA" in str(error) or "gloo" in str(error).lower() or "nccl" in str(error).lower():
                    wrong.append(f"{cases.name_of(op)}: {type(error).__name__}: {str(error)[:150]}")
                continue
            drawn = draws.seen or "empty" in op.name
            different = [
                d
                for expected, actual in zip(local, values, strict=False)
                if (d := cases.difference(expected, actual.cpu(), drawn, 0.0))
            ]
            if different or len(local) != len(values):
                counts["wrong"] += 1
                wrong.append(f"{cases.name_of(op)}: {different[:1]}")
            else:
                counts["right"] += 1
    summary = ", ".join(f"{count} {word}" for word, count in counts.items())
    assert counts["right"] >= counts.total() / 2, f"{summary}; {'; '.join(wrong)[:400]}"
    assert not wrong, f"{summary}; {len(wrong)} to look at: {'; '.join(wrong)[:600]}"
    return summary


class _Member(Actor):
    """A rank with a process group of its own."""

    @endpoint
    def join(self, backend: str, host: str = "") -> None:
        """Joins the group; with `host`, NCCL takes each rank to be on another host."""
        import torch.distributed as dist

        if host:
            os.environ.update(NCCL_HOSTID=f"{host}{current_rank().rank}", NCCL_SOCKET_IFNAME="lo")
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "2"
        torch.cuda.set_device(0)
        dist.init_process_group(backend)

    @endpoint
    def collectives(self) -> dict[str, str]:
        """The error of each collective with tensors of the device, or ""."""
        import torch.distributed as dist
        import torch.distributed._functional_collectives as functional_collectives

        from monarch_nb.tensor.groups.world import Staging

        group, size = dist.group.WORLD, dist.get_world_size()
        staging = Staging()
        ones = lambda count=4: torch.ones(count, device=DEVICE)  # noqa: E731
        peer = 1 - dist.get_rank()
        ways: dict[str, Callable[[], Any]] = {
            "all_reduce": lambda: dist.all_reduce(ones()),
            "all_reduce max bf16": lambda: dist.all_reduce(ones().bfloat16(), dist.ReduceOp.MAX),
            "all_reduce avg": lambda: dist.all_reduce(ones(), dist.ReduceOp.AVG),
            "broadcast": lambda: dist.broadcast(ones(), 0),
            "all_gather": lambda: dist.all_gather([ones() for _ in range(size)], ones()),
            "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(ones(4 * size), ones()),
            "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(ones(), ones(4 * size)),
            "all_to_all_single": lambda: dist.all_to_all_single(ones(), ones()),
            "scatter": lambda: dist.scatter(ones(), [ones() for _ in range(size)] if peer else None, 0),
            "gather": lambda: dist.gather(ones(), [ones() for _ in range(size)] if peer else None, 0),
            "barrier": dist.barrier,
            "functional all_reduce": lambda: functional_collectives.all_reduce(ones(), "sum", group).sum().item(),
            "functional all_gather": lambda: functional_collectives.all_gather_tensor(ones(), 0, group).sum().item(),
            "functional reduce_scatter": lambda: (
                functional_collectives.reduce_scatter_tensor(ones(), "sum", 0, group).sum().item()
            ),
            "functional all_to_all": lambda: (
                functional_collectives.all_to_all_single(ones(), None, None, group).sum().item()
            ),
            "coalesced all_gather": lambda: (
                functional_collectives.all_gather_into_tensor_coalesced([ones(), ones()], group)[0].sum().item()
            ),
            "coalesced all_reduce": lambda: (
                functional_collectives.all_reduce_coalesced([ones(), ones()], "sum", group)[0].sum().item()
            ),
            "coalesced reduce_scatter": lambda: (
                functional_collectives.reduce_scatter_tensor_coalesced([ones()], "sum", [0], group)[0].sum().item()
            ),
        }
        errors = {}
        for name, way in ways.items():
            try:
                way()
                torch.cuda.synchronize()
                errors[name] = ""
            except Exception as error:
                errors[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:90]}"
        staging.end()
        return errors

    @endpoint
    def total(self) -> float:
        """A sum over the ranks."""
        import torch.distributed as dist

        ones = torch.ones(1 << 20, device=DEVICE)
        dist.all_reduce(ones)
        return float(ones[0])

    @endpoint
    def pending(self) -> tuple[float, float, str]:
        """Begins a sum that nobody joins, and aborts it: seconds that it was pending, and that the abort took."""
        import torch.distributed as dist

        began = time.monotonic()
        ones = torch.ones(1 << 20, device=DEVICE)
        dist.all_reduce(ones)
        done = torch.cuda.Event()
        done.record()
        time.sleep(1.0)
        assert not done.query(), "the sum ended by itself"
        pending = time.monotonic() - began
        began = time.monotonic()
        backend: Any = dist.group.WORLD._get_backend(torch.device("cuda"))
        backend.abort()
        done.synchronize()
        took = time.monotonic() - began
        return pending, took, f"{float(torch.ones(4, device=DEVICE).sum()):.0f}"


@fact(limit_s=90)
def collectives_of_gloo() -> str:
    """Collectives with CUDA tensors on two ranks that share the GPU: plain ones by gloo, functional ones staged"""
    # Without all_to_all of lists, which gloo lacks, and send, with which gloo of PyTorch 2.11 cuts the connection.
    need_gpu()
    procs = this_host().spawn_procs(per_host={"ranks": 2})
    members = procs.spawn("members", _Member)
    members.join.call("cpu:gloo,cuda:gloo").get(ANSWER_S)
    replies = members.collectives.call().get(ANSWER_S).values()
    procs.stop().get(20)
    failed = {name: error for answers in replies for name, error in answers.items() if error}
    assert not failed, "; ".join(f"{name}: {error}" for name, error in failed.items())
    return f"{len(next(iter(replies)))} collectives"


@fact(limit_s=120, alone=True)
def an_abort_of_nccl() -> str:
    """A pending NCCL collective is aborted within 1 s, and the process computes on (one GPU, by NCCL_HOSTID)"""
    need_gpu()
    procs = this_host().spawn_procs(per_host={"ranks": 2})
    members = procs.spawn("members", _Member)
    members.join.call("cpu:gloo,cuda:nccl", "pretended").get(ANSWER_S)
    try:
        totals = list(members.total.call().get(ANSWER_S).values())
    except Exception as error:
        procs.stop().get(20)
        raise NotTried(f"NCCL does not let two ranks have one GPU: {str(error)[:200]}") from error
    assert totals == [2.0, 2.0], totals
    pending, took, total = members.slice(ranks=0).pending.call_one().get(ANSWER_S)
    procs.stop().get(20)
    assert took < 1.0, f"{took:.2f} s"
    assert total == "4", total
    return f"pending for {pending:.1f} s, ended in {took:.2f} s"
