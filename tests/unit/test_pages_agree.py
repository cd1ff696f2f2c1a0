"""No page contradicts another, or the code: figures, magics, commands and their options, extras, settings, defaults."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from monarch_kernel.views import VIEWS
from monarch_nb._parsing import parsed
from monarch_nb.cli import main
from monarch_nb.job import kinds
from monarch_nb.job.adapter import adapter_of
from monarch_nb.settings import KEYS, parse_duration

pytestmark = pytest.mark.timeout(60)
ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
}
MAGICS = ("line_magic", "cell_magic", "line_cell_magic")
EXTENDED = ("history",)  # IPython's own, which do more if their line is the name of a mesh


def matches(pattern: str) -> Iterator[tuple[str, str]]:
    """Matches of a pattern on all pages, each with its page."""
    for page, text in PAGES.items():
        yield from ((match, page) for match in re.findall(pattern, text))


def measured(page: str) -> dict[str, str]:
    """The rows of a table of figures, by what was measured."""
    rows = [line for line in PAGES[page].splitlines() if line.startswith("| ") and line.count("|") >= 8]
    return {row.split("|")[1].strip(): row for row in rows}


def test_figures_and_date_of_the_readme_are_those_of_performance_md() -> None:
    shown, all_of_them = measured("README.md"), measured("docs/performance.md")
    assert len(shown) > 4
    assert {name: row for name, row in shown.items() if all_of_them.get(name) != row} == {}
    dated = r"Python 3\.11,\s(\d+ \w+ \d{4})"
    assert re.findall(dated, PAGES["README.md"]) == re.findall(dated, PAGES["docs/performance.md"])[:1]


def magics() -> dict[str, str]:
    """All magics that the extension adds, each with its help."""
    help_texts = {view.name: view.magic.__doc__ or "" for view in VIEWS if view.magic is not None}
    for path in (ROOT / "kernel_ext" / "monarch_kernel").rglob("*.py"):
        for node in ast.walk(parsed(path.read_text(encoding="utf-8"))):
            for mark in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
                match mark:
                    case ast.Name(id=kind) if kind in MAGICS:
                        help_texts[node.name] = ast.get_docstring(node) or ""
                    case ast.Call(func=ast.Name(id=kind), args=[ast.Constant(value=str(name))]) if kind in MAGICS:
                        help_texts[name] = ast.get_docstring(node) or ""
    return help_texts | dict.fromkeys(EXTENDED, "")


@pytest.mark.sources
def test_the_table_of_magics_has_all_magics_and_known_options() -> None:
    table = PAGES["docs/manual/notebook.md"].partition("## All magics")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| `%")]
    named = {name: row for row in rows for name in re.findall(r"%%?(\w+)", row.split(" | ")[0])}
    helped = magics()
    assert sorted(named) == sorted(helped)
    for name, row in named.items():
        for option in re.findall(r"--\w+(?:-\w+)*", row.split(" | ")[0]):
            assert option in helped[name], f"%{name} {option}"


@pytest.mark.sources
def test_magics_that_pages_name_are_there() -> None:
    names = {*magics(), "load_ext", "pip", "debug", "tb", "px", "autopx", "name"}  # of others, and any name
    assert {(name, page) for name, page in matches(r"`%%?([a-z_]+)\b[^`]*`") if name not in names} == set()


def test_targets_of_make_and_extras_that_pages_name_are_there() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert {(name, page) for name, page in matches(r"(?:`|^)make ([a-z-]+)") if name not in targets} == set()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    named = {(extra, page) for group, page in matches(r"monarch-nb\[([a-z,]+)\]") for extra in group.split(",")}
    assert {pair for pair in named if pair[0] not in extras} == set()


def test_every_extra_has_a_row_in_the_readme() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert set(re.findall(r"^\| `(\w+)` \|", PAGES["README.md"], re.MULTILINE)) == set(extras) - {"dev"}


@pytest.mark.sources
def test_variables_that_pages_set_are_read_somewhere() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    names = {(name, page) for words, page in matches(r"make [a-z-]+((?: [A-Z]+=)+)") for name in words.split()}
    assert {pair for pair in names if f"$({pair[0].rstrip('=')})" not in re.sub(r"\$\(\w+ ", "$(", makefile)} == set()
    settings = {f"MONARCH_NB_{name.upper()}" for name in KEYS}
    sources = [*(ROOT / "monarch_nb").rglob("*.py"), *(ROOT / "kernel_ext" / "monarch_kernel").rglob("*.py")]
    read = settings.union(*(re.findall(r"MONARCH_NB_[A-Z_]+", path.read_text(encoding="utf-8")) for path in sources))
    assert {(name, page) for name, page in matches(r"`(MONARCH_NB_[A-Z_]+[A-Z])") if name not in read} == set()


def test_shell_commands_on_pages_exist_with_their_options(capsys: pytest.CaptureFixture[str]) -> None:
    def helped(*words: str) -> str:
        with pytest.raises(SystemExit):
            main([*words, "--help"])
        return capsys.readouterr().out

    commands = {name: helped(name) for name in ("agent", "doctor", "job", "mesh", "top", "torchrun", "why")}
    verbs = {name: helped(*name.split()) for name in ("job start", "job logs", "job kill", "mesh ls", "mesh stop")}
    typed = [(line, page) for line, page in matches(r"(?:`|^)monarch-nb ([a-z][^`\n#]*)") if line.strip()]
    assert len(typed) > 20
    for line, page in typed:
        name, *words = line.split()
        assert name in commands, f"{page}: monarch-nb {line}"
        help_text = commands[name] + "".join(text for verb, text in verbs.items() if verb.startswith(f"{name} "))
        for option in (word.partition("=")[0] for word in words if word.startswith("--")):
            assert option in help_text, f"{page}: monarch-nb {line}"
        if name in ("job", "mesh") and words:
            for verb in words[0].split("|"):
                assert re.search(rf"\b{verb}\b", commands[name]), f"{page}: monarch-nb {line}"


def test_guides_install_from_git_and_howto_links_every_chapter() -> None:
    """It is on no package index, and a guide may be the first page that a user reads."""
    for page, text in PAGES.items():
        install = re.search(r"^## Install\n(.*?)^## ", text, re.MULTILINE | re.DOTALL)
        if page.startswith("docs/guides/") and install:
            assert re.findall(r"pip install (?:-q )?'(?!monarch-nb\[[\w,]+\] @ git\+https)[^']*'", install[1]) == [], (
                page
            )
    chapters = set(re.findall(r"\d+\. \[[^\]]+\]\(([\w-]+)\.md\)", PAGES["docs/manual/README.md"]))
    led = set(re.findall(r"\(manual/(\w+)\.md", PAGES["docs/howto.md"] + PAGES["docs/concepts.md"]))
    assert {name for name in chapters if not name.startswith("examples")} - led == set()


def test_defaults_that_stand_beside_settings_are_those_that_count() -> None:
    """As in "`cleanup_timeout` (3 s)"."""
    sizes = {"MB": 2**20, "GB": 2**30, "MiB": 2**20, "GiB": 2**30}
    checked = 0
    for page, text in PAGES.items():
        for name, number, unit in re.findall(r"`([a-z_]+)` \((\d[\d,]*) ?(s|m|h|MB|GB|MiB|GiB|)\)", text):
            if name not in KEYS:
                continue
            default = KEYS[name].default
            value = int(number.replace(",", ""))
            figure = parse_duration(f"{value}{unit}") if unit in ("s", "m", "h") else value * sizes.get(unit, 1)
            assert default == figure, f"{page}: `{name}` ({number} {unit}) is {default}"
            checked += 1
    assert checked >= 4


def test_the_jobs_guide_names_the_hosts_that_idle_an_hour() -> None:
    text = re.sub(r"\s+", " ", PAGES["docs/guides/jobs.md"])
    sentence = re.search(r"after a minute, or on (.{,60}), where one may have waited", text)
    names = {word.lower() for word in re.split(r", | and ", sentence[1])} if sentence else set()
    assert names == {kind for kind in kinds() if adapter_of(kind).keep_s == 3600}


GUIDES = [path for path in sorted((ROOT / "docs" / "guides").glob("*.md")) if path.stem != "jobs"]


@pytest.mark.parametrize("path", GUIDES, ids=[path.stem for path in GUIDES])
def test_each_guide_has_all_sections_and_says_what_was_tried_when(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert [heading for heading in ("Install", "First mesh", "Debugging", "Logs") if heading not in headings] == []
    assert any(heading.startswith("Through ") for heading in headings)
    assert re.search(r"^\*\*Tried, \w+ \d{4}:\*\* .*?\*\*Not tried:\*\* ", text, re.MULTILINE | re.DOTALL)
    assert "## " not in text.partition("**Not tried:**")[0], "it stands at the top"
