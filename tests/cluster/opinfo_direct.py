"""Plans run directly on two gloo ranks: what the rules say, without a controller.

`python -m tests.cluster.opinfo_direct [SUBSTRING] > results.json` runs all operations.
"""

import datetime
import json
import os
import signal
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.utils._mode_utils import no_dispatch

from monarch_nb.tensor.propagation import Layout, Meta, Plan, Propagator, Runner, ViewWriteError
from tests.cluster import opinfo_cases as cases

WORLD = 2
LAYOUT = Layout((WORLD,), ("ranks",))
STATE: dict[str, Any] = {}


class Direct(torch.Tensor):
    """Looks like the whole tensor; every operation is planned, and its program run at once on this rank's shards."""

    meta: Meta
    value: DTensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, value: DTensor, meta: Meta) -> "Direct":
        made = torch.Tensor._make_wrapper_subclass(cls, meta.shape, strides=meta.stride, dtype=meta.dtype, device="cpu")
        made.meta, made.value = meta, value
        return made

    def __repr__(self) -> str:
        return f"Direct({self.meta})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return perform(func, args, kwargs or {})


def place(tensor: torch.Tensor, placement: Any) -> Direct:
    tensor = tensor.resolve_conj().resolve_neg()
    meta = Meta.of(LAYOUT, tensor.shape, tensor.dtype, (placement,), stride=tensor.stride())
    with torch.no_grad():
        if placement.is_partial():
            part = tensor * (0.25 if STATE["rank"] else 0.75) + (0.5 if STATE["rank"] else -0.5)
            return Direct(DTensor.from_local(part, STATE["mesh"], [placement], run_check=False), meta)
        if not placement.is_replicate():
            return Direct(distribute_tensor(tensor, STATE["mesh"], [placement], src_data_rank=None), meta)
        return Direct(DTensor.from_local(tensor, STATE["mesh"], [placement], run_check=False, shape=tensor.shape,
                      stride=tensor.stride()), meta)  # fmt: skip


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.value.full_tensor() if isinstance(tensor, Direct) else tensor


def perform(func: Any, args: Any, kwargs: Any) -> Any:
    def handle(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and not isinstance(value, Direct):
            return place(value, Replicate())
        return type(value)(map(handle, value)) if isinstance(value, list | tuple) else value

    plan, leaves, scalars = STATE["propagator"].plan(
        func, handle(list(args)), {name: handle(value) for name, value in kwargs.items()}
    )
    if any(leaves[at].meta.copied for at in plan.writes):
        raise ViewWriteError(plan.operation, "written to a copy, which only handles of a mesh write back")
    runner = STATE["runners"].get(plan.number)
    if runner is None:
        runner = STATE["runners"][plan.number] = Runner(plan.program, STATE["mesh"])
    if plan.program.seeded is not None:
        torch.manual_seed(7 + (STATE["rank"] if plan.program.seeded else 0))
    results = runner([leaf.value for leaf in leaves], scalars)
    made = [Direct(value, meta) for value, meta in zip(results, plan.made, strict=True)]
    check_agreement(plan, results)
    if plan.rebinds:
        leaves[0].meta, leaves[0].value = made[0].meta, made[0].value
        with no_dispatch():
            func(*args, **kwargs)
    if plan.value:
        return made[0].value.to_local().item()
    return plan.build(made, leaves)


def check_agreement(plan: Plan, results: list[DTensor]) -> None:
    """What the controller thinks of a tensor is what the ranks have."""
    for value, meta in zip(results, plan.made, strict=True):
        if value.placements != meta.placements or tuple(value.shape) != meta.shape:
            raise AssertionError(f"{plan.operation}: ranks have {value._spec}, the plan says {meta}")


def rank_main(rank: int, port: int, start: int, path: str, part: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    wait = datetime.timedelta(seconds=20)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=wait)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD, store=dist.PrefixStore(str(start), store),
                            timeout=datetime.timedelta(seconds=8))  # fmt: skip
    STATE.update(mesh=init_device_mesh("cpu", (WORLD,), mesh_dim_names=("ranks",)), rank=rank, runners={},
                 propagator=Propagator(LAYOUT, leaf=Direct))  # fmt: skip
    words = dist.PrefixStore(f"r{start}", store)
    engine = cases.Engine(place, whole)
    number = -1
    with open(f"{path}.{rank}", "a", buffering=1) as log:
        for op in cases.operations():
            if part and cases.name_of(op) not in part.split(","):
                continue
            for kind in cases.SIZES:
                samples: list[Any] = []
                for word, placement in cases.PLACEMENTS.items():
                    number += 1
                    if number < start:
                        continue
                    name = [cases.name_of(op), kind, word]
                    log.write(json.dumps(["start", number, *name]) + "\n")
                    try:
                        samples = samples or cases.samples_of(op, kind)
                    except Exception as error:
                        print(name, error, file=sys.stderr)
                    begun = time.perf_counter()
                    said = cases.outcome(op, samples[0], placement, engine) if samples else "no sample"
                    took = time.perf_counter() - begun
                    words.set(f"{number}.{rank}", said)
                    other = words.get(f"{number}.{1 - rank}").decode()
                    apart = (said == "ok") != (other == "ok") or any(w in said + other for w in ("gloo", "pair clos"))
                    told = ("RANKS APART: " if apart else "") + (other if said == "ok" else said)
                    log.write(json.dumps(["end", number, *name, told, round(took, 3)]) + "\n")
                    if apart:
                        os._exit(3)  # the other rank may still sit in a collective
        log.write(json.dumps(["done"]) + "\n")
        log.flush()
        os._exit(0)


