"""English of counts and kinds."""

import re
from pathlib import Path

import monarch_nb
from monarch_nb.wire import counted, kind_of, with_article

SOURCES = [*Path(monarch_nb.__file__).parent.rglob("*.py")]
SOURCES += [*(Path(monarch_nb.__file__).parents[1] / "kernel_ext").rglob("*.py")]
WORDS = Path(monarch_nb.__file__).parent / "wire" / "texts.py"
BY_HAND = re.compile(r"\ba \{type\(|else 's'\}|else \"s\"\}|\{'s' \* ")


def test_only_one_is_in_the_singular() -> None:
    assert [counted(n, "rank") for n in (0, 1, 2, 1200)] == ["0 ranks", "1 rank", "2 ranks", "1,200 ranks"]
    assert [counted(2, noun) for noun in ("mesh", "process", "entry", "way")] == [
        "2 meshes",
        "2 processes",
        "2 entries",
        "2 ways",
    ]


def test_articles_go_by_the_first_letter() -> None:
    assert [kind_of(value) for value in (1, [], None, {}.items())] == ["an int", "a list", "None", "a dict_items"]
    assert with_article("_io.TextIOWrapper") == "an _io.TextIOWrapper"


def test_no_other_module_makes_articles_and_plurals_by_hand() -> None:
    matches = [
        f"{path.name}:{number}: {line.strip()}"
        for path in SOURCES
        if path != WORDS and BY_HAND.search(path.read_text(encoding="utf-8"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if BY_HAND.search(line)
    ]
    assert matches == []
