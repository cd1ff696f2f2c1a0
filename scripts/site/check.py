"""python -m scripts.site.check FOLDER: checks a site that was built.

Every public name has its heading and a text below it; links, pictures and anchors within the site have targets, also
those that docstrings and themes bring; every picture is there for light and dark; the switch between versions works.
"""

import re
import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from scripts.site import versions
from scripts.site.names import first_home, modules, names
from scripts.site.reference import page_of, page_of_class, separate


class Page(HTMLParser):
    """The links of a page, and its anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.leads: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Notes links and anchors."""
        for key, value in attrs:
            if value and (key in ("id", "name")):
                self.anchors.add(value)
            elif value and key in ("href", "src"):
                self.leads.append(value)


@cache
def read(path: Path) -> Page:
    """A page, parsed once."""
    return Page(path.read_text(encoding="utf-8"))


def missing(folder: Path) -> list[str]:
    """Public names without a heading, or without a text below it."""
    problems = []
    for module in modules():
        page = folder / page_of(module).removesuffix(".md") / "index.html"
        parts = re.split(r'<h2 id="([^"]+)"', page.read_text(encoding="utf-8"))
        texts = dict(zip(parts[1::2], parts[2::2], strict=True))
        for name in names(module):
            short = not name.home or first_home()[name.home] != name
            described = texts.get(name.anchor, "")
            if name in separate(module):
                described = (folder / page_of_class(name).removesuffix(".md") / "index.html").read_text("utf-8")
            if name.anchor not in texts or not (short or "doc-contents" in described):
                problems.append(f"{name.full} is not described")
    return problems


def dead(folder: Path) -> list[str]:
    """Links, pictures and anchors without a target. 404.html is served from anywhere: it is left out."""
    problems = []
    for path in sorted(folder.rglob("*.html")):
        if path.name == "404.html":
            continue
        for address in sorted(set(read(path).leads)):
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            anchor = unquote(parts.fragment)
            shown = anchor in ("only-light", "only-dark", "__skip")
            if not target.exists() or (anchor and not shown and anchor not in read(target).anchors):
                problems.append(f"{path.relative_to(folder)} leads to {address}, which is not there")
    return problems


def one_sided(folder: Path) -> list[str]:
    """Pictures that only one of the two colour schemes has."""
    names = {path.name for path in (folder / "images").glob("*.png")}
    opposite = {"light": "dark", "dark": "light"}
    return [
        f"images/{name} is there for one colour scheme only"
        for name in sorted(names)
        if (side := re.fullmatch(r"(.+)-(light|dark)\.png", name)) and f"{side[1]}-{opposite[side[2]]}.png" not in names
    ]


def main() -> int:
    site = Path(sys.argv[1])
    folder = site / versions.this()
    problems = [*missing(folder), *dead(folder), *one_sided(folder), *versions.wrong(site)]
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
