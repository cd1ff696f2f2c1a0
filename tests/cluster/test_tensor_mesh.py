"""Sharded tensors on two real processes: operations as on local tensors, and errors of those that cannot be."""

import copy
import fcntl
import gc
import os
import random
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import monarch_nb
from monarch_nb.actor import ProcMesh
from monarch_nb.distributed import CheckpointError, Mesh, MeshTensor, TensorError, load_safetensors, verify
from monarch_nb.tensor.commands import RunFunction
from tests.cluster.actor_tools import spawned
from tests.polling import until
from tests.unit.test_tensor_safetensors import write

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    for procs in spawned(2, "tensors"):
        yield Mesh.of(procs, ("data",))


def rows(mesh: Mesh, tensor: torch.Tensor) -> MeshTensor:
    """The tensor, cut along its first dimension."""
    return monarch_nb.distribute(tensor, mesh, ["data", *[None] * (tensor.dim() - 1)])


def test_wrong_shapes_and_names_of_meshes_say_what_is_accepted(mesh: Mesh) -> None:
    with pytest.raises(TypeError, match=r"Mesh\.of\(procs\)"):
        Mesh(mesh.procs)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="one name for each"):
        Mesh.of(mesh.procs, ("rows", "columns"))


def test_a_local_tensor_is_never_sent_without_a_word(mesh: Mesh) -> None:
    t = rows(mesh, torch.ones(4, 4))
    with pytest.raises(RuntimeError, match=r"local tensor of shape \(4, 4\).*monarch.distribute"):
        t + torch.ones(4, 4)
    assert (t * torch.tensor(2.0)).sum().item() == 32.0  # one of no dimension is a number
    copy.copy(torch.nn.Parameter(t, requires_grad=False)).add_(1)  # in the same memory, as of any tensor
    assert t.sum().item() == 32.0


def test_functions_that_make_tensors_make_them_on_the_mesh(mesh: Mesh) -> None:
    assert torch.arange(5, device=mesh.device).tolist() == [0, 1, 2, 3, 4]
    assert mesh.zeros(4, 2, sharding_spec=["data", None]).add_(1).tolist() == [[1.0, 1.0]] * 4
    with mesh:
        inside = torch.full((2, 2), 3.0)
    assert isinstance(inside, MeshTensor)
    assert torch.equal(torch.tensor([1, 2], device=mesh.device).cpu(), torch.tensor([1, 2]))


def test_whole_numbers_become_floats_of_the_default_dtype(mesh: Mesh) -> None:
    t = rows(mesh, numbers := torch.arange(5))
    try:
        for dtype in (torch.float32, torch.float64):
            torch.set_default_dtype(dtype)
            assert (t / 3).tolist() == (numbers / 3).tolist()
            assert [each.dtype for each in (mesh.zeros(2), t.logsumexp(0), t * 0.5)] == [dtype] * 3
            assert torch.hann_window(5, device=mesh.device).tolist() == torch.hann_window(5).tolist()
    finally:
        torch.set_default_dtype(torch.float32)


def test_inference_mode_is_as_good_as_no_grad(mesh: Mesh) -> None:
    t = rows(mesh, torch.arange(8.0).view(4, 2))
    with torch.inference_mode():
        made = torch.ones(2, device=mesh.device)
        assert (t[:, 1].tolist(), t.view(2, 4).sum().item(), f"{t.mean():.1f}") == ([1, 3, 5, 7], 28, "3.5")
        product = torch.nn.functional.linear(t, t[:1])
    assert product.placements == (Shard(0),)  # type: ignore[attr-defined]
    assert (made.add_(1).sum().item(), product.requires_grad_().sum().item()) == (4, 16)


def test_random_numbers_follow_from_the_seed_and_differ_between_shards(mesh: Mesh) -> None:
    torch.manual_seed(3)
    first = mesh.randn(6, 2, sharding_spec=["data", None]).full_tensor()
    torch.manual_seed(3)
    assert torch.equal(mesh.randn(6, 2, sharding_spec=["data", None]).full_tensor(), first)
    assert not torch.equal(first[:3], first[3:])
    replicas = mesh.randn(4).local_shards().values()
    assert torch.equal(*replicas)


