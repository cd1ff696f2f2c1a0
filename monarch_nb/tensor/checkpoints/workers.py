"""Worker side of checkpoints and state dicts: writes and reads shards with torch.distributed.checkpoint."""

import fcntl
import os
import re
import secrets
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as read_shards
from torch.distributed.checkpoint.state_dict_saver import save as write_shards
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from monarch_nb._private import try_lock
from monarch_nb.runtime import current_runtime
from monarch_nb.tensor.commands import mapped
from monarch_nb.tensor.groups.service import GROUPS
from monarch_nb.tensor.propagation import one_piece_each, placed_otherwise

_saves: dict[str, "Save"] = {}  # by folder, the last save
_groups: dict[str, tuple[int, dist.ProcessGroup]] = {}  # by mesh: generation and group
REST = "controller.pickle"  # the state without sharded tensors
_COMPLETE = re.compile(r"step-(\d+)")
_ATTEMPT = re.compile(r"\.step-\d+\.\w+\.part")
_SAVING = ".saving"  # a file in an attempt, locked while the first rank's process saves
T = TypeVar("T")
State = dict[str, Any]  # nested: tensors and anything else, by name


def all_of(kind: type[T], value: object) -> Iterator[T]:
    """Yields all items of a type in a state, in order."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from all_of(kind, item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from all_of(kind, item)


class Save:
    """A save that runs concurrently with operations, in a process group of its own, on copies of the shards."""

    def __init__(self, state: dict[str, DTensor], folder: str, step: int, mark: str, rest: bytes, keep: int) -> None:
        self.error = ""
        self._state = {name: _cpu_copy(tensor) for name, tensor in state.items()}
        self._group, self._is_first = group_of(next(iter(state.values())).device_mesh)
        self._path, self._step, self._rest, self._keep = attempt(folder, step, mark), step, rest, keep
        self._thread = threading.Thread(target=self._run, name="monarch-checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> str:
        """Blocks until this rank's part is done; returns its error, or ""."""
        self._thread.join()
        return self.error

    def _run(self) -> None:
        try:
            with _in_progress(self._path) if self._is_first else nullcontext():
                write_shards(self._state, checkpoint_id=self._path, process_group=self._group)
                if self._is_first:  # the save ends after all ranks have written
                    finish(self._path, self._step, self._rest, self._keep)
        except BaseException as error:
            own: BaseException | None = error
            if isinstance(error, CheckpointException):  # of any ranks; each reports its own
                own, _ = error.failures.get(dist.get_rank(self._group), (None, None))
            self.error = "" if own is None else f"{type(own).__name__}: {own}"
            if self._is_first:  # a disk that is full stays so otherwise
                shutil.rmtree(self._path, ignore_errors=True)
        finally:
            self._state.clear()


def save(state: dict[str, DTensor], folder: str, step: int, mark: str, rest: bytes, keep: int) -> None:
    """Starts to save, after an earlier save into the folder. Raises RuntimeError if that one failed."""
    error = finished(folder)
    _saves[folder] = Save(state, folder, step, mark, rest, keep)
    if error:
        raise RuntimeError(f"the checkpoint before that of step {step} was not saved: {error}")


def ready(tensors: dict[str, object]) -> None:
    """Does nothing; runs once all of these tensors have been made."""


def finished(folder: str) -> str:
    """Blocks until a save in progress is done; returns its error, or ""."""
    pending = _saves.pop(folder, None)
    return pending.wait() if pending is not None else ""


def find(folder: str, step: int | None) -> tuple[int, bytes] | None:
    """Returns the step of a complete checkpoint, the latest or `step`, and its state without sharded tensors."""
    steps = complete(folder)
    if step is None and steps:
        step = steps[-1]
    if step is None or step not in steps:
        return None
    return step, (path_of(folder, step) / REST).read_bytes()


def load(state: dict[str, DTensor], folder: str, step: int) -> None:
    """Reads into existing tensors, whatever mesh and placements they were saved with."""
    group, _ = group_of(next(iter(state.values())).device_mesh)
    with _raising_cause(), read_in_pieces(state) as pieces:
        read_shards(pieces, checkpoint_id=path_of(folder, step), process_group=group)


def in_pieces(tensor: DTensor) -> DTensor:
    """Returns the tensor with one piece of the whole on each rank, as in files.

    The result is new if ranks hold several pieces, as of attention heads, or parts of a sum; then all ranks call it.
    """
    pieces = one_piece_each(tensor.placements)
    return tensor if pieces == tuple(tensor.placements) else placed_otherwise(tensor, pieces)


@contextmanager
def read_in_pieces(state: State) -> Iterator[State]:
    """Yields the state to read into, of tensors in pieces; then copies the values into these tensors."""
    pairs: list[tuple[DTensor, DTensor]] = []

    def piecewise(leaf: object) -> object:
        pieces = in_pieces(leaf) if isinstance(leaf, DTensor) else leaf
        if isinstance(leaf, DTensor) and isinstance(pieces, DTensor) and pieces is not leaf:
            pairs.append((leaf, pieces))
        return pieces

    yield mapped(state, piecewise)
    for tensor, pieces in pairs:
        tensor._local_tensor.copy_(placed_otherwise(pieces, tensor.placements)._local_tensor)


