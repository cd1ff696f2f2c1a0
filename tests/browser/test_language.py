"""JupyterLab in another language: the texts of the panel go through its translator."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.browser.lab import Desk, panel_built

pytestmark = pytest.mark.timeout(120)
PACK = {
    "": {"domain": "monarch_nb_lab", "language": "de-DE", "plural_forms": "nplurals=2; plural=(n != 1);"},
    "Notebook with a Mesh": ["Notebook mit einem Mesh"],
    "No notebook is open": ["Es ist kein Notebook offen"],
    "Show the Cluster of This Notebook": ["Den Cluster dieses Notebooks zeigen"],
    "%1: What Is Selected": ["%1: was gewählt ist"],
    "Heal": ["Heilen"],
    "Spawn…": ["Starten…"],
}


@pytest.fixture
def german(desk: Desk) -> Iterator[Any]:
    """A page of a JupyterLab that has a small language pack."""
    panel_built()
    pack = json.dumps({"data": {"monarch_nb_lab": PACK}, "message": ""})
    translations = "**/lab/api/translations/**"
    desk.by.route(translations, lambda route: route.fulfill(body=pack, content_type="application/json"))
    try:
        with desk.empty("german") as shown:
            yield shown
    finally:
        desk.by.unroute(translations)


def test_panel_launcher_and_commands_are_in_the_language_of_the_page(german: Any) -> None:
    german.locator(".jp-LauncherCard", has_text="Notebook mit einem Mesh").wait_for(timeout=20_000)
    german.evaluate("() => void window.jupyterapp.commands.execute('monarch-nb:open')")
    panel = german.locator(".mnb-panel")
    panel.get_by_text("Es ist kein Notebook offen").wait_for(timeout=20_000)
    assert panel.get_by_role("button", name="Starten…", include_hidden=True).count() == 1
    labels = "id => window.jupyterapp.commands.label(id, {palette: true})"
    assert german.evaluate(labels, "monarch-nb:heal") == "Heilen: was gewählt ist"
    assert german.evaluate(labels, "monarch-nb:open") == "Den Cluster dieses Notebooks zeigen"
    assert german.evaluate(labels, "monarch-nb:stop") == "Stop: was gewählt ist"  # the pack has no word for it