def test_worker_failures_name_the_line_and_the_mesh_survives(mesh: Mesh) -> None:
    table = torch.nn.Embedding(4, 2).to(mesh.device)
    wrong = monarch_nb.distribute(torch.tensor([0, 99]), mesh)
    out = table(wrong)
    with pytest.raises(TensorError) as caught:
        out.sum().item()
    assert "embedding" in caught.value.operation
    assert sorted(caught.value.failures) == [0, 1]
    assert caught.value.origin is not None
    assert caught.value.origin.source == "out = table(wrong)"
    assert "IndexError: index out of range" in str(caught.value)
    assert rows(mesh, torch.ones(4, 4)).sum().item() == 16.0


def test_tensors_that_nobody_refers_to_go_on_the_workers_too(mesh: Mesh) -> None:
    gc.collect()  # tensors of earlier tests, which their errors hold in circles
    before = len(mesh.stream.table.live())
    t = rows(mesh, torch.ones(8, 8))
    for _ in range(10):
        t = t + 1
    mesh.synchronise()
    assert len(mesh.stream.table.live()) == before + 1
    [entry] = [record for record in mesh.stream.table.live() if record.number == t.reference.number]
    assert entry.origin is not None
    assert entry.origin.source == "t = t + 1"


def test_operations_behind_two_batches_are_sent_without_a_further_call(mesh: Mesh) -> None:
    for _ in range(2):
        mesh.stream.issue_object(RunFunction(time.sleep, (0.2,), {}))
        mesh.stream.flush()
    t = rows(mesh, torch.ones(8, 8)) + 1
    until(lambda: not mesh.stream.queue, "the addition is sent")
    assert t.sum().item() == 128.0


def test_each_process_reads_its_own_part_of_a_file(mesh: Mesh, tmp_path: Path) -> None:
    weight = torch.arange(24.0).view(6, 4)
    write(tmp_path / "model.safetensors", weight=weight, bias=torch.ones(4))
    loaded = load_safetensors(str(tmp_path), mesh, {"weight": ["data", None]})
    assert torch.equal(loaded["weight"].full_tensor(), weight)
    assert [shard.shape[0] for shard in loaded["weight"].local_shards().values()] == [3, 3]
    assert loaded["bias"].tolist() == [1.0] * 4


def test_a_shard_that_does_not_fit_is_reported_with_its_line(mesh: Mesh) -> None:
    tensor = mesh.from_parts(lambda part: torch.ones(5), size=(4,), sharding_spec=["data"])
    with pytest.raises(
        TensorError, match=r"a part of size \(2,\) and torch.float32 is expected here, but .* returned \(5,\)"
    ):
        tensor.full_tensor()


def test_one_process_of_a_mesh_is_a_mesh(mesh: Mesh) -> None:
    last = mesh.slice(data=1)
    assert (last.shape, last.mesh_dim_names) == ((1,), ("rank",))
    assert last.arange(4, sharding_spec=["rank"]).sum().item() == 6
    [pid] = last.execute(os.getpid).values()
    assert pid == mesh.execute(os.getpid).values()[1]


def test_views_follow_what_a_function_writes_before_it_fails(mesh: Mesh) -> None:
    def fill(shard: torch.Tensor) -> None:
        shard.fill_(7)
        raise ValueError("too late")

    t = rows(mesh, torch.zeros(6))
    view = t[1:4]
    assert view.tolist() == [0.0] * 3
    with pytest.raises(TensorError, match="too late"):
        mesh.execute(fill, t)
    assert (view + 0).tolist() == [7.0] * 3
    with pytest.raises(TensorError, match="too late"):
        mesh.execute(lambda shard: fill(shard.zero_().sub_(1)), view)
    assert t.tolist() == [7.0] * 6
    with pytest.raises(RuntimeError, match=r"one of them only, or a copy of the view: view\.clone"):
        mesh.execute(lambda first, second: first.fill_(3), t, view)
    assert mesh.execute(lambda first, second: float(first[0] + second.sum()), t, view.clone()).values()[0] > 7