def _cpu_copy(tensor: DTensor) -> DTensor:
    tensor = in_pieces(tensor)
    local = tensor.to_local().detach().to("cpu", copy=True)
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def group_of(mesh: DeviceMesh) -> tuple[dist.ProcessGroup, bool]:
    """Returns a group of the ranks of a mesh for files only, and whether this is its first rank."""
    ranks = mesh.mesh.flatten().tolist()
    member = current_runtime().feature(GROUPS).membership
    assert member is not None  # only ranks of a mesh save and load
    world = member.world
    name = f"checkpoints of {ranks}"
    generation, group = _groups.get(name, (-1, None))
    if group is None or generation != world.generation:
        group = world.own_group(name, ranks)
        _groups[name] = (world.generation, group)
    return group, ranks[0] == world.rank


def attempt(folder: str, step: int, mark: str) -> Path:
    """Returns the path of an incomplete checkpoint."""
    return Path(folder) / f".step-{step:08}.{mark}.part"


def complete(folder: str) -> list[int]:
    """Returns the steps of complete checkpoints, the oldest first."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    matches = (_COMPLETE.fullmatch(name) for name in names)
    return sorted(int(match[1]) for match in matches if match and (Path(folder) / match[0] / REST).exists())


def path_of(folder: str, step: int) -> Path:
    """Returns the path of a complete checkpoint."""
    return Path(folder) / f"step-{step:08}"


def finish(written: Path, step: int, rest: bytes, keep: int) -> None:
    """Completes a checkpoint that all ranks have written; removes all but it and the latest others, `keep` together.

    Raises OSError.
    """
    folder = written.parent
    with open(written / REST, "wb") as file:
        file.write(rest)
        file.flush()
        os.fsync(file.fileno())
    final = path_of(str(folder), step)
    if final.exists():  # saved before at the same step
        _withdraw(final)
    os.replace(written, final)
    (final / _SAVING).unlink(missing_ok=True)
    _sync(folder)
    steps = [number for number in complete(str(folder)) if number != step]
    for old in steps[: max(0, len(steps) + 1 - keep)]:
        _withdraw(path_of(str(folder), old))
    for name in os.listdir(folder):
        if _ATTEMPT.fullmatch(name) and not _is_in_progress(folder / name):  # left by an interrupted save
            shutil.rmtree(folder / name, ignore_errors=True)


@contextmanager
def _in_progress(written: Path) -> Iterator[None]:
    """Marks a checkpoint as one that this process writes, for other programs that save into the folder."""
    written.mkdir(parents=True, exist_ok=True)
    with open(written / _SAVING, "wb") as file:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)  # processes that were forked meanwhile have it open, too


def _is_in_progress(attempt: Path) -> bool:
    with suppress(OSError), open(attempt / _SAVING, "r+b") as file:
        return not try_lock(file.fileno())
    return False


def _withdraw(checkpoint: Path) -> None:
    """Makes a checkpoint an incomplete one, at once: if the program ends while files are removed, it counts as none."""
    os.rename(checkpoint, attempt(str(checkpoint.parent), int(checkpoint.name[5:]), secrets.token_hex(4)))


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write(state: State, path: str, aside: str) -> None:
    """Saves a state to `aside`, which is renamed to `path` when it is complete."""
    group, first = _group(state)
    state = mapped(state, lambda leaf: in_pieces(leaf) if isinstance(leaf, DTensor) else leaf)
    with _raising_cause():
        try:
            write_shards(state, checkpoint_id=aside, process_group=group)
            if first:
                before = f"{aside}.before"
                if os.path.isdir(path):
                    os.rename(path, before)
                os.rename(aside, path)
                shutil.rmtree(before, ignore_errors=True)
        except BaseException:
            if first:
                shutil.rmtree(aside, ignore_errors=True)
            raise


def read(state: State, path: str) -> object:
    """Loads shards in place. The first rank returns the other values, with None for shards."""
    if not os.path.exists(os.path.join(path, ".metadata")):  # of which PyTorch writes a page for each rank
        raise FileNotFoundError(f"there is no complete checkpoint in {path}: it has no file .metadata")
    group, first = _group(state)
    with _raising_cause(), read_in_pieces(state) as pieces:
        read_shards(pieces, checkpoint_id=path, process_group=group)
        return mapped(pieces, _without_shards) if first else None


@contextmanager
def _raising_cause() -> Iterator[None]:
    """Raises the error of a rank in place of CheckpointException."""
    try:
        yield
    except CheckpointException as error:
        cause, _ = next(iter(error.failures.values()))
        raise RuntimeError(f"{type(cause).__name__}: {cause}") from cause


def _group(state: State) -> tuple[dist.ProcessGroup, bool]:
    return group_of(next(iter(all_of(DTensor, state))).device_mesh)


def _without_shards(leaf: object) -> object:
    return None if isinstance(leaf, DTensor) else leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf
