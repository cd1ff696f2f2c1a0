"""`monarch.profile` of real ranks: busy, dying, in C, async, and running cells."""

import ctypes
import gzip
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import monarch_nb as monarch
from monarch_nb.actor import Actor, SupervisionError, concurrent_endpoint, current_rank, endpoint, run_on
from monarch_nb.profiling import Profile
from monarch_nb.profiling.service import PROFILING
from monarch_nb.runtime import current_runtime
from monarch_nb.supervision import MeshFailure
from tests.cluster.actor_tools import SECONDS, Faults, spawned
from tests.polling import until

pytestmark = pytest.mark.timeout(120)
RANKS = 3
SLOW = 1


class Trainer(Actor):
    @endpoint
    def step(self, seconds: float) -> None:
        begun = time.monotonic()
        self.learn(seconds)
        self.load(time.monotonic() - begun)  # in proportion, however busy the machine is

    def load(self, seconds: float) -> None:
        end = time.monotonic() + (3 * seconds if current_rank().rank == SLOW else seconds)
        while time.monotonic() < end:
            time.sleep(0.005)

    def learn(self, seconds: float) -> float:
        end, total = time.thread_time() + seconds, 0.0
        while time.thread_time() < end:
            total += sum(range(100))
        return total

    @endpoint
    def hold(self, seconds: float) -> None:
        """Calls into C that keep the interpreter's lock, each for a while."""
        for _ in range(round(10 * seconds)):
            ctypes.PyDLL(None).usleep(100_000)

    @endpoint
    def die_after(self, seconds: float) -> None:
        self.load(seconds)
        os.kill(os.getpid(), signal.SIGKILL)

    @endpoint
    def multiply(self, times: int) -> None:
        import torch

        with torch.profiler.record_function(f"times {times}"):
            for _ in range(times):
                torch.ones(8, 8) @ torch.ones(8, 8)


class Waiter(Actor):
    @endpoint
    async def wait(self, seconds: float) -> None:
        import asyncio

        await asyncio.sleep(seconds)

    concurrent = concurrent_endpoint(wait.method)


@pytest.fixture(scope="module")
def procs() -> Iterator[Any]:
    yield from spawned(RANKS, "profiled")


@pytest.fixture(scope="module")
def trainers(procs: Any) -> Any:
    mesh = procs.spawn("trainers", Trainer)
    mesh.step.call(0.0).get(SECONDS)
    return mesh


def shares_of(profile: Profile, rank: int) -> dict[str, float]:
    """Shares of a rank's time by function."""
    shares: dict[str, float] = {}

    def add(node: Any) -> None:
        for child in node.children([rank]):
            name = child.place.function
            shares[name] = shares.get(name, 0.0) + child.share([rank])
            add(child)

    add(profile.tree([rank]))
    return shares


@pytest.mark.slow
def test_the_rank_that_loads_longer_is_a_group_that_names_loading(trainers: Any) -> None:
    with monarch.profile(trainers, hz=200) as profile:
        trainers.step.call(0.4).get(SECONDS)
    assert set(profile.ranks) == set(range(RANKS))
    assert profile.notes == []
    assert sorted(len(group) for group in profile.groups) == [1, RANKS - 1]
    assert (SLOW,) in profile.groups
    assert "Trainer.step → Trainer.load" in repr(profile).partition("what differs")[2].splitlines()[1]
    slow = shares_of(profile, SLOW)
    assert slow["Trainer.load"] > shares_of(profile, 0)["Trainer.load"] + 0.1
    load, learn = (
        next(node for node in profile.tree([SLOW]).children([SLOW])[0].children([SLOW]) if node.place.function == name)
        for name in ("Trainer.load", "Trainer.learn")
    )
    assert learn.on_processor([SLOW]) > 2 * load.on_processor([SLOW])  # it shares two processors with others
    assert load.place.file == __file__
    assert all(node.place.users for node in (load, learn))


def test_a_slice_is_sampled_alone_and_only_inside_the_block(trainers: Any) -> None:
    with monarch.profile(trainers.slice(gpus=2)) as profile:
        trainers.step.call(0.05).get(SECONDS)
    assert set(profile.ranks) == {2}
    before = profile.samples
    names = run_on(trainers, "import threading; [thread.name for thread in threading.enumerate()]").get(SECONDS)
    assert [rank for rank, (_, threads) in enumerate(names.items()) if "monarch-profile" in threads] == []
    assert profile.samples == before


@pytest.mark.slow
def test_c_calls_that_hold_the_gil_count_for_their_whole_time(trainers: Any) -> None:
    with monarch.profile(trainers) as profile:
        trainers.hold.call(4).get(SECONDS)
    # A sampler that wakes late sees what follows the last call.
    assert shares_of(profile, 0)["Trainer.hold"] * profile.ranks[0].seconds > 3.2


@pytest.mark.parametrize("name", ["wait", "concurrent"])
def test_a_coroutine_that_waits_is_seen_where_it_waits(procs: Any, name: str) -> None:
    waiters = procs.spawn("waiters", Waiter)
    with monarch.profile(waiters) as profile:
        longest = getattr(waiters, name).call(0.4)
        getattr(waiters, name).call(0.0).get(SECONDS)
        longest.get(SECONDS)
    shares = shares_of(profile, 0)
    assert shares["Waiter.wait"] > 0.5
    assert shares["sleep"] == pytest.approx(shares["Waiter.wait"])
    waiters.stop().get(SECONDS)


