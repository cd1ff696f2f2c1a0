"""Takes the pictures of the live displays in a real JupyterLab, of real ranks, or of events alone where there are many.

    .venv/bin/python scripts/screenshots.py [FOLDER] [SCENE ...]
    .venv/bin/python scripts/screenshots.py --pages

Writes FOLDER/SCENE-light.png and -dark.png (build/screenshots without FOLDER); with --pages, in docs/images, those
that README.md and the pages of docs/ show, and nothing else.
"""

import argparse
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.guide_pictures import NAMES
from tests.browser.lab import ROOT, SCREENSHOTS, lab, page, run_cell, theme, write_notebook

TAKEN_BY_TESTS = {"marimo"}  # tests/browser/test_marimo.py leaves it in build/screenshots
_PICTURED = re.compile(r"images/([\w-]+)-light\.png")

BEGIN = """
%load_ext monarch
import time
from IPython.display import clear_output
from monarch.actor import Actor, current_rank, endpoint, this_host

class Trainer(Actor):
    @endpoint
    def step(self, steps=1, pause=0.0, noise=0.3):
        import math, random
        from monarch.telemetry import log
        for step in range(steps):
            loss = 2.3 * math.exp(-step / 40) + 0.1 + noise * random.random() * math.exp(-step / 60)
            log(step=step, loss=loss, accuracy=1 - loss / 3)
            if step % 40 == 0:
                print(f"step {step}  loss {loss:.3f}")
            time.sleep(pause)

    @endpoint
    def break_down(self):
        print("loss is nan at step 211")
        raise FloatingPointError("loss is nan at step 211")
"""

STOPPING = """
class Learner(Actor):
    @endpoint
    def step(self, batch):
        rank = current_rank().rank
        samples = [0.5 + 0.1 * rank, 0.7, float("nan") if rank == 2 else 0.9]
        loss = sum(samples) / len(samples)
        if loss != loss:
            breakpoint()
        else:
            breakpoint()
        return loss

learners = workers.spawn("learners", Learner)
learners.initialized.get()
"""

# Ranks in the store alone: displays do not depend on whether there are processes.
RANKS = """
import random, time
random.seed(7)
from monarch_nb.runtime import current_runtime
from monarch_nb.store import store_of, events as e

def told(uid, name, **dims):
    labels, sizes = tuple(dims), tuple(dims.values())
    count, strides = 1, []
    for size in reversed(sizes):
        strides.insert(0, count)
        count *= size
    store, now = store_of(current_runtime()), time.time()
    hosts = tuple(f"node{i:02d}" for i in range(sizes[0] if len(sizes) > 1 else 1))
    put = store.put
    put(e.MeshDescription(uid=uid, name=name, kind="procs", ranks=range(count), labels=labels, sizes=sizes,
                  strides=tuple(strides), hosts=hosts, per_host=count // len(hosts), ready=True, at=now - 900))
    put(e.MeshDescription(uid=uid + "a", name="trainers", kind="actors", ranks=range(count), labels=labels, sizes=sizes,
                  strides=tuple(strides), actor_class="Trainer", on=uid, ready=True, at=now - 890))
    for rank in range(count):
        put(e.ProcessStarted(uid, rank, 40_000 + rank, now))
    return store, now, count

def shown(uid):
    from monarch_kernel import _loaded
    widgets = next(iter(_loaded.values()))._widgets
    return widgets.show("mesh", {"mesh": uid}, uid)
"""


TENSORS = """
import torch
import monarch
from monarch.distributed import Mesh

mesh = Mesh(shape=(4, 2), mesh_dim_names=("data_parallel", "model_parallel"))
w = mesh.randn(1024, 4096, sharding_spec=["data_parallel", "model_parallel"])
t = monarch.distribute(torch.randn(1024, 1024), mesh, sharding_spec=["data_parallel", None])
result = t @ t.T
clear_output()
"""


