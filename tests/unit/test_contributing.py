"""Each how-to of CONTRIBUTING.md, applied literally to a copy of the repository."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.sources, pytest.mark.slow, pytest.mark.timeout(300)]
ROOT = Path(__file__).resolve().parents[2]
COPIED = (
    *("monarch_nb", "kernel_ext", "benchmarks", "tests", "scripts", "docs", "examples"),
    *("pyproject.toml", "README.md"),
)
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
HOW_TO = re.compile(r"^### ([^\n]+)\n(.*?)(?=^###? |\Z)", re.MULTILINE | re.DOTALL)
KINDS = ["magic", "setting", "verb", "job kind", "transport", "mover", "operator rule", "view"]
SECTIONS = dict(HOW_TO.findall((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the files that the how-tos change and run."""
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_there_is_a_how_to_for_every_kind_of_extension() -> None:
    assert [kind for kind in KINDS if not any(kind in title for title in SECTIONS)] == []


@pytest.mark.parametrize("title", SECTIONS)
def test_each_how_to_does_what_it_says(title: str, tree: Path) -> None:
    commands = 0
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (tree, tree / "kernel_ext")))}
    for language, path, text in BLOCK.findall(SECTIONS[title]):
        if path:
            (tree / path).write_text(text, encoding="utf-8")
        elif language == "diff":
            done = subprocess.run(["git", "apply", "-C1", "-"], cwd=tree, input=text, text=True, capture_output=True)
            assert done.returncode == 0, done.stderr
        else:
            assert language == "console"
            for line in text.splitlines():
                words = shlex.split(line.removeprefix("$ "))
                assert words[0] == ".venv/bin/python", "commands are those of the page's environment"
                done = subprocess.run(
                    [sys.executable, *words[1:]], cwd=tree, env=environment, text=True, capture_output=True
                )
                assert done.returncode == 0, done.stdout + done.stderr
                commands += 1
    assert commands, "a how-to ends with a command that shows that it works"
