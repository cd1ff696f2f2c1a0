"""The manual's code runs as it stands there, each chapter from top to bottom, and gives what it says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(120)
MANUAL = Path(__file__).parents[2] / "docs" / "manual"
CHAPTERS = sorted(path.name for path in MANUAL.glob("*.md"))
BLOCK = re.compile(r"^```python *(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
CHECKED = re.compile(r"^(?P<expression>\S.*?)  # -> (?P<result>.*)$", re.MULTILINE)


def program(chapter: str) -> str:
    """The chapter's code that runs on one machine; its lines stand where they stand in the chapter."""
    text = (MANUAL / chapter).read_text(encoding="utf-8")
    lines = [""] * (text.count("\n") + 1)
    for block in BLOCK.finditer(text):
        if not block[1]:
            first = text.count("\n", 0, block.start(2))
            body = CHECKED.sub(r"_check(\g<expression>, \g<result>)", block[2])
            lines[first : first + body.count("\n")] = body.splitlines()
    lines[0] = "def _check(found, wanted): assert found == wanted, f'{found!r} is not {wanted!r}'"
    return "\n".join(lines)


WITH_CODE = [name for name in CHAPTERS if "import" in program(name)]


@pytest.mark.parametrize("chapter", WITH_CODE)
def test_a_chapter_runs_and_gives_what_it_says(chapter: str, tmp_path: Path) -> None:
    path = tmp_path / chapter.replace(".md", ".py")
    path.write_text(program(chapter), encoding="utf-8")
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr


def test_the_output_that_is_shown_is_the_output_there_is(tmp_path: Path) -> None:
    text = (MANUAL / "output.md").read_text(encoding="utf-8")
    shown = text.partition("\nwrites\n\n```\n")[2].partition("```")[0]
    path = tmp_path / "output.py"
    path.write_text(program("output.md"), encoding="utf-8")
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=100, check=True)
    assert sorted(done.stdout.splitlines()) == shown.splitlines()


def test_every_chapter_is_in_the_table_of_contents_and_links_lead_somewhere() -> None:
    contents = (MANUAL / "README.md").read_text(encoding="utf-8")
    assert [name for name in CHAPTERS if name != "README.md" and f"({name})" not in contents] == []
    for path in MANUAL.glob("*.md"):
        for link in re.findall(r"\]\(([^)#:]+)\)", path.read_text(encoding="utf-8")):
            assert (MANUAL / link).exists(), f"{path.name}: {link}"
