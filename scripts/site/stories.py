"""The notebooks of examples/ as pages: text, code and outputs. Tests execute each of them."""

import html
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
ORDER = (
    *("quickstart", "tensors", "train_gpt", "finetune", "weight_sync", "grpo", "data_loading", "pipeline", "serve"),
    *("elastic", "debugging", "who_is_to_blame"),
)


def page_of(name: str) -> str:
    """The file of a notebook's page, within docs/."""
    return f"stories/{name}.md"


def stories() -> list[str]:
    """The notebooks, in the order of the site; new ones at the end."""
    names = [path.stem for path in sorted((ROOT / "examples").glob("*.ipynb"))]
    return [*(name for name in ORDER if name in names), *(name for name in names if name not in ORDER)]


def title(name: str) -> str:
    """The first heading of a notebook."""
    heading = re.search(r"^# (.+)$", text(name), re.MULTILINE)
    return heading[1] if heading else name


def text(name: str) -> str:
    """A notebook as a page, with a mark for each picture: Markdown would change its content."""
    parts = []
    for cell in _cells(name):
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source.rstrip()}\n```")
        for i, output in enumerate(cell.get("outputs", ())):
            words = _words(output)
            fence = "`" * max(3, *(len(run) + 1 for run in re.findall("`+", words) or [""]))
            parts.append(_mark(cell["id"], i) if _picture(output) else f"{fence}text\n{words}\n{fence}" * bool(words))
    return "\n\n".join(part for part in parts if part.strip()) + "\n"


def with_pictures(name: str, page: str) -> str:
    """The HTML of a page with its pictures where their marks are."""
    for cell in _cells(name):
        for number, output in enumerate(cell.get("outputs", ())):
            if picture := _picture(output):
                shown = f'<div class="notebook-output">{picture}</div>'
                page = page.replace(_mark(cell["id"], number), shown)
    return page


def _cells(name: str) -> Iterator[dict[str, Any]]:
    notebook = json.loads((ROOT / "examples" / f"{name}.ipynb").read_text(encoding="utf-8"))
    yield from notebook["cells"]


def _mark(cell: str, number: int) -> str:
    return f'<div id="output-{cell}-{number}"></div>'


def _picture(output: dict[str, Any]) -> str:
    """The HTML of an output that is more than text, "" if none."""
    data = output.get("data", {})
    for mime in ("text/html", "image/svg+xml"):
        if mime in data:
            return "".join(data[mime])
    if "image/png" in data:
        alt = html.escape("".join(data.get("text/plain", "")))
        return f'<img alt="{alt}" src="data:image/png;base64,{"".join(data["image/png"]).strip()}">'
    return ""


def _words(output: dict[str, Any]) -> str:
    """The text of an output, without colours."""
    if output["output_type"] == "error":
        text = "\n".join(output["traceback"])
    else:
        text = "".join(output["text"] if output["output_type"] == "stream" else output["data"].get("text/plain", ""))
    return _COLOURS.sub("", text).strip("\n")