def test_of_a_mesh_of_processes_all_actors_and_cells_are_seen(procs: Any, trainers: Any) -> None:
    with monarch.profile(procs) as profile:
        future = trainers.step.call(0.2)
        run_on(procs, "import time\ndef nap():\n    time.sleep(0.3)\nnap()").get(SECONDS)
        future.get(SECONDS)
    shares = shares_of(profile, 0)
    assert {"trainers", "Trainer.step", "nap"} <= set(shares)


@pytest.mark.slow
def test_an_error_and_an_interrupt_in_the_block_leave_nothing_running(trainers: Any) -> None:
    for error in (ZeroDivisionError, KeyboardInterrupt):
        profiles = []
        with pytest.raises(error):
            run_and_raise(trainers, error, profiles)
        (profile,) = profiles
        assert profile.samples > 0
        assert profile.seconds > 0
    code = "import threading; [thread.name for thread in threading.enumerate()]"
    until(  # the end is sent with the interrupt, without waiting for a reply
        lambda: all("monarch-profile" not in names for names in run_on(trainers, code).get(SECONDS).values()),
        "no thread of a profile",
    )


def run_and_raise(trainers: Any, error: type[BaseException], profiles: list[Profile]) -> None:
    with monarch.profile(trainers) as profile:
        profiles.append(profile)
        trainers.step.call(0.05).get(SECONDS)
        raise error


@pytest.mark.slow
def test_samples_of_a_rank_that_dies_are_kept_with_its_death(faults: Faults) -> None:
    for procs in spawned(2, "mortal"):
        mesh = procs.spawn("mortals", Trainer)
        mesh.step.call(0.0).get(SECONDS)
        with monarch.profile(mesh) as profile:
            call = mesh.slice(gpus=1).die_after.call_one(2.4)  # two messages arrive before
            with pytest.raises(SupervisionError):
                call.get(SECONDS)
            mesh.slice(gpus=0).step.call_one(0.05).get(SECONDS)
        assert set(profile.ranks) == {0, 1}
        assert shares_of(profile, 1)["Trainer.load"] > 0.5
        (note,) = profile.notes
        assert "mortals gpus=1" in note
        assert "SIGKILL" in note
        assert "is here" in note
        profile_of_broken(mesh)
    assert all(isinstance(failure, MeshFailure) for failure in faults.left())


def profile_of_broken(mesh: Any) -> None:
    with monarch.profile(mesh) as profile:
        mesh.slice(gpus=0).step.call_one(0.1).get(SECONDS)
    assert set(profile.ranks) == {0}
    assert "mortals gpus=1" in profile.notes[0]
    assert "nothing was seen of it" in profile.notes[0]


@pytest.mark.slow
def test_a_mesh_stopped_before_or_during_a_profile_says_so(procs: Any) -> None:
    mesh = procs.spawn("short", Trainer)
    with monarch.profile(mesh) as profile:
        mesh.step.call(0.1).get(SECONDS)
        mesh.stop().get(SECONDS)
    assert profile.samples > 0
    with pytest.raises(RuntimeError, match=r"short was stopped .* spawn it again"), monarch.profile(mesh):
        pass


def test_profiling_no_mesh_or_at_an_odd_rate_is_refused(trainers: Any) -> None:
    with pytest.raises(TypeError, match="not a str"), monarch.profile("trainers"):  # type: ignore[arg-type]
        pass
    with pytest.raises(ValueError, match="between 0 and 1000"), monarch.profile(trainers, hz=0):
        pass


@pytest.mark.slow
def test_a_sampler_whose_samples_are_not_taken_ends_by_itself(trainers: Any) -> None:
    service = current_runtime().feature(PROFILING)
    with monarch.profile(trainers.slice(gpus=0)) as profile:
        until(lambda: profile.samples, "samples have come")
        service.forget(service._count)
        text = "import threading; 'monarch-profile' in [thread.name for thread in threading.enumerate()]"
        until(lambda: not run_on(trainers.slice(gpus=0), text).get(SECONDS).item(), "it has ended")
    assert profile.notes != []


@pytest.mark.slow
def test_torchs_traces_of_all_ranks_are_one_file(trainers: Any, tmp_path: Path) -> None:
    with monarch.profile(trainers, torch=True, folder=str(tmp_path)) as profile:
        trainers.multiply.call(3).get(SECONDS)
    assert profile.notes == []
    assert profile.trace is not None
    assert list(tmp_path.iterdir()) == [profile.trace]
    with gzip.open(profile.trace) as file:
        events = json.load(file)["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    products = [event for event in events if event["name"] == "aten::mm"]
    assert len(products) == 3 * RANKS
    assert {names[event["pid"]] for event in products} == {f"trainers gpus={rank} CPU" for rank in range(RANKS)}
    marks = [event["ts"] for event in events if event["name"] == "times 3" and event["ph"] == "X"]
    assert max(marks) - min(marks) < 20e6
