"""What type checkers and editors know of meshes: an actor class is typed as an object and as a mesh of them."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.sources
ROOT = Path(__file__).parents[2]

# A type after `#:` is what mypy reveals there; a word in brackets is the error that it reports.
PROGRAM = """
from monarch_nb.actor import (
    Actor, Port, as_endpoint, concurrent_endpoint, endpoint, get_or_spawn_controller, returns_future, this_host
)


class Trainer(Actor):
    def __init__(self, lr: float) -> None:
        self.lr = lr

    @endpoint
    def step(self, x: int, *, scale: float = 1.0) -> str:
        return self.plain(x)

    @endpoint(instrument=False)
    def quiet(self) -> int:
        return 1

    @endpoint(explicit_response_port=True)
    def by_port(self, port: Port[bytes], x: int) -> None:
        port.send(b"")

    def plain(self, x: int) -> str:
        return str(x)


class Loader(Actor):
    @endpoint
    async def load(self, path: str) -> list[int]:
        return [len(path)]

    @concurrent_endpoint
    async def peek(self) -> float:
        return 0.0

    @endpoint(explicit_response_port=True)
    async def by_port(self, port: Port[bytes], x: int) -> None:
        port.send(b"")


procs = this_host().spawn_procs(per_host={"gpus": 2})
trainers = procs.spawn("trainers", Trainer, 0.1)
loaders = procs.spawn("loaders", Loader)

reveal_type(trainers)  #: program.Trainer
reveal_type(trainers.step)  #: Endpoint[[x: int, *, scale: float =], str]
reveal_type(trainers.step.call(1, scale=2.0))  #: Future[ValueMesh[str]]
reveal_type(trainers.step.call_one(1))  #: Future[str]
reveal_type(trainers.step.choose(1))  #: Future[str]
reveal_type(trainers.step.stream(1))  #: Iterator[Future[str]]
reveal_type(trainers.step.broadcast)  #: def (x: int, *, scale: float =)
reveal_type(trainers.step.options(timeout=5).call(1).get().item(gpus=0))  #: str
reveal_type(trainers.quiet.call_one())  #: Future[int]
reveal_type(trainers.by_port.call(3))  #: Future[ValueMesh[bytes]]
reveal_type(as_endpoint(trainers.plain).call_one(1))  #: Future[str]
trainers.step.call("no")  #: [arg-type]
trainers.step.call()  #: [call-arg]
trainers.stepp  #: [attr-defined]

reveal_type(loaders.load.call("x"))  #: Future[ValueMesh[list[int]]]
reveal_type(loaders.peek.call_one())  #: Future[float]
reveal_type(loaders.by_port.call_one(3))  #: Future[bytes]
reveal_type(get_or_spawn_controller("l", Loader).get().load.call_one("x"))  #: Future[list[int]]

reveal_type(trainers.slice(gpus=0).step.call_one(1))  #: Future[str]
reveal_type(trainers.size("gpus"))  #: int
reveal_type(trainers.extent)  #: Extent
reveal_type(trainers.initialized)  #: Future[None]
reveal_type(trainers.stop("done"))  #: Future[None]
reveal_type(Trainer(0.1).plain(1))  #: str
reveal_type(trainers.step.call_one(1).cancel())  #: bool


async def main() -> None:
    reveal_type(await loaders.load.call_one("x"))  #: list[int]
    reveal_type([value for _, value in await trainers.step.call(1)])  #: list[str]
"""


@pytest.fixture(scope="module")
def messages(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """mypy's messages, by line."""
    if importlib.util.find_spec("mypy") is None:
        pytest.skip("mypy is not installed")
    program = tmp_path_factory.mktemp("typing") / "program.py"
    program.write_text(PROGRAM)
    # Installed packages are left out: torch alone takes as long to check as all else.
    # So its cache is not that of `make check` either.
    options = ["--config-file", "pyproject.toml", "--no-pretty", "--no-site-packages", "--cache-dir", "build/mypy"]
    command = [sys.executable, "-m", "mypy", "--strict", *options, str(program)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = re.findall(rf"{program.parent.name}/program\.py:(\d+): (?:error|note): (.*)", done.stdout)
    assert lines, done.stdout + done.stderr
    return {int(line): re.sub(r"\b(?:monarch_nb|typing)(?:\.\w+)*\.(?=\w)", "", text) for line, text in lines}


@pytest.mark.slow
@pytest.mark.timeout(300)  # without a cache, the library is checked first
def test_calls_and_spawned_meshes_are_typed_for_parameters_and_results(messages: dict[int, str]) -> None:
    hints = {number: line.partition("#: ")[2] for number, line in enumerate(PROGRAM.splitlines(), 1) if "#: " in line}
    types = {
        number: revealed[1] if (revealed := re.search('Revealed type is "(.*)"', text)) else f"[{text.split('[')[-1]}"
        for number, text in messages.items()
    }
    assert types == hints


def test_at_run_time_the_types_cost_nothing() -> None:
    import monarch_nb.actor
    import monarch_nb.runtime

    for name in ("Actor", "endpoint", "concurrent_endpoint"):
        assert getattr(monarch_nb.actor, name) is getattr(monarch_nb.runtime, name)
