"""The order of the site's pages."""

import re
from pathlib import Path
from typing import Any

from scripts.site import reference, stories
from scripts.site.names import module_path, modules

ROOT = Path(__file__).resolve().parents[2]
Entry = dict[str, Any]


def nav() -> list[Entry]:
    """Tabs, and the pages in each."""
    return [
        {"Home": "index.md"},
        {
            "Start": [
                {"Quickstart": "quickstart.md"},
                {"How to …": "howto.md"},
                {"Concepts": "concepts.md"},
                {"Coming from torchrun": "coming-from-torchrun.md"},
                {"Coming from torchmonarch": "coming-from-torchmonarch.md"},
                {"Coming from Lightning": "coming-from-lightning.md"},
                {"Coming from Ray": "coming-from-ray.md"},
                {"Coming from ipyparallel": "coming-from-ipyparallel.md"},
            ]
        },
        {"Stories": [{stories.title(name): stories.page_of(name)} for name in stories.stories()]},
        {"Manual": ["manual/README.md", *chapters(), {"Configuration": "configuration.md"}]},
        {"Frameworks": [*frameworks()]},
        {"Guides": [*guides()]},
        {"Reference": [{module_path(module): _of_module(module)} for module in modules()]},
        {
            "Behind it": [
                {"Compatibility": "compatibility.md"},
                {"Performance": "performance.md"},
                {"Comparison": "comparison.md"},
                {"On a GPU": "gpu.md"},
                {"Coverage of PyTorch": "tensor-coverage.md"},
                {"Models trained": "models.md"},
                {"Planted faults": "diagnosis.md"},
                {"Architecture": "architecture.md"},
                {"Decisions": ["decisions/README.md", *decisions()]},
                {"Random faults": "chaos.md"},
                {"Protocol": "protocol.md"},
                {"Changelog": "changelog.md"},
            ]
        },
    ]


def _of_module(module: str) -> str | list[Any]:
    classes = [{name.name: reference.page_of_class(name)} for name in reference.separate(module)]
    return [reference.page_of(module), *classes] if classes else reference.page_of(module)


def chapters() -> list[Entry]:
    """The manual's, as its table of contents has them."""
    return _listed("manual")


def decisions() -> list[Entry]:
    """In the order of their list."""
    return _listed("decisions")


def _listed(folder: str) -> list[Entry]:
    contents = (ROOT / "docs" / folder / "README.md").read_text(encoding="utf-8")
    entries = re.findall(r"^\d+\. \[([^\]]+)\]\(([\w-]+\.md)\)", contents, re.MULTILINE)
    return [{title: f"{folder}/{file}"} for title, file in entries]


def guides() -> list[Entry]:
    """One for each place that notebooks or clusters run in."""
    return _titled("guides")


def frameworks() -> list[Entry]:
    """One for each framework that people train with."""
    return _titled("frameworks")


def _titled(folder: str) -> list[Entry]:
    entries = []
    for path in sorted((ROOT / "docs" / folder).glob("*.md")):
        title = re.search(r"^# (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
        entries.append({title[1] if title else path.stem: f"{folder}/{path.name}"})
    return entries


def pages(entries: list[Any]) -> list[str]:
    """The files in (a part of) the order."""
    files = []
    for entry in entries:
        if isinstance(entry, str):
            files.append(entry)
            continue
        for children in entry.values():
            files += [children] if isinstance(children, str) else pages(children)
    return files
