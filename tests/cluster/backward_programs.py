"""Backward passes on sharded tensors that fail, one after another in one process.

`python -m tests.cluster.backward_programs` prints the error that each program got, and whether the next pass is right.
"""

import gc
import signal
import sys
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

import monarch
from monarch.distributed import Mesh
from monarch_nb.tensor import device

Program = Callable[[torch.Tensor], object]


class Mine(Exception):
    """The program's own."""


class Traced:
    """Lives as long as the frame that failed."""


frames: "weakref.WeakSet[Traced]" = weakref.WeakSet()


def fail(*_: object) -> Any:
    traced = Traced()
    frames.add(traced)
    raise Mine("here")


def hooked(hook: Callable[[torch.Tensor], Any]) -> Program:
    def program(x: torch.Tensor) -> None:
        y = x * 2
        y.register_hook(hook)
        y.sum().backward()

    return program


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        fail()


def interrupt(_: torch.Tensor) -> None:
    signal.raise_signal(signal.SIGINT)


def node(x: torch.Tensor) -> None:
    y = x * 2
    y.grad_fn.register_hook(fail)
    y.sum().backward()


def node_before(x: torch.Tensor) -> None:
    y = x * 2
    y.grad_fn.register_prehook(fail)
    y.sum().backward()


def accumulated(x: torch.Tensor) -> None:
    leaf = x.detach().requires_grad_()
    leaf.register_post_accumulate_grad_hook(fail)
    (leaf * 2).sum().backward()


def unpacked(x: torch.Tensor) -> None:
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, fail):
        y = x * x
    y.sum().backward()


def refused(x: torch.Tensor) -> None:
    """An operation of a node of PyTorch's own: its gradient would be sparse."""
    rows = torch.zeros(2, dtype=torch.int64, device=x.device)
    torch.nn.functional.embedding(rows, x.view(2, 2), sparse=True).sum().backward()


def nested(x: torch.Tensor) -> None:
    """An error of an inner pass is caught, that of the outer is raised."""

    def inner(_: torch.Tensor) -> None:
        try:
            with torch.enable_grad():
                hooked(fail)(x)
        except Mine:
            raise ValueError("outer") from None

    hooked(inner)(x)


def recomputed(reentrant: bool) -> Program:
    def program(x: torch.Tensor) -> None:
        times = []

        def square(x: torch.Tensor) -> torch.Tensor:
            times.append(0)
            return x * x if len(times) == 1 else fail()

        checkpoint(square, x, use_reentrant=reentrant).sum().backward()

    return program


def traced(x: torch.Tensor) -> None:
    """A debugger traces every line of every function."""

    def look(frame: FrameType, event: str, argument: object) -> Any:
        return look

    sys.settrace(look)
    try:
        hooked(fail)(x)
    finally:
        sys.settrace(None)


def in_threads(x: torch.Tensor) -> None:
    """Each thread gets its own error."""
    wrong: list[object] = []

    def run(number: int) -> None:
        for _ in range(10):
            try:
                y = x.detach().requires_grad_() * 2
                y.register_hook(lambda grad: {}[number])
                y.sum().backward()
            except KeyError as error:
                wrong.extend(() if error.args == (number,) else error.args)
            except BaseException as error:
                wrong.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if wrong:
        raise AssertionError(wrong)
    fail()


PROGRAMS: dict[str, Program] = {
    "hook": hooked(fail),
    "hook of a node": node,
    "hook before a node": node_before,
    "hook of an accumulated gradient": accumulated,
    "hook of a saved tensor": unpacked,
    "hook, by torch.autograd.grad": lambda x: torch.autograd.grad(hooked_sum(x), x),
    "function": lambda x: Backward.apply(x).sum().backward(),  # type: ignore[no-untyped-call]
    "checkpoint": recomputed(reentrant=False),
    "reentrant checkpoint": recomputed(reentrant=True),
    "nested": nested,
    "traced": traced,
    "threads": in_threads,
    "refused in a hook": hooked(lambda grad: grad[grad > 0]),
    "refused in a node": refused,
    "error of C": hooked(lambda grad: int("no number")),
    "exit": hooked(lambda grad: sys.exit(3)),
    "interrupt": hooked(interrupt),
}


def hooked_sum(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.register_hook(fail)
    return y.sum()


def main() -> None:
    """Prints, with tabs: the program's name, the exception, the function that raised it, and "goes on"."""
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    mesh = Mesh(shape=(2,), mesh_dim_names=("a",))
    for name, program in PROGRAMS.items():
        print(name, end="\t", flush=True)
        x = monarch.distribute(torch.rand(4), mesh).requires_grad_()
        try:
            program(x)
            print("nothing", "", sep="\t", end="\t")
        except BaseException as error:
            names = [frame.name for frame in traceback.extract_tb(error.__traceback__) if frame.filename == __file__]
            print(type(error).__name__, names[-1], sep="\t", end="\t")
        x.grad = None
        (x * 2).sum().backward()  # type: ignore[no-untyped-call]
        right = x.grad is not None and x.grad.full_tensor().tolist() == [2.0] * 4  # type: ignore[attr-defined]
        print("goes on" if right and not device._stored_errors else "does not go on", flush=True)
    gc.collect()
    print("frames that are kept:", len(frames))
    mesh.stop().get()


if __name__ == "__main__":
    main()