MOVING = """
from monarch.rdma import RDMABuffer, ParameterStore
import monarch, torch

class Keeper(Actor):
    @endpoint
    def offer(self, size):
        self.kept = torch.ones(size, dtype=torch.uint8)
        return RDMABuffer(self.kept)
    @endpoint
    def pull(self, buffer, times, movers=""):
        monarch.configure(rdma_movers=movers)
        target = bytearray(buffer.size())
        for _ in range(times):
            buffer.read_into(target).get()

movers = this_host().spawn_procs({"gpus": 4}, name="movers")
keepers = movers.spawn("keepers", Keeper)
buffers = list(keepers.offer.call(40_000_000).get().values())
for rank in range(1, 4):
    keepers.slice(gpus=rank).pull.call_one(buffers[0], 4 * rank).get()
keepers.slice(gpus=0).pull.call_one(buffers[3], 2, "streams").get()
keepers.slice(gpus=2).pull.call_one(buffers[3], 1, "messages").get()
buffers[1].read_into(bytearray(40_000_000)).get()
time.sleep(1)
"""


# Another program leaves a mesh, which loses a rank before it is found again.
LEAVE = """
import os, signal
from monarch.actor import Actor, endpoint, this_host

class Learner(Actor):
    @endpoint
    def learn(self, steps):
        for step in range(0, steps, 40):
            print(f"step {step}  loss {2.3 / (1 + step):.3f}")

overnight = this_host().spawn_procs(per_host={"gpus": 2}, name="overnight")
overnight.spawn("learners", Learner).learn.call(80).get()
victim = overnight.slice(gpus=1).run(os.getpid).get().item()
overnight.detach(lease="2h")
os.kill(victim, signal.SIGKILL)
"""
LAB = """
import pathlib
pathlib.Path("monarch.toml").write_text('[jobs.lab]\\nkind = "process"\\nmeshes = { trainers = 2, loaders = 1 }\\n')
"""
END_LEFT = f"!{sys.executable} -m monarch_nb job kill lab\n!{sys.executable} -m monarch_nb mesh stop overnight"
LEFT = f"""
import subprocess, sys
subprocess.run([sys.executable, "-c", {LEAVE!r}], check=True, stdout=subprocess.DEVNULL)
time.sleep(1)
"""


class Scene(NamedTuple):
    code: str
    wait: str
    after: Any = None  # of the page and the cell's output, before the picture is taken
    width: int = 1000
    height: int = 1000
    page: bool = False  # the page, with the panel, not the cell's output alone
    before: str = ""  # a cell of its own before it
    answer: str = ""  # the answer to the cell's question, once the picture is taken
    part: str = ""  # a selector of the part of the page in the picture, in place of the cell's output


def pick(index: int, more: tuple[int, ...] = ()) -> Any:
    def do(shown: Any, output: Any) -> None:
        output.locator(f'[data-index="{index}"]').click()
        for extra in more:
            output.locator(f'[data-index="{extra}"]').click(modifiers=["Shift"])
        shown.mouse.move(0, 0)
        shown.wait_for_timeout(900)

    return do


def ask(command: str) -> Any:
    """Answers the prompt of the debugger, and opens the view below it."""

    def do(shown: Any, output: Any) -> None:
        answer(output, command)
        output.get_by_text("! nan").wait_for(timeout=20_000)
        view = output.locator(".mnb-debug")
        view.get_by_role("button", name="details").click(timeout=20_000)
        view.locator(".mnb-vars tr", has_text="loss").wait_for(timeout=20_000)

    return do


def answer(output: Any, text: str) -> None:
    box = output.locator(".jp-Stdin-input").last
    box.wait_for(timeout=20_000)
    box.fill(text)
    box.press("Enter")


def open_frames(shown: Any, output: Any) -> None:
    output.get_by_role("button", name="Post-mortem").first.click()
    output.locator(".mnb-frames", has_text="raise FloatingPointError").wait_for(timeout=10_000)


def first_table(shown: Any, output: Any) -> None:
    """What the doctor says of the kernel; its part about the machine names local folders."""
    output.locator("table").first.evaluate("table => { while (table.nextSibling) table.nextSibling.remove(); }")


