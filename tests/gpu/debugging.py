"""The debugger, stacks and errors where ranks compute on a GPU."""

import time
from typing import Any

import torch

import monarch_nb
from monarch_nb import debug
from monarch_nb.actor import Actor, ActorError, endpoint, this_host
from tests.gpu import DEVICE, NotTried, fact, need_gpu

_ANSWER_S = 30.0


class Trainer(Actor):
    """A rank with tensors on the device."""

    @endpoint
    def step(self, scale: float) -> float:
        """Stops with a tensor."""
        x = torch.arange(6, dtype=torch.float32, device=DEVICE).reshape(2, 3) * scale
        x[0, 0] = float("nan")
        loss = x.nansum()
        breakpoint()
        return float(loss)

    @endpoint
    def busy(self, seconds: float) -> str:
        """Stops with a tensor that the device has not computed yet."""
        x = torch.ones(1 << 20, device=DEVICE)
        torch.add(x, 1)  # loaded now: CUDA loads no kernel while another runs
        torch.cuda._sleep(int(seconds * 1.7e9))
        y = torch.add(x, 1)
        breakpoint()
        torch.cuda.synchronize()
        return f"{float(y.sum()):.0f}"

    @endpoint
    def wait(self, seconds: float) -> None:
        """Waits for a long kernel."""
        torch.cuda._sleep(int(seconds * 1.7e9))
        torch.cuda.synchronize()

    @endpoint
    def fail(self) -> None:
        """Raises with a tensor in its frame."""
        weights = torch.full((4,), 7.0, device=DEVICE)
        raise ValueError(f"no good: {weights.shape}")

    @endpoint
    def value(self) -> float:
        """Computes."""
        return float(torch.ones(4, device=DEVICE).sum())

    @endpoint
    def assertion(self) -> float:
        """A kernel's assertion, which every later call of this process reports too."""
        x = torch.zeros(4, device=DEVICE)[torch.tensor([10**9], device=DEVICE)]
        return float(x)

    @endpoint
    def logarithm(self) -> None:
        """A NaN in a forward pass, in bfloat16."""
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()).to(DEVICE, torch.bfloat16)
        torch.log(model(torch.randn(8, 64, device=DEVICE, dtype=torch.bfloat16)) - 1000).sum().backward()

    @endpoint
    def root(self) -> None:
        """A NaN in a backward pass alone."""
        x = torch.randn(8, 64, device=DEVICE, requires_grad=True)
        mask = torch.zeros(64, 64, device=DEVICE).masked_fill(
            torch.ones(64, 64, device=DEVICE).triu(1).bool(), -torch.inf
        )
        attended = (x @ x.T @ x + mask[:8]).softmax(-1)
        (_Root()(attended.relu() * 0) * 0).sum().backward()

    @endpoint
    def too_much(self) -> None:
        """More memory than there is."""
        torch.empty(1 << 42, device=DEVICE)


