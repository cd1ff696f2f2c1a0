"""Links between files of the repository, as links between pages of the site; and headings as anchors."""

import posixpath
import re
import unicodedata
from collections.abc import Callable

HOME = "https://github.com/monarch-nb/monarch-nb/blob/main/"
_LINK = re.compile(r"`[^`\n]*`|(\]\()([^)\s#:]+)(#[^)\s]*)?(\))")  # code within a line has no links
_PICTURE = re.compile(
    r'<picture><source media="\(prefers-color-scheme: dark\)" srcset="(?P<dark>[^"]+)">'
    r'<img alt="(?P<alt>[^"]*)" src="(?P<light>[^"]+)"></picture>'
)
_FENCE = re.compile(r"^```(python raises \w+|python machines|output)$", re.MULTILINE)
_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#{1,6} +(.+?)(?: *\{ *#(?P<id>[^ }]+) *\})?$", re.MULTILINE)


def page_at(file: str) -> str | None:
    """The page of the site that a file of the repository is; None where it is none."""
    if file == "README.md":
        return "index.md"
    if file == "CHANGELOG.md":
        return "changelog.md"
    if file.startswith("docs/"):
        return file.removeprefix("docs/")
    if file.startswith("examples/") and file.endswith(".ipynb"):
        return f"stories/{posixpath.basename(file)[:-6]}.md"
    return None


def file_of(page: str) -> str:
    """The file of the repository that a page is made of; that of the page itself for pages that are made of code."""
    if page == "index.md":
        return "README.md"
    if page == "changelog.md":
        return "CHANGELOG.md"
    if page.startswith("stories/"):
        return f"examples/{posixpath.basename(page)[:-3]}.ipynb"
    return f"docs/{page}"


def adapted(page: str, text: str) -> str:
    """The Markdown of a page as the site's tools take it."""
    folder = posixpath.dirname(file_of(page))

    def link(match: re.Match[str]) -> str:
        if not match[1]:
            return match[0]
        target = posixpath.normpath(posixpath.join(folder, match[2]))
        path = page_at(target)
        moved = f"{HOME}{target}" if path is None else posixpath.relpath(path, posixpath.dirname(page) or ".")
        return f"{match[1]}{moved}{match[3] or ''}{match[4]}"

    def picture(match: re.Match[str]) -> str:
        return f"![{match['alt']}]({match['light']}#only-light)![{match['alt']}]({match['dark']}#only-dark)"

    text = _FENCE.sub(lambda match: "```python" if match[1].startswith("python") else "```text", text)
    return outside_code(_PICTURE.sub(picture, text), lambda part: _LINK.sub(link, part))


def outside_code(text: str, change: Callable[[str], str]) -> str:
    """A page with `change` applied outside of fenced blocks."""
    parts, position = [], 0
    for fenced in _FENCED.finditer(text):
        parts += [change(text[position : fenced.start()]), fenced[0]]
        position = fenced.end()
    return "".join([*parts, change(text[position:])])


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as the site and GitHub make them."""
    counts: dict[str, int] = {}
    names = set()
    for heading in _HEADING.finditer(_FENCED.sub("", text)):
        if heading["id"]:
            names.add(heading["id"])
            continue
        slug = slug_of(heading[1])
        number = counts[slug] = counts.get(slug, -1) + 1
        names.add(f"{slug}_{number}" if number else slug)
    return names


def slug_of(heading: str) -> str:
    """As Python-Markdown's toc makes it."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
    value = unicodedata.normalize("NFKD", plain).encode("ascii", "ignore").decode("ascii")
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", value).strip().lower())


def links(text: str) -> list[tuple[str, str]]:
    """The pages, or files, that a page leads to, each with the anchor there, "" for none."""
    plain = _FENCED.sub("", text)
    targets = [(match[2], (match[3] or "").removeprefix("#")) for match in _LINK.finditer(plain) if match[1]]
    return targets + [("", match[1]) for match in re.finditer(r"\]\(#([^)\s]+)\)", plain)]
