"""Contents and metadata of a wheel of this tree, which is all that a stranger has."""

import ast
import importlib.util
import re
import zipfile
from collections.abc import Iterator
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import hatchling.build
import pytest
from packaging.requirements import Requirement

from monarch_nb import __version__
from monarch_nb._package import HOMEPAGE
from monarch_nb._parsing import parsed

pytestmark = pytest.mark.sources
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    folder = tmp_path_factory.mktemp("wheel")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        name = hatchling.build.build_wheel(str(folder))
    with zipfile.ZipFile(folder / name) as opened:
        yield opened


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return message_from_bytes(wheel.read(name))


def _extra(metadata: Message, name: str) -> dict[str, Requirement]:
    entries = [Requirement(text) for text in metadata.get_all("Requires-Dist", [])]
    active = [entry for entry in entries if entry.marker is None or entry.marker.evaluate({"extra": name})]
    return {entry.name: entry for entry in active}


def test_links_of_the_long_description_work_on_a_package_index(metadata: Message) -> None:
    text = str(metadata.get_payload())
    links = [*re.findall(r'(?:src|srcset)="([^"]+)"', text), *re.findall(r"\]\(([^)]+)\)", text)]
    assert len(links) > 10
    assert [link for link in links if not re.match(r"https://|#", link)] == []
    raw = HOMEPAGE.replace("github.com", "raw.githubusercontent.com") + "/main/"
    pictures = [link for link in links if link.endswith(".png")]
    assert pictures
    for link in pictures:
        assert (ROOT / link.removeprefix(raw)).is_file(), link


def test_a_package_index_shows_where_the_project_is_at_home(metadata: Message) -> None:
    urls = dict(entry.split(", ", 1) for entry in metadata.get_all("Project-URL", []))
    assert {"Homepage", "Documentation", "Issues", "Changelog"} <= urls.keys()
    assert [url for url in urls.values() if not url.startswith(HOMEPAGE)] == []
    assert metadata["Version"] == __version__


def test_the_command_leaves_an_installed_torchmonarchs_command_alone(wheel: zipfile.ZipFile) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert wheel.read(name).decode().split("\n\n")[0].strip() == "[console_scripts]\nmonarch-nb = monarch_nb.cli:main"
    assert not [name for name in wheel.namelist() if name.startswith("monarch/")]


def test_the_notebook_extra_takes_the_versions_that_a_hosted_notebook_has(metadata: Message) -> None:
    spec = importlib.util.spec_from_file_location("kernels", ROOT / "scripts" / "kernels.py")
    assert spec is not None
    assert spec.loader is not None
    kernels = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(kernels)
    pins = dict(pin.split("==") for pin in kernels.KERNELS["colab"] if "==" in pin)
    extra = _extra(metadata, "notebook")
    assert {"ipykernel", "ipywidgets", "anywidget"} <= extra.keys() & pins.keys()
    assert [name for name in extra.keys() & pins.keys() if not extra[name].specifier.contains(pins[name])] == []
    assert "jupyterlab" not in extra  # it would replace the server that runs there


def test_the_lab_extra_is_that_of_notebooks_and_jupyterlab(metadata: Message) -> None:
    assert _extra(metadata, "lab").keys() - _extra(metadata, "notebook").keys() == {"jupyterlab"}
    assert _extra(metadata, "lab")["ipykernel"].specifier == _extra(metadata, "notebook")["ipykernel"].specifier


def test_the_readme_says_who_needs_which_extra(metadata: Message) -> None:
    text = str(metadata.get_payload())
    install = text.partition("## Install")[2].partition("\n## ")[0]
    for extra in metadata.get_all("Provides-Extra", []):
        if extra != "dev":
            assert f"`{extra}`" in install, extra
    assert f"monarch_nb-{__version__}-py3-none-any.whl[lab]" in install


def _texts(source: str) -> list[str]:
    """The texts of a program that are no docstrings."""
    tree = parsed(source)
    notes = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    constants = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in notes)
    return [node.value for node in constants if isinstance(node.value, str)]


@pytest.mark.slow
def test_no_message_leads_to_a_file_that_only_the_repository_has() -> None:
    files = [*(ROOT / "monarch_nb").rglob("*.py"), *(ROOT / "kernel_ext").rglob("*.py")]
    assert len(files) > 200
    for path in files:
        for text in _texts(path.read_text(encoding="utf-8")):
            reference = re.search(r"\bdocs/|\.md\b.*\bsee\b|see \S+\.md", text)
            assert path.name == "_package.py" or not reference, (path, text)
    assert (ROOT / "docs" / "compatibility.md").is_file()


def test_live_displays_need_no_npm_where_the_wheel_is_installed(wheel: zipfile.ZipFile) -> None:
    names = {
        name.removeprefix("monarch_kernel/static/") for name in wheel.namelist() if "monarch_kernel/static/" in name
    }
    assert {"mesh.js", "mesh.css", "metrics.js", "uPlot.LICENSE"} <= names
    assert not [name for name in wheel.namelist() if name.endswith((".ts", ".mjs"))]