class OnlyHere:
    """What no other process can load."""

    def __reduce__(self) -> tuple[object, ...]:
        return load_in, (os.getpid(),)


def load_in(pid: int) -> None:
    if os.getpid() != pid:
        raise ModuleNotFoundError("it is not installed here")


@pytest.mark.parametrize("how", ["execute", "from_parts", "remote"])
def test_calls_that_cannot_be_sent_or_loaded_lose_no_tensors(mesh: Mesh, how: str) -> None:
    t, lock = rows(mesh, torch.ones(4)), threading.Lock()
    calls: dict[str, Callable[[object], object]] = {
        "execute": lambda argument: mesh.execute(lambda *_: 1, t, argument),
        "from_parts": lambda argument: mesh.from_parts(
            lambda *_: torch.ones(2), argument, size=(4,), sharding_spec=["data"]
        ).tolist(),
        "remote": lambda argument: monarch_nb.remote(lambda *_: 1).call(t.per_rank(), argument).get(),
    }
    with pytest.raises(TypeError, match=r"cannot be sent: .*is a _thread\.lock"):
        calls[how](lock)
    assert t.tolist() == [1.0] * 4
    with pytest.raises(TensorError, match="not installed here"):
        calls[how](OnlyHere())
    assert t.tolist() == [1.0] * 4


def test_a_function_that_resizes_a_shard_is_refused_and_changes_nothing(mesh: Mesh) -> None:
    t = rows(mesh, torch.arange(6.0))
    for resize in (lambda shard: shard.resize_(1), lambda shard: shard.resize_(99), lambda shard: shard.unsqueeze_(0)):
        with pytest.raises(TensorError, match=r"^<lambda> failed .* changed the size of a tensor from \[3\] to "):
            mesh.execute(resize, t)
        assert (t + 0).tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_views_follow_what_is_restored(mesh: Mesh, tmp_path: Path) -> None:
    t = rows(mesh, torch.arange(6.0))
    view = t[1:4]
    assert view.tolist() == [1.0, 2.0, 3.0]
    full, part = (monarch_nb.checkpoint({"t": x}, folder=str(tmp_path / str(n))) for n, x in enumerate((t, view)))
    t.mul_(10)
    for saves in (full, part):
        saves.save(1)
        saves.wait()
    t.zero_()
    assert part.restore() == 1
    assert t.tolist() == [0.0, 10.0, 20.0, 30.0, 0.0, 0.0]
    assert full.restore() == 1
    assert view.tolist() == [10.0, 20.0, 30.0]
    assert t.tolist() == [10.0 * n for n in range(6)]


def limit_files(shard: torch.Tensor, size: int) -> None:
    """Limits the files that the first rank may write, as a full disk does; -1: no limit."""
    if shard[0] == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def test_a_save_that_fails_names_its_rank_and_leaves_nothing(mesh: Mesh, tmp_path: Path) -> None:
    rank, t = rows(mesh, torch.arange(2.0)), rows(mesh, torch.ones(64, 1024))
    saves = monarch_nb.checkpoint({"t": t}, folder=str(tmp_path))
    saves.save(1)
    saves.wait()
    mesh.execute(limit_files, rank, 1 << 16)
    saves.save(2)
    with pytest.raises(CheckpointError, match=r"rank 0 could not save into \S+: \w+: "):
        saves.wait()
    mesh.execute(limit_files, rank, -1)
    assert os.listdir(tmp_path) == ["step-00000001"]
    (tmp_path / "step-00000001" / "controller.pickle").write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match=r"of step 1 in \S+ cannot be read"):
        saves.restore()


