"""The documentation site: all pages are in it, links and anchors lead somewhere, every public name has its place.

`make docs` builds it; what can be known without that is here.
"""

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.site import order, reference, stories
from scripts.site.links import adapted, anchors, file_of, links, page_at
from scripts.site.names import Name, example, first_home, modules, names

pytestmark = pytest.mark.timeout(60)
ROOT = Path(__file__).resolve().parents[2]
NAMES = [name for module in modules() for name in names(module)]

# Public names that no cell of the documentation uses, by module. A name leaves this table with its first example.
WITHOUT_EXAMPLE: dict[str, set[str]] = {
    "actor": {
        "AttachError",
        "BootstrapCommand",
        "ChannelTransport",
        "Context",
        "DeadlockError",
        "PortReceiver",
        "ProcId",
        "RankedPortReceiver",
        "Shape",
        "Uid",
        "UndeliverableMessageEnvelope",
        "WouldBlockRuntime",
        "accept_hosts",
        "attach_hosts",
        "breakpoint_if",
        "default_bootstrap_cmd",
        "enable_transport",
        "get_or_spawn_controller",
        "local_hosts",
        "returns_future",
        "run_worker_loop_forever",
        "run_worker_loop_until_shutdown",
        "this_proc",
    },
    "config": {
        "Encoding",
        "parametrize_config",
        "parametrize_config_pointwise",
    },
    "data": {
        "ArrowError",
    },
    "exceptions": {
        "AddressError",
        "AgentStartError",
        "DescriptorLimitError",
        "HealError",
        "MessageTooLargeError",
        "RequestError",
        "TransportError",
    },
    "rdma": {
        "BufferDroppedError",
        "OwnerLostError",
        "ParameterSource",
        "Put",
        "RDMAError",
        "RDMAReadTransferWarning",
        "RDMATcpFallbackWarning",
        "RDMAWriteTransferWarning",
        "is_rdma_available",
        "put",
    },
    "spmd": {
        "AddrType",
        "SPMDActor",
        "setup_torch_elastic_env",
        "setup_torch_elastic_env_async",
    },
    "telemetry": {
        "Meter",
    },
    "testing": {
        "Cluster",
        "MemoryNetwork",
        "MemoryNode",
        "NetworkFaults",
        "VirtualClock",
    },
}
UNDER_WAY = frozenset({"", "debug", "distributed", "job"})  # modules whose chapters are being written


def test_every_page_of_docs_is_in_the_order_and_nothing_else_is() -> None:
    written = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    made = {"index.md", "changelog.md", *reference.pages(), *(stories.page_of(story) for story in stories.stories())}
    listed = order.pages(order.nav())
    assert sorted(listed) == sorted(written | made)
    assert len(set(listed)) == len(listed)


def markdown(page: str) -> str:
    """A page as the site has it."""
    if page.startswith("reference/"):
        return reference.text(page.removeprefix("reference/").removesuffix(".md").replace("monarch", ""))
    if page.startswith("stories/"):
        return adapted(page, stories.text(page.removeprefix("stories/").removesuffix(".md")))
    return adapted(page, (ROOT / file_of(page)).read_text(encoding="utf-8"))


def dead(page: str, texts: dict[str, str]) -> Iterator[str]:
    for target, anchor in links(texts[page]):
        there = Path("/", page).parent.joinpath(target).resolve().relative_to("/").as_posix() if target else page
        if there in texts:
            if anchor and anchor not in anchors(texts[there]):
                yield f"{page}: {target}#{anchor}"
        elif not (ROOT / "docs" / there).exists():
            yield f"{page}: {target}"


def test_links_between_pages_and_their_anchors_lead_somewhere() -> None:
    texts = {page: markdown(page) for page in order.pages(order.nav())}
    assert [found for page in texts for found in dead(page, texts)] == []


def test_a_dead_link_is_found() -> None:
    texts = {"a/one.md": "[x](two.md#there) [y](two.md#not-there) [z](three.md)", "a/two.md": "# There\n"}
    assert list(dead("a/one.md", texts)) == ["a/one.md: two.md#not-there", "a/one.md: three.md"]


def test_links_of_files_are_links_of_pages_on_the_site() -> None:
    text = (
        "[a](../../examples/debugging.ipynb) [b](../quickstart.md#actors) [c](../../LICENSE) "
        "`[d](e)`\n```output\n[f](g)\n```"
    )
    assert adapted("manual/debugging.md", text) == (
        "[a](../stories/debugging.md) [b](../quickstart.md#actors) "
        "[c](https://github.com/monarch-nb/monarch-nb/blob/main/LICENSE) `[d](e)`\n```text\n[f](g)\n```"
    )
    assert adapted("index.md", "[a](docs/manual/README.md)") == "[a](manual/README.md)"
    picture = (
        '<picture><source media="(prefers-color-scheme: dark)" srcset="docs/images/d.png">'
        '<img alt="A" src="docs/images/l.png"></picture>'
    )
    assert adapted("index.md", picture) == "![A](images/l.png#only-light)![A](images/d.png#only-dark)"


# -- names -------------------------------------------------------------------------------------------------------------


def test_every_public_name_has_a_heading_on_the_page_of_its_module() -> None:
    for module in modules():
        found = anchors(reference.text(module))
        assert [name.full for name in names(module) if name.anchor not in found] == []


def test_what_a_public_name_means_is_found_where_the_site_looks_for_it_and_is_described() -> None:
    for name in NAMES:
        if not name.home:
            continue
        module, _, path = name.home.rpartition(".")
        assert getattr(importlib.import_module(module), path) is name.value, name.full
        assert inspect.getdoc(name.value), name.full


def test_every_public_name_is_described_once() -> None:
    described = [name for name in NAMES if name.home and first_home()[name.home] == name]
    assert sorted(name.home for name in described) == sorted({name.home for name in NAMES if name.home})


def test_public_names_have_an_example_that_tests_run() -> None:
    without: dict[str, set[str]] = {}
    for name in NAMES:
        if name.module not in UNDER_WAY and name.home and first_home()[name.home] == name and example(name) is None:
            without.setdefault(name.module, set()).add(name.name)
    assert without == WITHOUT_EXAMPLE, "give new names an example in the manual; names that have one leave the table"


def test_an_example_uses_the_name() -> None:
    shown = example(Name("actor", "send"))
    assert shown is None or re.search(r"\bsend\(", shown.text)
    assert "run_on" in (shown.text if (shown := example(Name("actor", "run_on"))) else "run_on")


# -- what errors say ---------------------------------------------------------------------------------------------------


def addresses() -> Iterator[tuple[str, str]]:
    """The pages, and anchors, that the code leads to, with the file."""
    for path in (*(ROOT / "monarch_nb").rglob("*.py"), *(ROOT / "kernel_ext").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Call(func=ast.Name(id="page"), args=[ast.Constant(value=str(address))]):
                    yield path.relative_to(ROOT).as_posix(), address


def test_pages_and_anchors_that_messages_lead_to_are_there() -> None:
    found = list(addresses())
    assert len(found) >= 3
    for file, address in found:
        page, _, anchor = address.partition("#")
        text = (ROOT / "docs" / page).read_text(encoding="utf-8")
        assert not anchor or anchor in anchors(text), f"{file} leads to {address}"
        assert page_at(f"docs/{page}") in order.pages(order.nav())
