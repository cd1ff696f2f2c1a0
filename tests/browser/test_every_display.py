"""Every kind of display in cells, dialogs and the launcher: by axe-core, in narrow pages and at 200 % zoom."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.browser.lab import SCREENSHOTS, Desk, Lab, capture, opened, panel_built, theme, write_notebook
from tests.browser.test_panel import ACTORS, Panel
from tests.browser.test_panel_actions import AXE, CHECK, MESH, RULES, unfold

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    # The browser's driver leaves objects of its own to the collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]
THEMES = ["JupyterLab Light", "JupyterLab Dark", "JupyterLab Dark High Contrast"]
TRAINERS = (
    ACTORS
    + """
    @endpoint
    def learn(self):
        from monarch.telemetry import log
        for step in range(20):
            log(step=step, loss=1 / (step + 1))

    @endpoint
    def divide(self, number):
        return 1 / number

trainers = workers.spawn("trainers", Trainer)
trainers.learn.call().get()
"""
)
MOVED = """
from monarch.rdma import RDMABuffer
class Keeper(Actor):
    @endpoint
    def offer(self):
        self.kept = bytearray(4_000_000)
        return RDMABuffer(self.kept)
    @endpoint
    def pull(self, buffer):
        buffer.read_into(bytearray(buffer.size())).get()