def side_by_side(row: str, section: str = "") -> Any:
    """Opens the panel, picks a row of its tree, and opens a section."""

    def do(shown: Any, output: Any) -> None:
        shown.evaluate("window.jupyterapp.commands.execute('notebook:hide-all-cell-code')")
        shown.evaluate("window.jupyterapp.commands.execute('monarch-nb:open')")
        panel = shown.locator(".mnb-panel")
        if row:
            panel.locator(".mnb-outline-row", has_text=row).first.click(timeout=15_000)
        if section:
            panel.locator(".jp-AccordionPanel-title", has_text=re.compile(f"^{section}")).click()
        shown.wait_for_timeout(1200)

    return do


def spawn(shown: Any, output: Any) -> None:
    """Opens the dialog, as if a mesh on two hosts of a job were wanted."""
    shown.evaluate("() => void window.jupyterapp.commands.execute('monarch-nb:spawn')")
    form = shown.locator(".mnb-form")
    form.get_by_label("name").fill("trainers")
    form.get_by_label("where").select_option("lab")
    form.get_by_label("shape").fill("gpus=4")
    form.get_by_label("set-up").fill("import torch")


def choose_ranks(shown: Any, output: Any) -> None:
    """Sends the last cell to ranks, by its toolbar."""
    cell = shown.locator(".jp-Notebook .jp-Cell.jp-mod-active")
    cell.locator(".mnb-on-cell select").select_option("workers")
    shown.evaluate("() => window.jupyterapp.commands.execute('notebook:run-cell')")
    cell.locator(".jp-OutputArea-output", has_text="ValueMesh").wait_for(timeout=20_000)


def section(name: str) -> Any:
    """Opens the panel with one section alone in it."""

    def do(shown: Any, output: Any) -> None:
        shown.evaluate("() => window.jupyterapp.commands.execute('monarch-nb:open')")
        titles = shown.locator(".mnb-panel .jp-AccordionPanel-title")
        for index in range(titles.count()):
            title = titles.nth(index)
            if (title.get_attribute("aria-expanded") == "true") != title.inner_text().startswith(name):
                title.click()
        shown.wait_for_timeout(1200)

    return do


def all_busy(uid: str, name: str) -> str:
    """A cell that shows 64 ranks, each in the middle of a step."""
    return f"""{RANKS}
store, now, count = told("{uid}", "{name}", hosts=8, gpus=8)
for rank in range(count):
    store.put(e.ActivityChanged("{uid}a", rank, 0, "busy", now - random.random() * 3, "step", 0, 900, 2.1, 0))
    store.put(e.Usage("{uid}", rank, 0.9 + random.random() / 5, 2_000_000_000 + rank * 9_000_000))
shown("{uid}")
"""


