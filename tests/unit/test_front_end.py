"""The front ends without a page: their own tests, run by node, and that they are one module of a size that travels."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from monarch_kernel.views.bundle import LARGEST, MODULES, STATIC, script, style

TESTS = Path(__file__).resolve().parents[1] / "front"


def node() -> str:
    path = shutil.which("node")
    if path is None:
        pytest.skip("SKIPPED front-end tests: there is no node on PATH")
    return path


@pytest.mark.parametrize("name", sorted(path.name for path in TESTS.glob("*.test.mjs")))
def test_of_the_front_end_pass(name: str, tmp_path: Path) -> None:
    shutil.copytree(STATIC, tmp_path / "static")
    shutil.copy(TESTS / name, tmp_path)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    done = subprocess.run([node(), "--test", name], cwd=tmp_path, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr
    assert "# pass 0" not in done.stdout


def test_the_bundle_is_one_module_without_imports_that_node_takes(tmp_path: Path) -> None:
    assert re.findall(r"^(?:import|export)\b.*", script(), re.MULTILINE) == ["export default { render };"]
    bundle = tmp_path / "bundle.mjs"
    bundle.write_text(f"{script()}\nconsole.log(typeof render);")  # a name that two modules give is a SyntaxError
    done = subprocess.run([node(), str(bundle)], capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout) == (0, "function\n"), done.stderr


def test_the_bundle_is_small_enough_to_travel_with_each_widget_and_fetches_nothing() -> None:
    assert len(script().encode()) + len(style().encode()) <= LARGEST
    for fetching in ("http:", "https:", "fetch(", "import(", "XMLHttpRequest", "url("):
        assert fetching not in script() + style()


def test_modules_import_only_from_those_before_them() -> None:
    assert {path.stem for path in STATIC.glob("*.js")} == set(MODULES)
    for at, name in enumerate(MODULES):
        imports = re.findall(r'from "\./(\w+)\.js"', (STATIC / f"{name}.js").read_text())
        assert set(imports) <= set(MODULES[:at]), name
