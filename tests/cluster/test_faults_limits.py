"""Exhausted resources: descriptors, memory and disk; and a slow receiver."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from monarch_nb.actor import ActorError, MeshFailure, SupervisionError
from monarch_nb.settings import settings
from tests.cluster.fault_tools import SOON, Program, Worker, spawned, still_works
from tests.cluster.memory_group import memory_group
from tests.polling import until

pytestmark = [pytest.mark.long, pytest.mark.timeout(120)]


class Hoarder(Worker):
    """Opens files until no descriptors are left."""

    def __init__(self) -> None:
        super().__init__()
        self.files: list[int] = []

    from monarch_nb.actor import endpoint

    @endpoint
    def hoard(self) -> int:
        import resource

        resource.setrlimit(resource.RLIMIT_NOFILE, (200, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        with contextlib.suppress(OSError):
            while True:
                self.files.append(os.open(os.devnull, os.O_RDONLY))
        return len(self.files)

    @endpoint
    def release(self) -> None:
        while self.files:
            os.close(self.files.pop())

    @endpoint
    def large(self) -> Any:
        return np.ones(10**6)

    @endpoint
    def ask(self, peer: Any) -> int:
        return int(peer.rank.call_one().get(SOON))


@pytest.mark.slow
def test_no_descriptors_left_in_the_controller() -> None:
    with Program("descriptors") as program:
        program.line("done")
        assert len([line for line in program.said if line.startswith("refused")]) == 2, program.said
        assert program.end() == 0


@pytest.mark.parametrize("only_some", ["some", pytest.param("", marks=pytest.mark.slow)])
def test_few_descriptors_in_the_controller_end_in_named_errors_without_waiting(only_some: str) -> None:
    with Program("few_descriptors", only_some) as program:
        program.line("done")
        assert only_some or "large 0 DescriptorLimitError\n" in program.said, program.said
        assert "large 2 DescriptorLimitError\n" in program.said, program.said  # the argument had room, the answer none
        assert "spawn 0 DescriptorLimitError\n" in program.said, program.said
        assert program.end() == 0


@pytest.mark.slow
def test_no_descriptors_left_in_a_process(host: Any, shown: list[MeshFailure]) -> None:
    with spawned(host, name="hoard") as procs, spawned(host, 1, "near") as peers:
        actors, peer = procs.spawn("hoard", Hoarder), peers.spawn("near", Worker)
        hoarder = actors.slice(gpus=1)
        assert hoarder.hoard.call_one().get(SOON) > 50
        assert actors.rank.call().get(SOON).values() == [0, 1]
        assert hoarder.echo.call_one("small").get(SOON) == "small"
        with pytest.raises((SupervisionError, ActorError), match="no file descriptors left") as caught:
            hoarder.echo.call_one(np.zeros(10**6)).get(SOON)
        text = str(caught.value)
        for part in ("was lost on its way", "mesh      hoard, gpus=1", "host      ", "ulimit -n", "call hoard again"):
            assert part in text, text
        hoarder.note.broadcast(np.zeros(10**6))
        until(lambda: shown, "the loss of what nobody waits for is shown")
        assert shown[0].crashed_ranks == [1]
        assert hoarder.echo.call_one("next").get(SOON) == "next"  # no gap in the numbers
        with pytest.raises(ActorError, match=r"no file descriptors left for a memory file"):
            hoarder.large.call_one().get(SOON)
        with pytest.raises(ActorError, match=r"no file descriptors left for a connection to"):
            hoarder.ask.call_one(peer).get(SOON)
        hoarder.release.call_one().get(SOON)
        assert hoarder.echo.call_one(np.ones(10**6)).get(SOON).sum() == 10**6
        begin = time.monotonic()
        assert hoarder.ask.call_one(peer).get(SOON) == 0
        assert time.monotonic() - begin < settings.message_delivery_timeout / 2, "no gap in these numbers either"
        assert actors.rank.call().get(SOON).values() == [0, 1]


@pytest.mark.slow
def test_when_memory_runs_out_ranks_die_first_in_one_report() -> None:
    with memory_group() as group:
        environment = {**os.environ, "MONARCH_NB_PRELOAD": "numpy"}
        program = Program("memory_runs_out", group.folder, 12, 200 << 20, preexec_fn=group.enter, env=environment)
        with program:
            score = Path("/proc/self/oom_score_adj").read_text().strip()
            assert program.line("scores") == f"{ {1000} } {{{score}}}"
            assert program.line("raised") == "True"
            kills, reports = program.line("kills").split(" reports ")
            assert int(kills) >= 2, program.said
            assert reports == f"[(True, {kills})]"
            assert program.line("ended") == f"{kills} agent True"
            assert program.line("healed") == "12"
            program.line("done")
            assert "shown False\n" not in program.said, program.said
            assert program.end() == 0


@pytest.mark.slow
def test_no_memory_for_a_large_argument() -> None:
    with Program("memory") as program:
        program.line("done")
        assert [line for line in program.said if "refused no memory for a buffer of 8 MiB" in line][1:], program.said
        assert program.end() == 0


def test_no_memory_for_a_large_result(host: Any) -> None:
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))"
    with spawned(host, name="tight", setup=limit) as procs:
        actors = procs.spawn("tight", Maker)
        with pytest.raises((ActorError, SupervisionError), match="no memory for a buffer of 8 MiB"):
            actors.make.call(10**6).get(SOON)
        assert [array.shape for array in actors.make.call(1000).get(SOON).values()] == [(1000,)] * 2


class Maker(Worker):
    from monarch_nb.actor import endpoint

    @endpoint
    def make(self, count: int) -> Any:
        return np.ones(count)


@pytest.mark.slow
def test_a_result_of_eighty_megabytes(duo: Any) -> None:
    makers = duo.spawn("makers", Maker)
    for array in makers.make.call(10**7).get(SOON).values():
        assert array.shape == (10**7,)
        assert array[0] == array[-1] == 1
        array[0] = 2  # it is writable


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 512 KiB, if this user may mount one."""
    folder = Path(f"/tmp/md{os.getpid() % 10000}")
    folder.mkdir(mode=0o700)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k,mode=0700", "none", folder], capture_output=True)
    if done.returncode:
        folder.rmdir()
        pytest.skip("this user may not mount a disk")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)
    folder.rmdir()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="mounts a small disk")
