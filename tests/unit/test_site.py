"""The documentation site: all pages are in it, links and anchors lead somewhere, every public name has its place.

`make docs` builds it; these tests need no build.
"""

import ast
import importlib
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import monarch_nb
from monarch_nb._parsing import parsed
from monarch_nb.rdma.errors import owner_lost
from monarch_nb.transport import TrustError
from monarch_nb.transport.keys import require_keys
from scripts.site import order, reference, stories, versions
from scripts.site.links import adapted, anchors, file_of, links, page_at, slug_of
from scripts.site.names import Name, example, first_home, modules, names

pytestmark = [pytest.mark.timeout(60), pytest.mark.sources]
ROOT = Path(__file__).resolve().parents[2]
NAMES = [name for module in modules() for name in names(module)]
REFERENCE = reference.pages()


def test_every_page_of_docs_is_in_the_order() -> None:
    written = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    extra = {"index.md", "changelog.md", *reference.pages(), *(stories.page_of(story) for story in stories.stories())}
    listed = order.pages(order.nav())
    assert sorted(listed) == sorted(written | extra)
    assert len(set(listed)) == len(listed)


def markdown(page: str) -> str:
    """A page as the site has it."""
    if page.startswith("reference/"):
        return REFERENCE[page]
    if page.startswith("stories/"):
        return adapted(page, stories.text(page.removeprefix("stories/").removesuffix(".md")))
    return adapted(page, (ROOT / file_of(page)).read_text(encoding="utf-8"))


def dead_links(page: str, texts: dict[str, str]) -> Iterator[str]:
    for target, anchor in links(texts[page]):
        path = Path("/", page).parent.joinpath(target).resolve().relative_to("/").as_posix() if target else page
        if path in texts:
            if anchor and anchor not in anchors(texts[path]):
                yield f"{page}: {target}#{anchor}"
        elif not (ROOT / "docs" / path).exists():
            yield f"{page}: {target}"


def test_links_between_pages_and_their_anchors_lead_somewhere() -> None:
    texts = {page: markdown(page) for page in order.pages(order.nav())}
    assert [link for page in texts for link in dead_links(page, texts)] == []


def test_headings_with_links_have_the_same_anchor_on_github() -> None:
    """GitHub leaves the hyphens of characters that it removes: `a-&-b` is `a--b` there, and `a-b` on the site."""
    texts = {page: markdown(page) for page in order.pages(order.nav())}
    anchored = {anchor for text in texts.values() for _, anchor in links(text) if anchor}
    for page, text in texts.items():
        for heading in re.findall(r"^#+ (\S.*)$", text, re.MULTILINE):
            if slug_of(heading) in anchored:
                plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
                assert slug_of(heading) == re.sub(r"[^\w -]", "", plain).lower().replace(" ", "-"), f"{page}: {heading}"


def test_a_dead_link_is_found() -> None:
    texts = {"a/one.md": "[x](two.md#there) [y](two.md#not-there) [z](three.md)", "a/two.md": "# There\n"}
    assert list(dead_links("a/one.md", texts)) == ["a/one.md: two.md#not-there", "a/one.md: three.md"]


def test_links_of_files_are_links_of_pages_on_the_site() -> None:
    text = (
        "[a](../../examples/debugging.ipynb) [b](../quickstart.md#actors) [c](../../LICENSE) "
        "`[d](e)` [`h`](../../examples/debugging.ipynb)\n```output\n[f](g)\n```"
    )
    assert adapted("manual/debugging.md", text) == (
        "[a](../stories/debugging.md) [b](../quickstart.md#actors) "
        "[c](https://github.com/monarch-nb/monarch-nb/blob/main/LICENSE) `[d](e)` [`h`](../stories/debugging.md)\n"
        "```text\n[f](g)\n```"
    )
    assert adapted("index.md", "[a](docs/manual/README.md)") == "[a](manual/README.md)"
    picture = (
        '<picture><source media="(prefers-color-scheme: dark)" srcset="docs/images/d.png">'
        '<img alt="A" src="docs/images/l.png"></picture>'
    )
    assert adapted("index.md", picture) == "![A](images/l.png#only-light)![A](images/d.png#only-dark)"


