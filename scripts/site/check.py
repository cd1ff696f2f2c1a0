"""python -m scripts.site.check FOLDER: whether a site that was built has every public name, described."""

import re
import sys
from pathlib import Path

from scripts.site.names import first_home, modules, names
from scripts.site.reference import page_of


def missing(folder: Path) -> list[str]:
    """Public names without a heading, or without a text below it."""
    found = []
    for module in modules():
        page = folder / page_of(module).removesuffix(".md") / "index.html"
        parts = re.split(r'<h2 id="([^"]+)"', page.read_text(encoding="utf-8"))
        texts = dict(zip(parts[1::2], parts[2::2], strict=True))
        for name in names(module):
            here = not name.home or first_home()[name.home] != name
            if name.anchor not in texts or not (here or "doc-contents" in texts[name.anchor]):
                found.append(name.full)
    return found


def main() -> int:
    gone = missing(Path(sys.argv[1]))
    for name in gone:
        print(f"{name} is not described on the site")
    return 1 if gone else 0


if __name__ == "__main__":
    sys.exit(main())
