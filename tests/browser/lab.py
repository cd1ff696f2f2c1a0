"""A real JupyterLab with a notebook in it, and a browser to look at it."""

import contextlib
import importlib.util
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from scripts.kernels import PATH
from scripts.processes import left_behind, marked

ROOT = Path(__file__).resolve().parents[2]
SCREENSHOTS = ROOT / "build" / "screenshots"
# The panel of this checkout; without one, as where a wheel is tested, the one that is installed.
_PANELS = (ROOT / "labextension" / "built", Path(sys.prefix) / "share/jupyter/labextensions/monarch-nb-lab")
PANEL = next((folder for folder in _PANELS if (folder / "package.json").exists()), _PANELS[0])
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
SETTINGS = {
    "@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": False},
    "@jupyterlab/notebook-extension:tracker": {"windowingMode": "none"},  # all of it is in the page
}


# A kernel shown as idle may not be reached yet, or may run a cell while an idle status of another message arrives;
# cells run then are lost. A kernel that has sent its info was reached.
KERNEL_IS_IDLE = """() => {
    const kernel = window.jupyterapp?.shell?.currentWidget?.sessionContext?.session?.kernel;
    if (kernel?.connectionStatus !== "connected" || kernel.status !== "idle") return false;
    const info = kernel.info;  // a promise, another one after a restart
    if (window.mnbInfo !== info) {
        window.mnbInfo = info;
        window.mnbReached = false;
        info.then(() => { window.mnbReached ||= window.mnbInfo === info; }, () => undefined);
    }
    return window.mnbReached;
}"""

OPEN = "async path => void await window.jupyterapp.commands.execute('docmanager:open', {path})"
# All documents are closed, saved or not, and the side bar is as in a new page.
CLEAR = """async () => {
    const app = window.jupyterapp;
    for (const widget of [...app.shell.widgets("main")]) widget.dispose();
    await app.commands.execute("filebrowser:activate");
}"""

TOP = """() => {
    for (const node of document.querySelectorAll(".jp-Notebook, .jp-Notebook *")) node.scrollTop = 0;
}"""
# Cells are laid out anew when they come into view.
STEADY = """() => {
    const bottom = [...document.querySelectorAll(".jp-Notebook .jp-Cell")].at(-1).getBoundingClientRect().bottom;
    const now = performance.now();
    if (window.mnbBottom?.at !== bottom) window.mnbBottom = {at: bottom, since: now};
    return now - window.mnbBottom.since > 400;
}"""


def write_notebook(path: Path, cells: list[str]) -> Path:
    """Writes a notebook with these cells of code."""
    import nbformat

    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook = nbformat.v4.new_notebook(metadata={"kernelspec": kernel})
    notebook.cells = [nbformat.v4.new_code_cell(cell.strip()) for cell in cells]
    path.write_text(nbformat.writes(notebook))
    return path


def panel_built() -> None:
    """Skips the test, with a message, where the JupyterLab extension is not built."""
    if not (PANEL / "package.json").exists():
        pytest.skip("SKIPPED panel test: labextension/built is not there; `make setup` builds it where npm is")


def browser_is_there() -> bool:
    """Whether there is a browser, and its driver."""
    return any(map(shutil.which, BROWSERS)) and importlib.util.find_spec("playwright") is not None


def browser_path() -> str:
    """The browser to drive. Skips the test, with a message, where there is none."""
    for name in BROWSERS:
        if path := shutil.which(name):
            return path
    pytest.skip("SKIPPED browser test: no chromium or google-chrome on PATH; `make browser` tries to install it")


class Served(NamedTuple):
    """A running JupyterLab."""

    url: str
    token: str
    root: Path

    def add(self, notebook: Path) -> str:
        """Copies a notebook into its folder; the address of its page, in a workspace of its own."""
        shutil.copy(notebook, self.root)
        return f"{self.url}lab/workspaces/{notebook.stem}/tree/{notebook.name}?token={self.token}"

    def end_kernels(self) -> None:
        """Ends all kernels, as closing the notebooks does."""
        for session in json.loads(self._ask("GET", "api/sessions")):
            self._ask("DELETE", f"api/sessions/{session['id']}")

    def _ask(self, method: str, path: str) -> bytes:
        call = urllib.request.Request(self.url + path, method=method, headers={"Authorization": f"token {self.token}"})
        with urllib.request.urlopen(call, timeout=30) as answer:
            return bytes(answer.read())


