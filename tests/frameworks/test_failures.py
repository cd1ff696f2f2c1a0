"""What goes wrong on one rank of a training ends with its cause and its rank, and the next cell trains."""

from collections.abc import Iterator

import pytest

from monarch_nb.collectives.connections import CAN_CUT
from tests.frameworks.needs import need
from tests.frameworks.trainings import TRAININGS, Training
from tests.notebook.notebook import Cell, Notebook
from tests.polling import until

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.frameworks,
    pytest.mark.slow,
    pytest.mark.skipif(not CAN_CUT, reason="gloo's connections can be told apart on Linux alone"),
]
PIDS = "%%on spmd\nimport os; os.getpid()"
ENDLESS = 10_000_000
FIRST_IMPORT_S = 100  # Lightning and TRL import much


@pytest.fixture(scope="module")
def kernel() -> Iterator[Notebook]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MONARCH_NB_PRELOAD", raising=False)
        patch.setenv("MONARCH_NB_HEAL_MAX_RESTARTS", "1000")
        notebook = Notebook()
    try:
        yield notebook
    finally:
        notebook.close()


@pytest.fixture(params=TRAININGS, ids=lambda training: training.name)
def training(request: pytest.FixtureRequest) -> Training:
    value: Training = request.param
    need(*value.packages)
    return value


@pytest.fixture
def nb(kernel: Notebook, training: Training) -> Iterator[Notebook]:
    """A notebook that has trained once."""
    trains(kernel, training)
    yield kernel
    kernel.run("%interrupt spmd")


def trains(nb: Notebook, training: Training) -> None:
    assert "all 2 ranks: 'trained'" in nb.run(training.cell(), timeout=FIRST_IMPORT_S).ok().text


def findings(nb: Notebook) -> str:
    """The text of `%why`; it needs a wait that has lasted for a while."""
    text = ""

    def names_a_rank() -> bool:
        nonlocal text
        cell = nb.run("%why spmd").ok()
        text = f"{cell.stdout}{cell.text}"
        return "gpus=1" in text

    until(names_a_rank, "a finding")
    return text


def test_an_exception_comes_first_and_the_next_cell_trains(nb: Notebook, training: Training) -> None:
    before = nb.run(PIDS).ok().text
    failed = nb.run(training.cell("raises"))
    assert failed.error is not None
    assert failed.error["evalue"].startswith("The cell failed on 1 of 2 ranks of spmd: gpus=1")
    assert "ValueError: bad batch" in failed.traceback
    assert "pair.cc" not in failed.traceback
    trains(nb, training)
    assert nb.run(PIDS).ok().text == before


def test_after_a_heal_of_a_killed_rank_the_next_cell_trains(nb: Notebook, training: Training) -> None:
    survivor = nb.run(PIDS).ok().text.splitlines()[1]
    failed = nb.run(training.cell("dies"))
    assert "spmd, gpus=1 died: killed by signal 9 (SIGKILL)" in failed.traceback
    nb.run("%heal spmd").ok()
    trains(nb, training)
    assert nb.run(PIDS).ok().text.splitlines()[1] == survivor


def test_why_accuses_the_rank_that_hangs_in_its_data(nb: Notebook, training: Training) -> None:
    before = nb.run(PIDS).ok().text
    request = nb.start(training.cell("hangs"))
    nb.until(request, Cell(), "no more batches", timeout=60)
    nb.interrupt()
    nb.finish(request)
    assert "collated" in findings(nb)
    nb.run("%interrupt spmd").ok()
    trains(nb, training)
    assert nb.run(PIDS).ok().text == before


def test_after_stop_in_a_training_the_next_cell_trains(nb: Notebook, training: Training) -> None:
    before = nb.run(PIDS).ok().text
    request = nb.start(training.cell(steps=ENDLESS))
    nb.until(request, Cell(), "under way", timeout=60)
    nb.interrupt()
    nb.finish(request)
    nb.interrupt()
    assert "has not reacted" not in nb.shows(request, "Interrupted the cell on spmd", timeout=30)
    trains(nb, training)
    assert nb.run(PIDS).ok().text == before
