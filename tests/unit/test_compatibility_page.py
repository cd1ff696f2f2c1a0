"""The pages on compatibility and configuration are true."""

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from monarch_nb.settings import KEYS
from monarch_nb.settings.kinds import public_value
from tests.unit.upstream_names import ACTOR, CONFIG, HIDDEN, JOB, RDMA, SPMD, TOP

pytestmark = pytest.mark.timeout(60)
DOCS = Path(__file__).parents[2] / "docs"
VERDICTS = {"same", "better", "different", "not yet"}
ROW = re.compile(r"^\| `(monarch[\w.]*)` \| ([^|]*) \|([^|]*)\|$")


def rows() -> dict[str, tuple[str, str]]:
    table: dict[str, tuple[str, str]] = {}
    for line in (DOCS / "compatibility.md").read_text().splitlines():
        if line.startswith("| `monarch"):
            match = ROW.match(line)
            assert match, line
            name, verdict, remark = (part.strip() for part in match.groups())
            assert name not in table, f"{name} has two rows"
            table[name] = (verdict, remark)
    return table


def find(name: str) -> Any:
    """Imports a dotted name. Raises ImportError or AttributeError."""
    parts = name.split(".")
    if parts[1:2] and parts[1][0].islower() and parts[1] in ("actor", "config", "job", "rdma", "spmd"):
        value: Any = importlib.import_module(".".join(parts[:2]))
        names = parts[2:]
    else:
        value, names = importlib.import_module("monarch"), parts[1:]
    for part in names:
        if part[0].islower() and not hasattr(value, part):  # a module below, perhaps
            value = importlib.import_module(".".join(parts[: parts.index(part) + 1]))
        else:
            value = getattr(value, part)
    return value


ROWS = rows()


def test_every_public_name_of_torchmonarch_is_on_the_page() -> None:
    homes = {"actor": (*ACTOR, *HIDDEN), "config": CONFIG, "rdma": RDMA, "job": JOB, "spmd": SPMD}
    expected = {f"monarch.{module}.{name}" for module, names in homes.items() for name in names}
    expected |= {f"monarch.{name}" for name in TOP}
    assert expected - ROWS.keys() == set()


@pytest.mark.parametrize("name", sorted(ROWS))
def test_a_row_is_true(name: str) -> None:
    verdict, remark = ROWS[name]
    assert verdict in VERDICTS
    if verdict == "not yet" and "imports, and says when it is used" in remark:
        with pytest.raises(NotImplementedError, match="is not part of Monarch-NB yet: it belongs to"):
            find(name)()
    elif verdict == "not yet":
        with pytest.raises((ImportError, AttributeError)):
            find(name)
    else:
        assert find(name) is not None
    assert remark or verdict in ("same", "not yet"), "say how, or why"


def test_the_configuration_page_has_every_key_with_its_default() -> None:
    page = (DOCS / "configuration.md").read_text()
    for key in KEYS.values():
        if not key.meaning:
            assert f"`{key.name}`" in page
            continue
        default = public_value(key, key.default)
        text = f"{default:,}" if key.kind == "count" and default is not None else str(default)
        assert f"| `{key.name}` | {text} | {key.meaning} |" in page
    named = set(re.findall(r"^\| `(\w+)`", page, re.M))
    assert named == {key.name for key in KEYS.values() if key.meaning}
