"""The simulator in a real kernel: display() draws what ranks do."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.notebook.notebook import Notebook

pytestmark = pytest.mark.timeout(120)

PROGRAM = """
import torch, monarch
simulator = monarch.Simulator(hosts=1, gpus=2, trace_path={path!r})
comms = monarch.Stream("<comms>")
def simulate():
    with simulator.mesh.activate():
        t = torch.rand(100, 100)
        for _ in range(300):
            t = t @ t
        shared, borrow = comms.borrow(t)
        with comms.activate():
            shared.clone().reduce("gpu")
        borrow.drop()
        simulator.display()
simulate()
"""


@pytest.mark.slow
def test_display_draws_streams_and_memory_and_names_the_trace(nb: Notebook, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    cell = nb.run(PROGRAM.format(path=str(path))).ok()
    [shown] = cell.displays
    html = shown["text/html"]
    assert "<script" not in html
    assert f"{path} opens in ui.perfetto.dev" in html
    assert path.exists()
    svg = ElementTree.fromstring(html[html.index("<svg") : html.index("</svg>") + 6])
    texts = [text for element in svg.iter() if (text := element.text)]
    assert [text for text in texts if text in ("ranks 0-1", "main", "<comms>", "memory")] == [
        "ranks 0-1",
        "main",
        "<comms>",
        "memory",
    ]
    assert "reduce: 3020-3120 µs" in texts
    assert shown["text/plain"].startswith("<Simulator {host=1, gpu=2}: 3120 µs")


def test_a_simulator_is_also_shown_as_a_value(nb: Notebook) -> None:
    assert "<svg" in nb.run("import monarch; monarch.Simulator(1, 1)").ok().html