def test_a_save_removes_what_interrupted_saves_left_and_no_others(mesh: Mesh, tmp_path: Path) -> None:
    saves = monarch_nb.checkpoint({"t": rows(mesh, torch.ones(4))}, folder=str(tmp_path))
    others = [tmp_path / f".step-00000007.{mark}.part" for mark in ("one", "two")]
    for other in others:
        other.mkdir()
        (other / ".saving").touch()
    with open(others[0] / ".saving", "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        saves.save(1)
        saves.wait()
        assert [other.exists() for other in others] == [True, False]
    saves.save(2)
    saves.wait()
    assert sorted(os.listdir(tmp_path)) == ["step-00000001", "step-00000002"]
    assert not (tmp_path / "step-00000002" / ".saving").exists()


def test_saves_that_nobody_could_restore_are_refused(mesh: Mesh, tmp_path: Path) -> None:
    t = mesh.zeros(2)
    saves = monarch_nb.checkpoint({"t": t}, folder=str(tmp_path))
    with pytest.raises(ValueError, match="0 or more, not -1"):
        saves.save(-1)
    with pytest.raises(TypeError, match="float"):
        saves.save(1.5)
    with pytest.raises(ValueError, match=r"two tensors of this state are named model\.a\.b"):
        monarch_nb.checkpoint({"a.b": t, "a": {"b": mesh.ones(2)}}, folder=str(tmp_path))


def test_a_slice_of_a_mesh_has_tensors_of_its_own(mesh: Mesh) -> None:
    half = mesh.slice(data=slice(1, 2))
    t = rows(half, torch.arange(4.0))
    assert (half.size(), t.sum().item(), t.device == mesh.device) == (1, 6.0, False)
    with pytest.raises(RuntimeError, match="tensors of two meshes"):
        t + mesh.ones(4)
    assert (t.to(mesh) + mesh.ones(4)).sum().item() == 10.0
    assert t.to(mesh).placements == (Shard(0),)


@pytest.mark.slow
def test_ctrl_c_at_any_moment_leaves_ranks_with_the_same_operations(mesh: Mesh) -> None:
    total, ones, issued, hits = mesh.zeros(2), mesh.ones(2), 0, 0
    chance, main = random.Random(0), threading.get_ident()

    def strike(after: float) -> None:
        time.sleep(after)
        signal.pthread_kill(main, signal.SIGINT)

    for _ in range(150):
        striker = threading.Thread(target=strike, args=(chance.random() * 0.01,))
        try:
            striker.start()
            while striker.is_alive():
                total.add_(ones)
                issued += 1
                if chance.random() < 0.01:
                    total.sum().item()
            striker.join()
        except KeyboardInterrupt:
            hits += 1
        striker.join()
        shards = [shard.tolist() for shard in total.local_shards().values()]
        assert shards[0] == shards[1]
        assert abs(shards[0][0] - issued) <= 1  # the one that the interrupt hit
        issued = int(shards[0][0])
    assert hits == 150


def test_processes_that_are_in_a_group_already_are_refused() -> None:
    def own_group() -> None:
        torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())

    procs: ProcMesh
    for procs in spawned(1, "taken"):
        procs.run(own_group).get()
        with pytest.raises(Exception, match="process group already"):
            Mesh.of(procs)


def test_a_step_is_verified_against_one_process(mesh: Mesh) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4).to(mesh.device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x, y = rows(mesh, torch.randn(5, 8)), rows(mesh, torch.randn(5, 4))

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    before = model.weight.full_tensor()
    report = verify(step)
    assert report, report
    assert report.tensors >= 5  # loss, weight, bias, x, y
    assert not torch.equal(model.weight.full_tensor(), before)  # the step was taken, once


def test_differences_from_local_results_are_named_with_their_index(mesh: Mesh) -> None:
    t = rows(mesh, torch.zeros(4, 2))

    def shift() -> torch.Tensor:
        return t + (1.0 if isinstance(t, MeshTensor) else 0.0)

    report = verify(shift)
    assert not report
    assert "is 1 at [0, 0], not 0" in repr(report)


def test_a_gradient_is_no_alias_of_what_backward_was_given(mesh: Mesh) -> None:
    weight = monarch_nb.distribute(torch.ones(4), mesh, ["data"]).detach().requires_grad_()
    gradient = monarch_nb.distribute(torch.arange(4.0), mesh, ["data"])
    for placements in ([Replicate()], [Shard(0)]):
        weight.grad = None
        torch.autograd.backward([weight.redistribute(placements)], [gradient])  # type: ignore[attr-defined]
        assert weight.grad is not None
        weight.grad.mul_(2)
        assert gradient.full_tensor().tolist() == [0.0, 1.0, 2.0, 3.0]
