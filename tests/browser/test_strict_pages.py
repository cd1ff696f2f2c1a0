"""Displays in pages with a strict policy: frames in a sandbox, policies without eval and inline scripts."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel import show
from monarch_kernel.views.live import BUNDLES, script, style
from monarch_nb.mesh import state_of, this_host
from monarch_nb.runtime import current_runtime
from monarch_nb.store import store_of
from monarch_nb.testing import cluster
from tests.browser.lab import SCREENSHOTS, Lab, browser, opened, panel_built, serve, write_notebook

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]
HOME = "http://front.test"
STRICT = f"default-src 'none'; script-src {HOME}; style-src 'unsafe-inline'; img-src data:"
# As anywidget does, with a model that has no kernel, as in a saved notebook.
DRAWS = """
import view from "/{view}.js";
const saved = {saved};
const model = {{get: (name) => saved[name], send: () => {{ throw new Error("no kernel"); }}, on() {{}}, off() {{}}}};
document.addEventListener("securitypolicyviolation", (event) => {{ window.refused = event.violatedDirective; }});
view.render({{model, el: document.getElementById("here")}});
window.drawn = true;
"""


@pytest.fixture(scope="module")
def saved() -> tuple[dict[str, Any], str]:
    """The saved forms of a display: for its view, and as HTML."""
    with cluster():
        procs = this_host().spawn_procs(per_host={"gpus": 4}, name="workers")
        procs.initialized.get(10)
        state = json.loads(json.dumps(store_of(current_runtime()).document()))
        options = {"mesh": state_of(procs).uid}
        return {"options": options, "saved": {"now": time.time(), "state": state}}, show(procs)._repr_html_()


@pytest.fixture(scope="module")
def started() -> Iterator[Any]:
    with browser() as by:
        yield by


@pytest.fixture
def page(started: Any) -> Iterator[Any]:
    shown = started.new_page()
    yield shown
    shown.close()


def framed(page: Any, files: dict[str, str], policy: str, sandbox: str) -> Any:
    """A frame in a sandbox, with this policy, at the address of `inner`."""

    def answer(route: Any) -> None:
        name = route.request.url.rsplit("/", 1)[1]
        kind = "text/javascript" if name.endswith(".js") else "text/html"
        headers = {"Content-Type": kind, "Access-Control-Allow-Origin": "*", "Content-Security-Policy": policy}
        body = files.get(name)
        route.fulfill(status=200 if body is not None else 404, headers=headers, body=body or "")

    page.unroute_all()
    page.route(f"{HOME}/**", answer)
    page.set_content(f'<iframe sandbox="{sandbox}" width="900" height="600" src="{HOME}/inner"></iframe>')
    return page.frame_locator("iframe")


@pytest.mark.parametrize("view", BUNDLES)
def test_a_view_works_in_a_sandbox_without_eval_and_inline_scripts(
    page: Any, saved: tuple[dict[str, Any], str], view: str
) -> None:
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    files = {
        "inner": f"<style>{style(view)}</style><div id=here></div><script type=module src=/draws.js></script>",
        f"{view}.js": script(view),
        "draws.js": DRAWS.format(view=view, saved=json.dumps(saved[0])),
    }
    frame = framed(page, files, STRICT, "allow-scripts")
    frame.locator(".mnb-v").first.wait_for(state="attached", timeout=15_000)
    inner = next(candidate for candidate in page.frames if candidate.url.startswith(HOME))
    inner.wait_for_function("window.drawn", timeout=10_000)
    assert inner.evaluate("window.refused ?? null") is None
    assert errors == []
    if view == "mesh":
        assert frame.locator('.mnb-cell[data-state="idle"]').count() == 4


def test_a_static_display_needs_no_script_and_reads_without_its_style(
    page: Any, saved: tuple[dict[str, Any], str]
) -> None:
    for policy in ("default-src 'none'; style-src 'unsafe-inline'", "default-src 'none'"):
        frame = framed(page, {"inner": f"<body>{saved[1]}</body>"}, policy, "")
        text = frame.locator(".mnb").inner_text(timeout=10_000)
        assert "workers" in text
        assert "4 idle" in text or "idle" in text
        assert frame.locator("button:visible").count() == 0, "no button that nothing is behind"


# JupyterLab itself does not start without eval.
POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-eval'{more}; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; "
    "font-src 'self' data:; connect-src 'self' ws: wss:; worker-src 'self' blob:"
)
CONFIG = "c.ServerApp.tornado_settings = {{'headers': {{'Content-Security-Policy': {policy!r}}}}}"
BEGIN = """
import os
os.environ["MONARCH_NB_PRELOAD"] = ""
%load_ext monarch
%mesh workers gpus=2
workers.initialized.get()
"""


@pytest.mark.parametrize("modules", [True, False], ids=["modules-of-the-kernel-are-let-run", "they-are-not"])
def test_displays_under_a_strict_policy_are_live_or_say_why(started: Any, modules: bool, tmp_path: Path) -> None:
    panel_built()
    path = write_notebook(tmp_path / "strict.ipynb", ["x = 1"])
    policy = POLICY.format(more=" blob:" if modules else "")
    with (
        serve(tmp_path / "lab", {}, CONFIG.format(policy=policy)) as served,
        opened(started, served.add(path)) as shown,
    ):
        notebook = Lab(shown)
        notebook.run(BEGIN)
        output = notebook.run("workers")
        if modules:
            notebook.cell(output, 1, "idle")
        else:
            assert "forbids blob: scripts" in notebook.read(output, "forbids")
            assert "2 idle" in notebook.read(output, "workers") or "idle" in output.inner_text()
        shown.evaluate("window.jupyterapp.commands.execute('monarch-nb:open')")
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        try:
            shown.locator(".mnb-panel-summary", has_text="2/2 ranks").wait_for(timeout=40_000)
        finally:
            shown.screenshot(path=SCREENSHOTS / f"strict_{'live' if modules else 'saved'}.png")
