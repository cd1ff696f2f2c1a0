"""What people paste first, from the README and the quickstart page, runs as it stands there."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.notebook.notebook import Notebook

ROOT = Path(__file__).resolve().parents[2]


def _blocks(path: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.fixture
def fresh() -> Iterator[Notebook]:
    notebook = Notebook(load=False)
    try:
        yield notebook
    finally:
        notebook.close()


def test_the_first_cell_of_the_readme_greets_from_each_rank(fresh: Notebook) -> None:
    (cell,) = _blocks("README.md")
    shown = fresh.run(cell).ok()
    assert [f"from rank {rank}" in shown.text for rank in range(4)] == [True] * 4
    assert shown.stderr == ""


def test_the_code_of_the_quickstart_page_runs_in_order(fresh: Notebook) -> None:
    blocks = _blocks("docs/quickstart.md")
    adverbs = re.findall(r"^\| `(.*?)` \|", (ROOT / "docs/quickstart.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(adverbs) == 4
    fresh.run("%load_ext monarch\nfrom monarch.actor import heal_mesh").ok()
    for block in (*blocks[:-1], *adverbs, blocks[-1]):
        assert fresh.run(block).ok().stderr == ""


def test_the_cells_of_the_manuals_chapter_on_notebooks_run_in_order(fresh: Notebook) -> None:
    text = (ROOT / "docs/manual/notebook.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python notebook\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 6
    shown = [fresh.run(block).ok() for block in blocks]
    assert [cell.stderr for cell in shown] == [""] * 6
    assert "hello from 1" in shown[1].stdout
    assert shown[1].text.endswith("gpus=1: 10")
    assert shown[2].text == "<Counter mesh 'counters' {gpus=2}>"
    assert shown[3].text.endswith("101")
