"""A notebook of marimo in its own editor: ranks come, are shown live, profiled, debugged, lost and healed."""

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts.kernels import PATH, ROOT, interpreter
from tests.browser.lab import SCREENSHOTS, browser
from tests.ports import free_port

pytestmark = [
    pytest.mark.slow,  # a server, a kernel and a browser
    pytest.mark.timeout(180),
]
PAGE = ROOT / "tests" / "notebook" / "marimo_page.py"


@contextlib.contextmanager
def edited(folder: Path, theme: str) -> Iterator[str]:
    """marimo's editor of a copy of the page; its address."""
    try:
        python = interpreter("marimo")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"SKIPPED marimo: its environment cannot be made: {error.stderr[-500:]}")
    (folder / "marimo").mkdir(parents=True)
    (folder / "marimo" / "marimo.toml").write_text(f'[display]\ntheme = "{theme}"\n')
    shutil.copy(PAGE, folder / "page.py")
    port = free_port()
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(
            [
                *(str(python), "-m", "marimo", "edit", str(folder / "page.py"), "--headless", "--no-token"),
                *("--host", "127.0.0.1", "--port", str(port), "--skip-update-check"),
            ],
            env={**os.environ, "PYTHONPATH": PATH, "XDG_CONFIG_HOME": str(folder), "HOME": str(folder)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            _answers(server, port, folder / "server.log")
            yield f"http://127.0.0.1:{port}/"
        finally:
            server.terminate()
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _answers(server: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        assert server.poll() is None, log.read_text()
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.1)
    raise AssertionError(f"marimo did not come up:\n{log.read_text()}")


def picture(page: Any, theme: str) -> None:
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / f"marimo-{theme}.png")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_live_mesh_view_survives_a_dead_rank_and_heals_it(tmp_path: Path, theme: str) -> None:
    with edited(tmp_path / "home", theme) as address, browser() as started:
        page = started.new_page(viewport={"width": 1000, "height": 2300})
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(address)
        page.get_by_text("import monarch").first.wait_for(timeout=60_000)
        page.locator('[data-testid="run-button"]').first.wait_for(timeout=60_000)
        page.keyboard.press("Control+Shift+R")  # an opened notebook does not run by itself
        page.locator(".mnb-flame").first.wait_for(timeout=90_000)
        page.get_by_text("loss on the stopped rank: {2: 0.81").first.wait_for(timeout=30_000)
        page.locator('.mnb-cell[data-index="1"][data-state="failed"]').wait_for(timeout=30_000)
        picture(page, theme)
        page.get_by_role("button", name="Heal").first.click()
        page.locator('.mnb-cell[data-index="1"][data-state="idle"]').wait_for(timeout=30_000)
        assert page.get_by_text("Kernel stopped").count() == 0
        assert errors == []