SCENES = {
    "idle": Scene("%mesh workers gpus=4", '[data-state="idle"]'),
    "panel-empty": Scene("%stop --all\n%meshes", ".jp-OutputArea-output", side_by_side(""), page=True),
    "panel-idle": Scene(
        "%mesh workers gpus=4\ntrainers = workers.spawn('trainers', Trainer)\ntrainers.step.call(3).get()\nworkers",
        '[data-state="idle"]',
        side_by_side("gpus=1"),
        page=True,
    ),
    "panel-failed": Scene(
        """
import os, signal
os.kill(workers.slice(gpus=2).run(os.getpid).get().item(), signal.SIGKILL)
workers
""",
        '[data-state="failed"]',
        side_by_side("gpus=2", "Failures"),
        page=True,
    ),
    "busy": Scene(
        all_busy("busy", "workers"),
        '[data-state="busy"]',
        pick(19),
    ),
    "failed": Scene(
        """
trainers = workers.spawn("trainers", Trainer)
trainers.step.call(30).get()
clear_output()
import os, signal
os.kill(workers.slice(gpus=2).run(os.getpid).get().item(), signal.SIGKILL)
workers
""",
        '[data-state="failed"]',
        pick(2),
        before="%heal workers",
    ),
    "failure": Scene(
        """
import threading
from monarch.actor import heal_mesh
heal_mesh(workers)
pid = workers.slice(gpus=1).run(os.getpid).get().item()
threading.Timer(1.0, os.kill, (pid, signal.SIGKILL)).start()
trainers.step.call(39, 0.1).get()
""",
        ".mnb-failure",
    ),
    "broadcast": Scene(
        """
heal_mesh(workers)
trainers.slice(gpus=3).break_down.broadcast()
time.sleep(1)
""",
        ".mnb-failure",
        lambda shown, output: (
            output.get_by_role("button", name="Post-mortem").first.click(),
            shown.wait_for_timeout(2500),
        ),
    ),
    "failures": Scene("%failures", ".mnb-failure"),
    "thousand": Scene(
        RANKS
        + """
store, now, count = told("many", "cluster", hosts=125, gpus=8)
for rank in range(count):
    kind = random.random()
    if kind < 0.75:
        store.put(e.ActivityChanged("manya", rank, 0, "busy", now - 1, "step"))
for rank in (133, 702):
    store.put(e.RankStateChanged("many", rank, "failed", 0, now, "it ended by signal 9 (SIGKILL)"))
store.put(e.ResponsivenessChanged("many", 411, now - 8, now))
store.put(e.RankStateChanged("many", 640, "healing", 1, now))
shown("many")
""",
        '[data-state="busy"]',
    ),
    "slices": Scene(
        RANKS
        + """
store, now, count = told("cube", "grid", hosts=4, nodes=2, gpus=8)
for rank in range(0, count, 3):
    store.put(e.ActivityChanged("cubea", rank, 0, "busy", now - 1, "step"))
shown("cube")
""",
        '[data-state="busy"]',
        pick(0, (51,)),
    ),
    "hosts": Scene(
        RANKS
        + """
store, now, count = told("huge", "fleet", hosts=1250, gpus=8)
for rank in range(count):
    if random.random() < 0.9:
        store.put(e.ActivityChanged("hugea", rank, 0, "busy", now - 1, "step"))
for rank in (4242, 4243, 8001):
    store.put(e.RankStateChanged("huge", rank, "failed", 0, now, "it ended by signal 9 (SIGKILL)"))
shown("huge")
""",
        ".mnb-grid, .mnb-canvas",
        pick(530),
    ),
    "panel-busy": Scene(
        all_busy("pbusy", "cluster"),
        '[data-state="busy"]',
        side_by_side("node03"),
        page=True,
    ),
    "panel-thousand": Scene(
        RANKS
        + """
store, now, count = told("pmany", "fleet", hosts=125, gpus=8)
for rank in range(count):
    if random.random() < 0.75:
        store.put(e.ActivityChanged("pmanya", rank, 0, "busy", now - 1, "step"))
for rank in (133, 702):
    store.put(e.RankStateChanged("pmany", rank, "failed", 0, now, "it ended by signal 9 (SIGKILL)"))
store.put(e.ResponsivenessChanged("pmany", 411, now - 8, now))
shown("pmany")
""",
        '[data-state="busy"]',
        side_by_side("fleet"),
        page=True,
    ),
    "debugger": Scene(
        "learners.step.call(1).get()",
        ".jp-Stdin-input",
        ask("diff loss"),
        before="clear_output()\n%heal workers\n" + STOPPING,
        answer="c all",
        height=1500,
    ),
    "metrics": Scene(
        """
%heal workers
trainers.step.call(300, 0.001).get()
clear_output()
trainers.metrics
""",
        ".mnb-chart",
    ),
    "transfers": Scene(
        MOVING + "\n%transfers",
        ".mnb-matrix",
        lambda shown, output: shown.wait_for_timeout(2500),
    ),
    "panel-transfers": Scene(
        "%transfers",
        ".mnb-matrix",
        side_by_side("", "Transfers"),
        page=True,
    ),
    "logs": Scene("%logs workers", ".mnb-line"),
    "figures": Scene(
        """
%%on workers
import matplotlib.pyplot as plt
print("epoch 1")
plt.plot([1, 0.5, 0.2 + rank / 9])
plt.title(f"loss of rank {rank}")
plt.show()
""",
        ".mnb-images img",
    ),
    "placement": Scene("w", ".mnb-drawing", before=TENSORS, height=700),
    "mesh-of-tensors": Scene("mesh", '[data-state="idle"]', page=True, width=1000, height=560),
    "placement-values": Scene(
        "logits = (w + 2).log()\nlogits",
        ".mnb-drawing",
        lambda shown, output: (
            output.locator("button", has_text="show values").click(),
            output.locator(".mnb-corner").wait_for(),
        ),
        height=900,
    ),
    "placement-parts": Scene("result", ".mnb-drawing", height=700),
    "placement-cube": Scene(
        """
from monarch.tensor.placement import Shard, place
place((8, 512, 1024), "bfloat16", 2, ("pipeline", "data", "model"), (4, 4, 4), [Shard(0), Shard(1), Shard(2)])
""",
        ".mnb-drawing",
        height=800,
    ),
    "panel-tensors": Scene(
        "for _ in range(3):\n    largest = result.abs().max().item()\n%tensors",
        ".mnb-list",
        lambda shown, output: (
            side_by_side("", "Tensors")(shown, output),
            shown.locator(".mnb-panel [data-tensor]", has_text="w").locator("button").first.click(),
            shown.wait_for_timeout(900),
        ),
        page=True,
        width=1200,
        height=860,
    ),
    "doctor": Scene("%monarch doctor", "text=side panel", first_table, width=1200),
    "job": Scene(
        "%mesh trainers hosts=2 gpus=2 --job process\ntrainers.initialized.get()\ntrainers",
        '[data-state="idle"]',
        before="%stop --all",
    ),
    "detached": Scene(
        "%detach fleet --lease 2h\n%attach", "text=of its lease left", before="%stop --all\n%mesh fleet gpus=2"
    ),
    "attached": Scene(
        "%attach overnight\novernight",
        '[data-state="idle"]',
        before="%stop --all\n" + LEFT,
    ),
    "spawn": Scene("%meshes", ".jp-OutputArea-output", spawn, part=".jp-Dialog-content", before=LAB),
    "left": Scene(
        "%meshes",
        ".jp-OutputArea-output",
        section("Left Running"),
        part="#mnb-section-left",
        before=f"{LAB}{LEFT}!{sys.executable} -m monarch_nb job start lab",
    ),
    "cell-toolbar": Scene(
        "import os\nos.cpu_count()",
        ".jp-OutputArea-output",
        choose_ranks,
        part=".jp-Notebook .jp-Cell.jp-mod-active",
        before=f"{END_LEFT}\n%mesh workers gpus=4\ntrainers = workers.spawn('trainers', Trainer)",
        width=800,
    ),
    "notify": Scene(
        "%notify 1s\ntrainers.step.call(30, 0.1).get()",
        ".jp-OutputArea-output",
        lambda shown, output: shown.locator(".mnb-status-item", has_text="ended after").wait_for(timeout=20_000),
        part="#jp-main-statusbar",
        width=700,
    ),
    "timeline": Scene(
        """
%timeline trainers
import time
for _ in range(3):
    trainers.step.call(2, 0.1).get()
trainers.slice(gpus=2).step.call_one(6, 0.1).get()
%timeline --stop
clear_output()
%timeline
""",
        ".mnb-tl-view .b",
        lambda shown, output: (
            output.locator(".mnb-tl-picture").focus(),
            shown.keyboard.press("ArrowDown"),
            shown.wait_for_timeout(600),
        ),
    ),
    "history": Scene(
        "trainers.step.call(100, 0.1).get()\nclear_output()\n%history workers",
        ".mnb-history canvas",
    ),
    "static": Scene(
        "from monarch_kernel import show\nfrom IPython.display import HTML\nHTML(show(workers)._repr_html_())",
        "text=workers",
        before="%stop --all\n%mesh workers gpus=4\ntrainers = workers.spawn('trainers', Trainer)\n"
        "trainers.step.call(30).get()\nimport os, signal\n"
        "os.kill(workers.slice(gpus=2).run(os.getpid).get().item(), signal.SIGKILL)\ntime.sleep(1)",
    ),
    "empty": Scene("%stop --all\n%meshes", ".jp-OutputArea-output"),
}


