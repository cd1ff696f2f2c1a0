"""The front ends without a page: their own tests, in TypeScript, and their bundles in Python."""

import shutil
import subprocess
from pathlib import Path

import pytest

from monarch_kernel.views import VIEWS as ALL_VIEWS
from monarch_kernel.views import live
from monarch_kernel.views.live import BUNDLES, LARGEST, LARGEST_PANEL, STATIC, script, style
from monarch_kernel.views.profiles import PROFILES
from monarch_kernel.views.widgets import widget_base, widget_class

pytestmark = pytest.mark.sources
ROOT = Path(__file__).parents[2]

SVG = "http://www.w3.org/2000/svg"  # the namespace of SVG elements, which nobody fetches


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("target", ["test", "bundles"])
def test_front_end_tests_pass_and_bundles_match_their_sources(target: str) -> None:
    command = ["scripts/front-end", target]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-8000:]}\n{done.stderr[-4000:]}"
    if "SKIP front end" in done.stderr:
        pytest.skip(done.stderr.strip().partition("\n")[0])


def test_there_is_a_bundle_for_each_view_and_nothing_else() -> None:
    bundles = {f"{view}.{kind}" for view in BUNDLES for kind in ("js", "css")}
    assert {path.name for path in STATIC.iterdir()} == bundles | {"uPlot.LICENSE"}


@pytest.mark.parametrize("view", BUNDLES)
def test_a_bundle_is_one_module_that_node_takes(view: str, tmp_path: Path) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("SKIPPED bundles of the front end: there is no node on PATH")
    bundle = tmp_path / "bundle.mjs"
    # A page has it, and uPlot reads it when it is loaded.
    bundle.write_text(f"globalThis.matchMedia ??= () => new EventTarget();\n{script(view)}")
    code = f"console.log(typeof (await import({str(bundle)!r})).default.render)"
    done = subprocess.run([node, "--input-type=module", "-e", code], capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout) == (0, "function\n"), done.stderr


@pytest.mark.parametrize("view", BUNDLES)
def test_a_bundle_is_small_and_fetches_nothing(view: str) -> None:
    text = (script(view) + style(view)).replace(SVG, "")
    assert len(text.encode()) <= (LARGEST_PANEL if view == "panel" else LARGEST)
    assert "\n" in script(view)  # or anywidget takes it for the name of a file
    assert "\n" in style(view)
    for fetching in ("http:", "https:", "fetch(", "import(", "XMLHttpRequest", "url(", "import{", 'from"', "@import"):
        assert fetching not in text


def test_without_the_bundles_there_are_no_widgets_and_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(live, "STATIC", tmp_path)
    assert widget_base() is None
    assert "`make setup`" in caplog.text


def test_each_view_is_a_widget_with_its_own_module_and_style() -> None:
    base = widget_base()
    widgets = {view.name: widget_class(base, view)() for view in (*ALL_VIEWS, PROFILES)}
    assert set(widgets) == set(BUNDLES)
    assert {view: (widget._esm, widget._css) for view, widget in widgets.items()} == {
        view: (script(view), style(view)) for view in BUNDLES
    }
    assert len({widget._anywidget_id for widget in widgets.values()}) == len(BUNDLES)  # a page keeps one sheet for each