keepers = workers.spawn("keepers", Keeper)
buffers = list(keepers.offer.call().get().values())
keepers.slice(gpus=1).pull.call_one(buffers[0]).get()
%transfers
"""
PLACED = """
from monarch.tensor.placement import Replicate, Shard, place
place((1024, 1024), "float32", 4, ("data", "model"), (4, 2), [Shard(0), Replicate()])
"""
SHARDED = """
import torch, monarch
from monarch.distributed import Mesh
pair = Mesh(shape=(2,), mesh_dim_names=("data",), name="pair")
halves = monarch.distribute(torch.tensor([[1.0, 2.0], [3.0, float("nan")]]), pair, ["data", None])
halves
"""
# The code of a cell, and a selector of its output.
DISPLAYS = {
    "%monarch": ".mnb",
    "%monarch doctor": ".mnb",
    "%meshes": ".mnb",
    "workers": ".mnb-cell",
    "trainers.pid.call().get()": ".jp-OutputArea-output",
    "%%on workers\nx = rank\nx": ".jp-OutputArea-output",
    "%metrics trainers": ".mnb-chart canvas",
    "%%timeline trainers\ntrainers.step.call(0.2).get()": ".mnb-tl-view svg",
    "%logs trainers": ".mnb-line",
    "%%prof trainers\ntrainers.step.call(0.3).get()": ".mnb",
    "%why": ".jp-OutputArea-output",
    PLACED: ".mnb-drawing",
    MOVED: ".mnb-matrix, .mnb-transfers table",
    SHARDED: ".mnb-drawing",
    "%tensors": ".mnb-list",
    "trainers.slice(gpus=slice(1, 3)).divide.call(0).get()": ".mnb-failure",
    "trainers.slice(gpus=2).divide.broadcast(0)": ".mnb-failure",
    "%failures": ".mnb-failure",
    "from monarch_kernel.display.meshes import mesh_html\nfrom IPython.display import HTML\n"
    "HTML(mesh_html(workers))": ".mnb table",
}
# Our displays, without the elements of the notebook around them, such as the text of errors.
OURS = [".jp-Notebook .jp-OutputArea-output .mnb", ".jp-Notebook .jp-OutputArea-output .mnb-v"]
# Elements beyond the right edge of their display, or of the dialog, and out of reach of its scroll bar.
BEYOND = """selectors => {
    const scrolls = (node, root) => {
        for (let at = node.parentElement; at && root.contains(at); at = at.parentElement) {
            const {overflowX, textOverflow} = getComputedStyle(at);
            if (overflowX === "auto" || overflowX === "scroll" || textOverflow === "ellipsis") return true;
        }
        return false;
    };
    const found = [];
    for (const root of document.querySelectorAll(selectors)) {
        if (root.parentElement.closest(selectors)) continue;
        const edge = Math.min(root.parentElement.getBoundingClientRect().right, innerWidth) + 1;
        for (const node of [root, ...root.querySelectorAll("*:not(svg *)")]) {
            const {right, width} = node.getBoundingClientRect();
            if (width && right > edge && node.checkVisibility() && !scrolls(node, root))
                found.push(`${root.className} ${node.tagName}.${node.className}: ${Math.round(right - edge)} px`);
        }
    }
    return found;
}"""
# A window of 1,280 by 1,000 px at 200 %, and the narrowest page that must work.
SIZES = {"zoomed": (640, 500), "narrow": (320, 800)}


class Everything:
    """A notebook with a display of each kind, and the page that it is in."""

    def __init__(self, shown: Any) -> None:
        self.shown = shown
        self.panel = Panel(Lab(shown))
        self._before = shown.viewport_size

    def run(self) -> None:
        lab = self.panel.lab
        lab.run(MESH)
        lab.run(TRAINERS)
        for code, selector in DISPLAYS.items():
            output = lab.start(code)
            lab.idle()
            output.locator(selector).first.wait_for(timeout=60_000)

    def resize(self, size: str) -> None:
        width, height = SIZES[size]
        self.shown.set_viewport_size({"width": width, "height": height})
        self.shown.wait_for_function("width => innerWidth === width", arg=width)

    def back(self) -> None:
        self.shown.set_viewport_size(self._before)
        self.shown.keyboard.press("Escape")
        theme(self.shown, THEMES[0])

    def check(self, parts: list[str], without: tuple[str, ...] = ()) -> list[str]:
        self.shown.evaluate(AXE.read_text())
        violations: list[str] = self.shown.evaluate(CHECK, [parts, RULES, list(without)])
        return violations

    def beyond(self, selectors: str) -> list[str]:
        nodes: list[str] = self.shown.evaluate(BEYOND, selectors)
        return nodes


@pytest.fixture(scope="module")
def everything(desk: Desk, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Everything]:
    panel_built()
    if not AXE.exists():
        pytest.skip("SKIPPED test with axe-core: labextension/node_modules is not there; `make setup` installs it")
    path = write_notebook(tmp_path_factory.mktemp("displays") / "displays.ipynb", ["x = 1"])
    with opened(desk.by, desk.served.add(path)) as shown:
        every = Everything(shown)
        try:
            every.run()
            yield every
        finally:
            desk.served.end_kernels()


@pytest.mark.parametrize("name", THEMES)
def test_axe_finds_no_violations_in_any_display_of_a_cell(everything: Everything, name: str) -> None:
    theme(everything.shown, name)
    capture(everything.shown, SCREENSHOTS / f"every-{THEMES.index(name)}.png")
    assert everything.check(OURS) == []
    everything.back()


@pytest.mark.parametrize("size", SIZES)
def test_displays_of_cells_end_at_the_edge_of_a_small_page(everything: Everything, size: str) -> None:
    everything.shown.evaluate("() => window.jupyterapp.shell.collapseLeft()")
    everything.resize(size)
    for name in THEMES:
        theme(everything.shown, name)
        capture(everything.shown, SCREENSHOTS / f"every-{size}-{THEMES.index(name)}.png")
    assert everything.beyond(", ".join(OURS)) == []
    everything.back()


@pytest.mark.parametrize("size", SIZES)
def test_panel_and_dialogs_end_at_the_edge_of_a_small_page(everything: Everything, size: str) -> None:
    panel, shown = everything.panel, everything.shown
    panel.open()
    unfold(panel)
    variable = panel.node.locator("#mnb-section-variables tr", has_text="int · gpus=3")  # of the cell on ranks
    variable.wait_for(timeout=20_000)
    everything.resize(size)
    for name in THEMES:
        theme(shown, name)
        shown.screenshot(path=SCREENSHOTS / f"panel-{size}-{THEMES.index(name)}.png")
    assert everything.beyond(".mnb-panel") == []
    panel.command("monarch-nb:spawn")
    shown.locator(".mnb-form").wait_for()
    shown.screenshot(path=SCREENSHOTS / f"spawn-{size}.png")
    assert everything.beyond(".jp-Dialog-content, .mnb-form") == []
    everything.back()


@pytest.mark.parametrize("name", THEMES)
def test_axe_finds_no_violations_in_launcher_and_spawn_dialog(desk: Desk, name: str) -> None:
    panel_built()
    with desk.empty(f"launcher-{THEMES.index(name)}") as shown:
        theme(shown, name)
        card = shown.locator(".jp-LauncherCard", has_text="Notebook with a Mesh")
        card.evaluate("card => card.classList.add('ours')")
        shown.evaluate(AXE.read_text())
        assert shown.evaluate(CHECK, [[".jp-LauncherCard.ours"], RULES]) == []
        try:
            card.click()
            shown.locator(".mnb-form").wait_for(timeout=60_000)
            assert shown.evaluate(CHECK, [[".jp-Dialog-content"], RULES]) == []
            shown.screenshot(path=SCREENSHOTS / f"launcher-spawn-{THEMES.index(name)}.png")
            shown.keyboard.press("Escape")
        finally:
            shown.evaluate("() => window.jupyterapp.shell.currentWidget?.sessionContext?.shutdown()")
            theme(shown, THEMES[0])