def run(shown: Any, code: str) -> Any:
    """Runs code in a new last cell; gives its output area."""
    shown.evaluate(
        """code => {
            const panel = window.jupyterapp.shell.currentWidget;
            const notebook = panel.content;
            const cell = {cell_type: "code", source: code, metadata: {}};
            notebook.model.sharedModel.insertCell(notebook.model.cells.length, cell);
            notebook.activeCellIndex = notebook.model.cells.length - 1;
            const last = notebook.model.cells.length - 1;  // what is far below is not drawn
            return window.jupyterapp.commands.execute("notebook:run-cell")
                .then(() => notebook.scrollToItem(last, "end"));
        }""",
        code.strip(),
    )
    return shown.locator(".jp-Notebook .jp-Cell").last.locator(".jp-Cell-outputArea")


def take(shown: Any, scene: Scene, folder: Path, name: str) -> None:
    shown.set_viewport_size({"width": scene.width, "height": scene.height})
    if scene.before:
        run(shown, scene.before)
    output = run_cell(shown, scene.code) if scene.answer else run(shown, scene.code)
    try:
        output.locator(scene.wait).first.wait_for(timeout=40_000)
    except Exception:
        shown.screenshot(path=SCREENSHOTS / f"{name}-instead.png")  # shown in place of the expected element
        raise
    shown.wait_for_timeout(1500)
    if scene.after is not None:
        scene.after(shown, output)
    shown.mouse.move(0, 0)
    for kind in ("Light", "Dark"):
        theme(shown, f"JupyterLab {kind}")
        shown.wait_for_timeout(400)
        output.scroll_into_view_if_needed()
        pictured = shown.locator(scene.part).first if scene.part else shown if scene.page else output
        pictured.screenshot(path=folder / f"{name}-{kind.lower()}.png")
    if scene.answer:
        answer(output, scene.answer)
    if scene.part:
        shown.keyboard.press("Escape")  # a dialog
    if scene.page or scene.part:
        shown.evaluate("window.jupyterapp.commands.execute('notebook:show-all-cell-code')")
        shown.evaluate("window.jupyterapp.shell.collapseLeft()")