def main(part: str = "", quiet_limit: float = 40.0) -> dict[str, dict[str, str]]:
    """Outcome by operation and case. A rank that dies or hangs ends its case only."""
    path = os.path.join(tempfile.mkdtemp(), "log")
    start = 0
    results: dict[int, list[Any]] = {}
    while True:
        master = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        children = []
        for rank in range(WORLD):
            child = os.fork()
            if child == 0:
                try:
                    rank_main(rank, master.port, start, path, part)
                finally:
                    os._exit(4)
            children.append(child)
        gone: set[int] = set()
        size, still = -1, 0.0
        while len(gone) < WORLD and still < quiet_limit:
            time.sleep(0.1)
            now = sum(Path(f"{path}.{r}").stat().st_size for r in range(WORLD) if Path(f"{path}.{r}").exists())
            still = 0.0 if now != size else still + 0.1
            size = now
            gone |= {c for c in children if c not in gone and os.waitpid(c, os.WNOHANG)[0]}
            if gone:
                still += 1
        for child in set(children) - gone:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        lines = [json.loads(line) for r in range(WORLD) for line in Path(f"{path}.{r}").read_text().splitlines()
                 if line.endswith("]")]  # fmt: skip
        for line in lines:
            if line[0] == "end":
                results[line[1]] = line[2:]
        if ["done"] in lines:
            break
        last = max((line for line in lines if line[0] == "start"), key=lambda line: line[1])
        results.setdefault(last[1], [*last[2:], "HUNG or killed a rank", 0])
        start = last[1] + 1
    found: dict[str, dict[str, str]] = {}
    for _, (name, kind, word, told, _took) in sorted(results.items()):
        found.setdefault(name, {})[f"{kind} {word}"] = told
    slow = sorted(results.values(), key=lambda row: -row[4])[:10]
    print("slowest:", *slow, sep="\n", file=sys.stderr)
    return found


if __name__ == "__main__":
    begun = time.time()
    cases.operations()
    outcomes = main(*sys.argv[1:2])
    right = [name for name, by in outcomes.items() if all(told == "ok" for told in by.values())]
    wrong = {f"{name} {case}": told for name, by in outcomes.items() for case, told in by.items() if "WRONG" in told}
    print(f"{len(right)} of {len(outcomes)} right; {len(wrong)} wrong; {time.time() - begun:.0f} s", file=sys.stderr)
    print(json.dumps(outcomes, indent=0))
