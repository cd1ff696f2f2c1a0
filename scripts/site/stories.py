"""The notebooks of examples/ as pages: text and code as they stand there. Tests execute each of them."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ORDER = ("quickstart", "tensors", "train_gpt", "weight_sync", "data_loading", "debugging")


def page_of(story: str) -> str:
    """The file of a notebook's page, within docs/."""
    return f"stories/{story}.md"


def stories() -> list[str]:
    """The notebooks, in the order of the site; new ones at the end."""
    found = [path.stem for path in sorted((ROOT / "examples").glob("*.ipynb"))]
    return [*(story for story in ORDER if story in found), *(story for story in found if story not in ORDER)]


def title(story: str) -> str:
    """The first heading of a notebook."""
    found = re.search(r"^# (.+)$", text(story), re.MULTILINE)
    return found[1] if found else story


def text(story: str) -> str:
    """A notebook as a page."""
    notebook = json.loads((ROOT / "examples" / f"{story}.ipynb").read_text(encoding="utf-8"))
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source.rstrip()}\n```")
    return "\n\n".join(part for part in parts if part.strip()) + "\n"