def published() -> set[str]:
    """The scenes that README.md and the pages of docs/ show."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    shown = {name for page in pages for name in _PICTURED.findall(page.read_text(encoding="utf-8"))}
    if unknown := shown - set(SCENES) - NAMES - TAKEN_BY_TESTS:
        raise SystemExit(f"pages show pictures that nothing here takes: {', '.join(sorted(unknown))}")
    return shown & set(SCENES)


def take_all(scenes: list[str], folder: Path) -> None:
    """Takes scenes in one notebook, one after the other."""
    with tempfile.TemporaryDirectory() as scratch:
        notebook = write_notebook(Path(scratch) / "pictures.ipynb", [BEGIN])
        # Detached meshes are those of these pictures, not those of the user.
        with lab(Path(scratch) / "lab", notebook, {"XDG_STATE_HOME": scratch}) as address, page(address) as shown:
            shown.evaluate("window.jupyterapp.commands.execute('application:toggle-left-area')")
            run(shown, BEGIN)
            for name in SCENES:
                if name in {"idle", *scenes}:  # "idle" makes the processes of others
                    take(shown, SCENES[name], Path(scratch), name)
                if name in scenes:
                    publish(Path(scratch), name, folder)
            run(shown, END_LEFT)


def publish(source: Path, name: str, folder: Path) -> None:
    """Its two pictures with at most 256 colours: a third of the bytes, with no visible difference."""
    from PIL import Image

    for kind in ("light", "dark"):
        picture = Image.open(source / f"{name}-{kind}.png").convert("RGB")
        picture.quantize(256, dither=Image.Dither.NONE).save(folder / f"{name}-{kind}.png", optimize=True)
    print(f"{name}: {folder / name}-light.png, -dark.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=SCREENSHOTS, help="default: build/screenshots")
    parser.add_argument("scenes", nargs="*", metavar="SCENE", help=f"default: all of {', '.join(SCENES)}")
    parser.add_argument("--pages", action="store_true", help="the pictures of README.md and docs/, into docs/images")
    options = parser.parse_args()
    folder = ROOT / "docs" / "images" if options.pages else options.folder
    scenes = sorted(published()) if options.pages else options.scenes or list(SCENES)
    if unknown := set(scenes) - set(SCENES):
        parser.error(f"there is no scene {', '.join(sorted(unknown))}")
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    take_all(scenes, folder)
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
