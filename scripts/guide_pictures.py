"""Takes the pictures of the guides to hosted notebooks: what their cells show in the kernels of these services.

    .venv/bin/python scripts/guide_pictures.py [FOLDER] [PLACE ...]

The page around the cells is JupyterLab's, without our extension: Colab's and Lightning's own pages are not used. The
install cell is the guide's own. Its address leads to this checkout, by git's own settings, and the kernel has nothing
of the library before it.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.kernels import FOLDER, KERNELS
from tests.browser.lab import ROOT, SCREENSHOTS, lab, page, run_cell, theme, write_notebook
from tests.notebook.pages import blocks

ADDRESS = "https://github.com/monarch-nb/monarch-nb"
STEPS = ("install", "mesh", "debug")
ACTOR = """
from monarch.actor import Actor, current_rank, endpoint

class Trainer(Actor):
    @endpoint
    def step(self, x):
        loss = x / (1 + current_rank().rank)
        breakpoint()
        return loss

trainers = workers.spawn("trainers", Trainer)
"""
CALL = "trainers.step.call(6).get()"


class Place(NamedTuple):
    """A hosted notebook: its kernel, and the variables of its environment."""

    kernel: str
    environment: Mapping[str, str]


PLACES = {
    "colab": Place("colab", {"COLAB_RELEASE_TAG": "release-colab"}),
    "lightning": Place("ipykernel-6.31", {"LIGHTNING_CLOUD_PROJECT_ID": "project"}),
}
NAMES = {f"{place}-{step}" for place in PLACES for step in STEPS}


def interpreter(name: str) -> Path:
    """The Python of a kernel in an environment without the library, which is uninstalled if necessary."""
    folder = FOLDER / f"{name}-to-install"
    python = folder / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", str(python), "--quiet", "--disable-pip-version-check")
    if not (folder / ".made").exists():
        venv.create(folder, with_pip=True, clear=True)
        # anywidget in the version of this JupyterLab: Colab's page loads the one that its kernel has.
        packages = [package for package in KERNELS[name] if not package.startswith("anywidget")]
        subprocess.run([*pip, "install", *packages, f"anywidget=={version('anywidget')}"], check=True)
        (folder / ".made").touch()
    subprocess.run([*pip, "uninstall", "--yes", "monarch-nb"], check=True)
    return python


@contextlib.contextmanager
def opened(place: Place) -> Iterator[Any]:
    """A notebook in that kernel."""
    with tempfile.TemporaryDirectory() as folder:
        notebook = write_notebook(Path(folder) / "first.ipynb", ["# the first cell"])
        os.environ["MONARCH_TEST_KERNEL"] = str(interpreter(place.kernel))
        git = {
            "GIT_CONFIG_COUNT": "1",
            "GIT_CONFIG_KEY_0": f"url.file://{ROOT}.insteadOf",
            "GIT_CONFIG_VALUE_0": ADDRESS,
        }
        # pip prints where packages come from on this machine, which is of no use to readers.
        environment = {**git, **place.environment, "PIP_QUIET": "1", "XDG_STATE_HOME": folder, "MONARCH_NB_PRELOAD": ""}
        with (
            lab(Path(folder) / "lab", notebook, environment, panel=False, installs=True) as address,
            page(address, 1000, 1000) as shown,
        ):
            shown.evaluate("window.jupyterapp.commands.execute('application:toggle-left-area')")
            yield shown


def take(shown: Any, name: str, code: str, wait: str, folder: Path) -> Any:
    """Runs a cell, and takes its picture once `wait` is there; returns its output."""
    output = run_cell(shown, code)
    try:
        output.locator(wait).first.wait_for(timeout=240_000)
    except Exception:
        shown.screenshot(path=SCREENSHOTS / f"{name}-instead.png")
        raise
    cell = shown.locator(".jp-Notebook .jp-Cell").last
    for kind in ("Light", "Dark"):
        theme(shown, f"JupyterLab {kind}")
        shown.wait_for_timeout(700)
        cell.scroll_into_view_if_needed()
        cell.screenshot(path=folder / f"{name}-{kind.lower()}.png")
    return output


def take_place(name: str, folder: Path) -> None:
    """The pictures of one guide."""
    [install, mesh, *_] = [block for block in blocks(f"docs/guides/{name}.md") if block.kind in ("text", "python")]
    with opened(PLACES[name]) as shown:
        take(shown, f"{name}-install", install.text, "text=Note: you may need", folder)
        take(shown, f"{name}-mesh", f"{mesh.text}workers", '[data-state="idle"]', folder)
        run_cell(shown, "%monarch doctor").locator("text=side panel").first.wait_for(timeout=60_000)
        run_cell(shown, ACTOR)
        box = take(shown, f"{name}-debug", CALL, ".jp-Stdin-input", folder).locator(".jp-Stdin-input").last
        box.fill("c all")
        box.press("Enter")
        shown.wait_for_timeout(1000)


def main() -> None:
    from scripts.screenshots import publish

    folder = Path(sys.argv[1]) if sys.argv[1:] else SCREENSHOTS
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        for place in sys.argv[2:] or PLACES:
            take_place(place, Path(scratch))
            for step in STEPS:
                publish(Path(scratch), f"{place}-{step}", folder)


if __name__ == "__main__":
    main()