def test_a_full_disk_leaves_no_run_folder_behind(small_disk: Path) -> None:
    with Program("full_disk", small_disk, env={**os.environ, "XDG_RUNTIME_DIR": str(small_disk)}) as program:
        program.line("done")
        assert program.end() == 0
        assert not list(small_disk.glob("mnb-*"))


DETACH_ON_A_FULL_DISK = """
import os, sys
from monarch_nb.actor import this_host
from monarch_nb.connect import Detacher
from monarch_nb.runtime import current_runtime
from monarch_nb import configure

disk = sys.argv[1]
procs = this_host().spawn_procs(per_host={"gpus": 2}, name="fleet")
procs.initialized.get(30)
filler = open(f"{disk}/filler", "wb", buffering=0)
try:
    while filler.write(bytes(4096)): pass
except OSError:
    pass
configure(mesh_keep="1h")
print("kept", current_runtime().part(Detacher).refresh())
try:
    procs.detach("1h")
except RuntimeError as error:
    print("detach", error)
os.truncate(filler.fileno(), 0)
print("kept", current_runtime().part(Detacher).refresh())
procs.detach("2s")
print("left")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="mounts a small disk")
def test_no_mesh_is_detached_without_a_record(small_disk: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", DETACH_ON_A_FULL_DISK, str(small_disk)], capture_output=True, text=True, check=False,
        timeout=100, env={**os.environ, "XDG_STATE_HOME": str(small_disk)},
    )  # fmt: skip
    before, refused, after, last = done.stdout.splitlines()
    record = f"{small_disk}/monarch-nb/meshes/fleet."
    for line in (before, refused):
        assert record in line
        assert "cannot be written: No space left on device. Make room there, or set XDG_STATE_HOME" in line
    assert refused.startswith("detach fleet is not detached: its record ")
    assert (after, last) == ("kept {}", "left")
    assert "fleet would end with this process: its record" in done.stderr


def test_a_limit_on_the_size_of_files(host: Any) -> None:
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))"
    with spawned(host, name="short", setup=limit) as procs:
        actors = procs.spawn("short", Worker)
        for _ in range(3):
            assert actors.say.call("x" * 30_000).get(SOON).values() == [30_000] * 2
        assert actors.rank.call().get(SOON).values() == [0, 1]
    still_works(host)


@pytest.mark.slow
def test_a_receiver_that_takes_nothing_holds_up_its_sender() -> None:
    with Program("slow_receiver") as program:
        backlog = int(program.line("done"))
        assert backlog > 10
        assert program.end() == 0