def _kernel(folder: Path, python: str, env: dict[str, str]) -> None:
    """Registers this Python for notebooks."""
    folder.mkdir(parents=True)
    argv = [python, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = {"argv": argv, "display_name": "Python 3", "language": "python", "env": env}
    (folder / "kernel.json").write_text(json.dumps(spec))


@contextlib.contextmanager
def serve(
    folder: Path, env: dict[str, str], config: str = "", *, panel: bool = True, installs: bool = False
) -> Iterator[Served]:
    """A JupyterLab with these variables in its environment, this configuration, and no settings of the user.

    Without `panel` the extension of JupyterLab is off, as where it is not installed. With `installs` a kernel of
    another Python (MONARCH_TEST_KERNEL) lacks the library until a cell installs it.
    """
    root, runtime = folder / "root", folder / "runtime"
    for path in (root, runtime, folder / "config"):
        path.mkdir(parents=True)
    (folder / "config" / "jupyter_server_config.py").write_text(config)
    if not panel:
        (folder / "config" / "labconfig").mkdir()
        off = {"disabledExtensions": {"monarch-nb-lab": True}}
        (folder / "config" / "labconfig" / "page_config.json").write_text(json.dumps(off))
    overrides = folder / "app-settings"
    _share(overrides)
    (folder / "share" / "labextensions").mkdir(parents=True)
    if panel and PANEL.exists():
        (folder / "share" / "labextensions" / "monarch-nb-lab").symlink_to(PANEL)
    if python := os.environ.get("MONARCH_TEST_KERNEL"):
        _kernel(folder / "share" / "kernels" / "python3", python, {} if installs else {"PYTHONPATH": PATH})
    token = secrets.token_hex(16)
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(
            [
                *(sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--expose-app-in-browser"),
                *("--ServerApp.ip=127.0.0.1", "--ServerApp.port=0", f"--IdentityProvider.token={token}"),
                *(f"--ServerApp.root_dir={root}", f"--LabApp.app_settings_dir={overrides}"),
                *(f"--LabApp.workspaces_dir={folder / 'workspaces'}", f"--LabApp.user_settings_dir={folder / 'user'}"),
            ],
            env={
                **os.environ,
                **env,
                "JUPYTER_RUNTIME_DIR": str(runtime),
                "JUPYTER_CONFIG_DIR": str(folder / "config"),
                "JUPYTER_DATA_DIR": str(folder / "data"),
                "JUPYTER_PATH": str(folder / "share"),
                "IPYTHONDIR": str(folder / "ipython"),
            },
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            yield Served(_address(server, runtime), token, root)
        finally:
            server.terminate()  # it ends its kernels
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


@contextlib.contextmanager
def lab(
    folder: Path, notebook: Path, env: dict[str, str], *, panel: bool = True, installs: bool = False
) -> Iterator[str]:
    """Serves a copy of a notebook, by a JupyterLab of its own; gives the address of its page."""
    with serve(folder, env, panel=panel, installs=installs) as served:
        yield served.add(notebook)


def _share(folder: Path) -> None:
    folder.mkdir()
    (folder / "overrides.json").write_text(json.dumps(SETTINGS))


def _address(server: subprocess.Popen[bytes], runtime: Path, seconds: float = 120) -> str:
    """The address that the server writes down once it has chosen a port."""
    deadline = time.monotonic() + seconds
    file = runtime / f"jpserver-{server.pid}.json"
    while time.monotonic() < deadline:
        assert server.poll() is None, (runtime.parent / "server.log").read_text()
        with contextlib.suppress(OSError, ValueError):
            return str(json.loads(file.read_text())["url"])
        time.sleep(0.1)
    raise AssertionError("JupyterLab did not come up:\n" + (runtime.parent / "server.log").read_text())


@contextlib.contextmanager
def browser() -> Iterator[Any]:
    """A browser with no page yet."""
    path = browser_path()
    playwright = pytest.importorskip("playwright.sync_api", reason="SKIPPED browser test: playwright is not installed")
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=path, args=ARGUMENTS)
        try:
            yield started
        finally:
            started.close()


@contextlib.contextmanager
def opened(by: Any, address: str, width: int = 1280, height: int = 1000) -> Iterator[Any]:
    """A page at an address, once JupyterLab is loaded and its kernel is idle."""
    with _page(by, address, width, height) as shown:
        shown.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
        shown.wait_for_function(KERNEL_IS_IDLE, timeout=60_000)
        yield shown


@contextlib.contextmanager
def _page(by: Any, address: str, width: int, height: int) -> Iterator[Any]:
    shown = by.new_page()
    try:
        shown.set_viewport_size({"width": width, "height": height})
        shown.set_default_navigation_timeout(60_000)
        shown.goto(address)
        yield shown
    finally:
        shown.close()


@contextlib.contextmanager
def page(address: str, width: int = 1280, height: int = 1000) -> Iterator[Any]:
    """The same in a browser of its own."""
    with browser() as started, opened(started, address, width, height) as shown:
        yield shown


class Desk:
    """One JupyterLab and one page of it, in which notebooks are opened one after the other: a page costs seconds."""

    def __init__(self, served: Served, by: Any, mark: str) -> None:
        self.served = served
        self.by = by
        self.mark = mark  # in the environment of the server
        self._pages = contextlib.ExitStack()
        self._page: Any = None

    @contextlib.contextmanager
    def open(self, notebook: Path) -> Iterator[Any]:
        """The page of a copy of a notebook. Its kernel and its children have ended afterwards."""
        before = {process.pid for process in marked(self.mark)}
        address = self.served.add(notebook)
        try:
            if self._page is None:
                self._page = self._pages.enter_context(opened(self.by, address))
            else:
                self._page.evaluate(OPEN, notebook.name)
                self._page.wait_for_function(KERNEL_IS_IDLE, timeout=60_000)
            yield self._page
            self._page.evaluate(CLEAR)
        except BaseException:  # an open dialog, for example, would be in the way of later tests
            self._pages.close()
            self._page = None
            raise
        finally:
            self.served.end_kernels()
        assert left_behind(self.mark, but=before) == []

    def close(self) -> None:
        self._pages.close()

    @contextlib.contextmanager
    def empty(self, workspace: str) -> Iterator[Any]:
        """A page with no notebook and no kernel: the state of its documents is restored in no other page."""
        address = f"{self.served.url}lab/workspaces/{workspace}?token={self.served.token}"
        with _page(self.by, address, 1280, 1000) as shown:
            shown.wait_for_selector(".jp-Launcher", timeout=60_000)
            yield shown

    def saved(self, shown: Any, notebook: Path) -> Path:
        """Saves the notebook of the page; its file."""
        shown.evaluate("window.jupyterapp.commands.execute('docmanager:save')")
        shown.wait_for_function("() => !window.jupyterapp.shell.currentWidget.context.model.dirty", timeout=15_000)
        return self.served.root / notebook.name


class Lab:
    """The page, and the actions of a person in it."""

    def __init__(self, shown: Any) -> None:
        self.shown = shown
        self.errors: list[str] = []
        shown.on("pageerror", self._wrong)

    def _wrong(self, error: Any) -> None:
        if "reading 'promise'" in str(error) and "labextensions" not in (error.stack or ""):
            return  # JupyterLab's own: its status bar is shown while its throttle stops
        self.errors.append(str(error))
        print(error.stack)  # with its origin: JupyterLab and other extensions have errors, too

    def start(self, code: str) -> Any:
        """Runs code in a new last cell; gives its output area, at once."""
        return run_cell(self.shown, code)

    def run(self, code: str) -> Any:
        output = self.start(code)
        self.idle()
        return output

    def read(self, output: Any, pattern: str) -> str:
        """The text of an output once the pattern is in it: a page draws what a cell prints a little later."""
        output.filter(has_text=re.compile(pattern)).wait_for(timeout=40_000)
        return str(output.inner_text())

    def prompt(self) -> Any:
        """The prompt of the newest cell. (The kernel's own status is that of the last request, such as a click's.)"""
        return self.shown.locator(".jp-Notebook .jp-Cell").last.locator(".jp-InputPrompt")

    def idle(self) -> None:
        # With its number: a cell that has only just been started may have neither that nor a star.
        self.prompt().filter(has_text=re.compile(r"\[\d+\]:")).wait_for(timeout=40_000)
        self.shown.wait_for_function(KERNEL_IS_IDLE, timeout=40_000)

    def cell(self, output: Any, index: int, state: str) -> Any:
        """A rank of the grid, once it is in a state."""
        cell = output.locator(f'.mnb-cell[data-index="{index}"][data-state="{state}"]')
        cell.wait_for(timeout=20_000)
        return cell


def run_cell(shown: Any, code: str) -> Any:
    """Runs code in a new last cell; gives its output area, at once."""
    index = shown.evaluate(
        """code => {
            const notebook = window.jupyterapp.shell.currentWidget.content;
            const cells = notebook.model.sharedModel;
            cells.insertCell(cells.cells.length, {cell_type: "code", source: code, metadata: {}});
            notebook.activeCellIndex = cells.cells.length - 1;
            void window.jupyterapp.commands.execute("notebook:run-cell");
            return notebook.activeCellIndex;
        }""",
        code.strip(),
    )
    return shown.locator(".jp-Notebook .jp-Cell").nth(index).locator(".jp-Cell-outputArea")


def menu(shown: Any, name: str, item: str) -> None:
    """Picks an item of the menu bar, as a person does."""
    shown.click(f'.lm-MenuBar-itemLabel:text-is("{name}")')
    shown.click(f'.lm-Menu-itemLabel:text-is("{item}")')


def theme(shown: Any, name: str) -> None:
    """Changes the theme and waits until it is applied."""
    shown.evaluate("name => window.jupyterapp.commands.execute('apputils:change-theme', {theme: name})", name)
    shown.wait_for_selector(f'body[data-jp-theme-name="{name}"]', state="attached", timeout=40_000)
    # JupyterLab removes it twice, with an error, where themes change faster.
    shown.wait_for_selector("#jupyterlab-splash", state="detached", timeout=10_000)


def capture(shown: Any, picture: Path) -> None:
    """Takes a picture of a full notebook; the window is as tall as it for the moment."""
    before = shown.viewport_size
    shown.set_viewport_size({**before, "height": 12_000})
    shown.evaluate(TOP)
    first, last = (getattr(shown.locator(".jp-Notebook .jp-Cell"), part) for part in ("first", "last"))
    shown.wait_for_function(STEADY, timeout=15_000)
    top, end = first.bounding_box(), last.bounding_box()
    clip = {"x": top["x"], "y": top["y"], "width": top["width"], "height": end["y"] + end["height"] - top["y"] + 10}
    shown.screenshot(path=picture, clip=clip)
    shown.set_viewport_size(before)
