"""Which cell output belongs to."""

import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest

from monarch_kernel.output import Cells
from monarch_kernel.output.cell_output import MOST_CELLS, CallCells
from monarch_nb.mesh.mesh_events import MeshEvents, MeshSpawned, MeshStopped
from monarch_nb.runtime import ProcState
from monarch_nb.shape import Extent
from monarch_nb.wire import Layout


@pytest.mark.parametrize("seed", range(10))
def test_each_call_belongs_to_the_cell_that_ran_when_it_began(seed: int) -> None:
    chance = random.Random(seed)
    cells, numbers = CallCells("loading"), itertools.count()
    expected: dict[int, str] = {}
    running = "loading"
    for number in range(300):
        for _ in range(chance.randrange(4)):
            expected[next(numbers)] = running
        running = f"cell {number}"
        cells.begin(next(numbers), running)
    assert {call: cells.of(call) for call in expected} == expected


def test_only_the_latest_cells_are_kept_for_late_output() -> None:
    cells = CallCells(0)
    for number in range(1, MOST_CELLS + 100):
        cells.begin(number * 10, number)
    assert cells.of(10 * (MOST_CELLS + 99) + 5) == MOST_CELLS + 99
    assert cells.of(10_000_000) == MOST_CELLS + 99
    assert cells.of(5) == cells.of(1000) == 100


class Kernel:
    """A kernel whose cells have the names that a test gives; it has spawned a mesh."""

    def __init__(self, has_displays: bool = True) -> None:
        self.front: Any = SimpleNamespace(parent="loading", has_displays=has_displays, beginning=[])
        self.events = MeshEvents()
        numbers = itertools.count(100)
        self.initialized = SimpleNamespace(done=lambda: self.ready)
        self.ready = False
        spawn_spec = SimpleNamespace(initialized=self.initialized)
        region = Extent(["gpus"], [2]).region
        self.procs = ProcState("p", "workers", region, "h/c", layout=Layout("p", ("h",), 2), spawn_spec=spawn_spec)
        self.runtime: Any = SimpleNamespace(
            address="h/c1.0.0",
            new_call=lambda: f"h/c1.0.0:{next(numbers)}",
            part=lambda _: self.events,
            meshes={"p": self.procs},
        )
        self.cells = Cells(self.front, self.runtime)

    def begin(self, cell: str) -> str:
        """A cell begins; gives a call of its own."""
        self.front.parent = cell
        for begin in tuple(self.front.beginning):
            begin()
        return str(self.runtime.new_call())


def test_late_output_goes_to_the_cell_of_its_call() -> None:
    kernel = Kernel()
    first, second = kernel.begin("first"), kernel.begin("second")
    assert (kernel.cells.of("h/p.0.0", first), kernel.cells.of("h/p.0.0", second)) == ("first", "second")


def test_output_of_no_call_goes_to_the_spawning_or_running_cell() -> None:
    kernel = Kernel()
    kernel.begin("spawning")
    kernel.events.publish(MeshSpawned(kernel.procs))
    kernel.begin("later")
    assert kernel.cells.of("h/p.0.0", "") == "spawning"
    kernel.ready = True
    assert kernel.cells.of("h/p.0.0", "") is None
    assert kernel.cells.of("h/p.0.0", "h/other.0.0:3") is None, "a call of another process"
    kernel.procs.stopped = "stopped by client"
    kernel.events.publish(MeshStopped(kernel.procs))
    assert kernel.cells.of("h/p.0.0", "") == kernel.cells.of("h/gone.0.0", "") == "later"


def test_a_terminal_shows_everything_and_a_closed_one_stops_watching() -> None:
    kernel = Kernel(has_displays=False)
    kernel.begin("now")
    assert kernel.cells.of("h/p.0.0", "") == "now"
    kernel.cells.close()
    assert (kernel.front.beginning, kernel.events.listeners) == ([], [])