# -- names -------------------------------------------------------------------------------------------------------------


def test_every_public_name_has_a_heading_on_its_modules_page() -> None:
    for module in modules():
        headings = anchors(reference.text(module))
        assert [name.full for name in names(module) if name.anchor not in headings] == []


def test_every_public_name_is_documented_where_the_site_looks() -> None:
    for name in NAMES:
        if not name.home:
            continue
        module, _, path = name.home.rpartition(".")
        assert getattr(importlib.import_module(module), path) is name.value, name.full
        assert inspect.getdoc(name.value), name.full


def test_every_public_name_is_described_once() -> None:
    described = [name for name in NAMES if name.home and first_home()[name.home] == name]
    assert sorted(name.home for name in described) == sorted({name.home for name in NAMES if name.home})


def test_every_public_name_has_an_example_that_tests_run() -> None:
    described = [name for name in NAMES if name.home and first_home()[name.home] == name]
    assert [name.full for name in described if example(name) is None] == []


def test_an_example_uses_the_name() -> None:
    shown = example(Name("actor", "send"))
    assert shown is None or re.search(r"\bsend\(", shown.text)
    assert "run_on" in (shown.text if (shown := example(Name("actor", "run_on"))) else "run_on")


# -- versions ----------------------------------------------------------------------------------------------------------


def build(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).mkdir()
        (folder / name / "index.html").write_text(name)


def test_the_switch_offers_all_versions_that_are_built_the_newest_first(tmp_path: Path) -> None:
    build(tmp_path, "0.9", "0.10", "images")
    (tmp_path / "0.8").mkdir()  # not built
    versions.write(tmp_path)
    listed = json.loads((tmp_path / "versions.json").read_text())
    assert [entry["version"] for entry in listed] == ["0.10", "0.9"]
    assert listed[0] == {"version": "0.10", "title": "0.10", "aliases": ["latest"]}
    assert 'url=0.10/"' in (tmp_path / "index.html").read_text()
    assert versions.wrong(tmp_path) == []


def test_a_version_that_is_not_listed_or_not_there_is_found(tmp_path: Path) -> None:
    assert versions.wrong(tmp_path) == ["there is no versions.json"]
    build(tmp_path, "0.1")
    versions.write(tmp_path)
    build(tmp_path, "0.2")
    assert versions.wrong(tmp_path) == ["versions.json lists 0.1, and there are 0.2, 0.1", "index.html leads to 0.1"]


def test_the_version_of_this_tree_has_a_folder_of_its_own() -> None:
    assert monarch_nb.__version__.startswith(f"{versions.this()}.")


# -- what errors say ---------------------------------------------------------------------------------------------------


def addresses() -> Iterator[tuple[str, str]]:
    """The pages, and anchors, that the code leads to, with the file."""
    for path in (*(ROOT / "monarch_nb").rglob("*.py"), *(ROOT / "kernel_ext").rglob("*.py")):
        file = path.relative_to(ROOT).as_posix()
        for node in ast.walk(parsed(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Call(func=ast.Name(id="page" | "more"), args=args) if file != "monarch_nb/_package.py":
                    assert isinstance(args[0], ast.Constant), f"{file}:{node.lineno} does not name its page"
                    yield file, str(args[0].value)


@pytest.mark.slow
def test_pages_and_anchors_that_messages_lead_to_are_there() -> None:
    references = list(addresses())
    for file, address in references:
        page, _, anchor = address.partition("#")
        text = (ROOT / "docs" / page).read_text(encoding="utf-8")
        assert not anchor or anchor in anchors(text), f"{file} leads to {address}"
        assert page_at(f"docs/{page}") in order.pages(order.nav())
    assert len([address for _, address in references if "#" in address]) >= 15, "texts of errors lead to headings"


def test_an_error_that_a_page_explains_says_where() -> None:
    with pytest.raises(TrustError, match=r"needs a key.*\nMore: https://\S+/docs/manual/hosts\.md#who-is-trusted$"):
        require_keys("tcp://192.0.2.1:22222", None, insecure_loopback=False)
    assert str(owner_lost("buffer 1", "it died")).endswith("/docs/manual/data.md#how-long-a-buffer-lives")