class _Root(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sqrt(x)


def _trainers(count: int = 1) -> tuple[Any, Any]:
    if DEVICE == "cuda":
        need_gpu()
    procs = this_host().spawn_procs(per_host={"ranks": count})
    return procs, procs.spawn("trainers", Trainer)


@fact(limit_s=90)
def a_breakpoint_shows_tensors() -> str:
    """At a breakpoint on two ranks, tensors of the device are shown by shape, device and numbers"""
    procs, trainers = _trainers(2)
    future = trainers.step.call(2.0)
    debug.wait(2, timeout=_ANSWER_S)
    text = debug.eval("x").text
    loss = debug.eval("loss").values
    debug.resume()
    result = list(future.get(_ANSWER_S).values())
    procs.stop().get(20)
    assert result == [30.0, 30.0], result
    assert "NaN" in text, text
    assert DEVICE == "cpu" or "cuda" in text, text
    return f"{text[:200]}; loss {loss}"


@fact(limit_s=90)
def a_busy_device_does_not_hold_the_debugger_up() -> str:
    """A tensor that the device has not computed yet is said to be so, in bounded time"""
    if DEVICE != "cuda":
        raise NotTried("it needs a GPU")
    procs, trainers = _trainers()
    future = trainers.busy.call_one(12.0)
    debug.wait(1, timeout=_ANSWER_S)
    began = time.monotonic()
    text = debug.eval("y").text
    took = time.monotonic() - began
    debug.resume()
    result = future.get(_ANSWER_S)
    procs.stop().get(20)
    assert result == str(2 << 20), result
    assert "not computed yet" in text, text
    assert took < 4, took
    return f"{took:.1f} s: {text[:160]}"


@fact(limit_s=90)
def stacks_while_a_kernel_runs() -> str:
    """Stacks of a rank that waits for a long kernel come at once, and name the line"""
    if DEVICE != "cuda":
        raise NotTried("it needs a GPU")
    procs, trainers = _trainers()
    trainers.value.call_one().get(_ANSWER_S)
    future = trainers.wait.call_one(8.0)
    time.sleep(1.0)
    began = time.monotonic()
    text = debug.stacks(trainers)
    took = time.monotonic() - began
    future.get(_ANSWER_S)
    procs.stop().get(20)
    assert "synchronize" in text, text
    assert took < 4, took
    return f"{took:.2f} s: {text.splitlines()[-1].strip()[:160]}"


@fact(limit_s=90)
def post_mortem() -> str:
    """The frames of a failed call keep their tensors"""
    procs, trainers = _trainers()
    try:
        trainers.fail.call_one().get(_ANSWER_S)
    except ActorError as error:
        group = debug.post_mortem(error)
    text = group.eval("weights").text
    group.resume()
    value = trainers.value.call_one().get(_ANSWER_S)
    procs.stop().get(20)
    assert "7" in text, text
    assert value == 4.0
    return text[:200]


@fact(limit_s=120)
def an_error_that_stays_marks_the_rank_and_heal_mends_it() -> str:
    """After a kernel's failed assertion the rank is failed, once; the other goes on, and heal gives a new process"""
    if DEVICE != "cuda":
        raise NotTried("it needs a GPU")
    import monarch
    import monarch.actor

    failures: list[str] = []
    monarch.actor.unhandled_fault_hook = lambda failure: failures.append(str(failure))
    procs, trainers = _trainers(2)
    assert list(trainers.value.call().get(_ANSWER_S).values()) == [4.0, 4.0]
    try:
        trainers.slice(ranks=0).assertion.call_one().get(_ANSWER_S)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    else:
        raise AssertionError("no error")
    value = trainers.slice(ranks=1).value.call_one().get(_ANSWER_S)
    assert value == 4.0, value
    end = time.monotonic() + _ANSWER_S
    while not failures and time.monotonic() < end:
        time.sleep(0.05)
    try:
        trainers.slice(ranks=0).value.call_one().get(_ANSWER_S)
    except Exception as error:
        message = str(error)
    else:
        raise AssertionError("the rank still computes")
    monarch.heal_mesh(procs)
    healed = list(trainers.value.call().get(_ANSWER_S).values())
    procs.stop().get(20)
    assert healed == [4.0, 4.0], healed
    assert "heal_mesh" in text, text
    assert len(failures) == 1, failures
    assert "cannot use its GPU any more" in message, message
    return next(line for line in message.splitlines() if "cannot use its GPU" in line).strip(" |")[:300]


@fact(limit_s=90)
def the_first_nan_is_named() -> str:
    """The operation, module and line of the first NaN are named, in a forward and in a backward pass"""
    procs, trainers = _trainers(2)
    with monarch_nb.watch(trainers) as nothing:
        trainers.value.call().get(_ANSWER_S)
    with monarch_nb.watch(trainers) as forward:
        trainers.logarithm.call().get(_ANSWER_S)
    with monarch_nb.watch(trainers) as backward:
        trainers.root.call().get(_ANSWER_S)
    procs.stop().get(20)
    assert not nothing.findings, str(nothing)
    assert "aten.log.default gave 512 NaN in bfloat16[8×64]" in str(forward), str(forward)
    assert "in the backward of _Root (debugging.py:" in str(backward), str(backward)
    assert [finding.ranks for finding in (*forward.findings, *backward.findings)] == [(0, 1)] * 2
    return f"{forward}; {backward}"


@fact(limit_s=90)
def out_of_memory_in_an_actor() -> str:
    """Out of memory in an endpoint is an error of that call, which says what the device holds; the rank goes on"""
    if DEVICE != "cuda":
        raise NotTried("it needs a GPU")
    procs, trainers = _trainers()
    try:
        trainers.too_much.call_one().get(_ANSWER_S)
    except ActorError as error:
        text = str(error)
    value = trainers.value.call_one().get(_ANSWER_S)
    procs.stop().get(20)
    assert value == 4.0
    assert "OutOfMemoryError" in text, text
    return next(line for line in text.splitlines() if "OutOfMemory" in line)[:250]
