"""Which front end a kernel runs for, by the facts of its process, and the features reported for it. Pure."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from monarch_kernel import show
from monarch_kernel.doctor import (
    COLAB,
    HUB,
    KAGGLE,
    LAB,
    LIGHTNING,
    MARIMO,
    OTHER,
    RUN,
    TERMINAL,
    VSCODE,
    facts_of,
    levels,
    panel_installed,
    recognised,
)
from monarch_kernel.doctor import FrontEndFacts as Facts
from monarch_nb.lifecycle.unhandled import in_marimo
from monarch_nb.mesh import this_host
from monarch_nb.testing import cluster

pytestmark = pytest.mark.timeout(30)
SESSION = {"JPY_SESSION_NAME": "/home/me/a.ipynb"}
FRONT_ENDS = {
    LAB: Facts(SESSION, ipykernel="7.4.0", subshells=True, debugger=True, panel=True),
    VSCODE: Facts({}, variables=frozenset({"__vsc_ipynb_file__"}), ipykernel="7.3.0", subshells=True, debugger=True),
    # Colab's server is a Jupyter of its own: it sets that variable too.
    COLAB: Facts({**SESSION, "COLAB_RELEASE_TAG": "r2026"}, frozenset({"google.colab"}), ipykernel="6.17.1"),
    KAGGLE: Facts({"KAGGLE_KERNEL_RUN_TYPE": "Interactive"}, ipykernel="6.29"),
    LIGHTNING: Facts({**SESSION, "LIGHTNING_CLOUD_PROJECT_ID": "1"}, ipykernel="6.29", debugger=True),
    HUB: Facts({**SESSION, "JUPYTERHUB_API_URL": "http://hub"}, ipykernel="7.4.0", subshells=True, debugger=True),
    MARIMO: Facts({}, frozenset({"marimo"}), kernel=False),
    TERMINAL: Facts({"VSCODE_PID": "1"}, kernel=False),
    RUN: Facts(SESSION, stdin=False, ipykernel="7.4.0", subshells=True),
    OTHER: Facts({}, ipykernel="7.4.0"),
}


def features(facts: Facts) -> dict[str, str]:
    return {finding.about: finding.found for finding in levels(facts)}


@pytest.mark.parametrize("name", FRONT_ENDS)
def test_each_front_end_is_recognised_and_every_feature_has_a_level(name: str) -> None:
    facts = FRONT_ENDS[name]
    assert recognised(facts)[0] == name
    assert set(features(facts)) == {
        *("front end", "magics", "displays", "buttons", "debugger", "bug button", "side panel", "away")
    }
    assert features(facts)["front end"].startswith(name)


def test_a_jupyter_started_in_the_vs_code_terminal_is_jupyter() -> None:
    assert recognised(Facts({**SESSION, "VSCODE_PID": "1"}))[0] == LAB
    assert recognised(Facts({"VSCODE_PID": "1"}))[0] == VSCODE


def test_features_without_subshells_comms_prompt_or_debugger_are_named_missing() -> None:
    lab = FRONT_ENDS[LAB]
    assert features(lab)["buttons"] == "they work while a cell runs"
    assert features(lab)["bug button"] == "breakpoints in the margin of cells hold on the ranks"
    assert "ipykernel 6.17.1 has no subshells" in features(FRONT_ENDS[COLAB])["buttons"]
    assert features(FRONT_ENDS[COLAB])["side panel"] == "none: %panel shows it in a cell"
    assert "monarch_kernel.panel()" in features(FRONT_ENDS[MARIMO])["side panel"]
    assert "%meshes" in features(FRONT_ENDS[RUN])["side panel"]
    assert "no comms" in features(Facts(SESSION, comms=False))["displays"]
    assert "anywidget" in features(Facts(SESSION, widgets=False))["displays"]
    assert features(Facts(SESSION, widgets=False))["buttons"].startswith("none")
    assert "StoppedAtBreakpoint" in features(FRONT_ENDS[RUN])["debugger"]
    assert "this kernel has no debugger" in features(Facts(SESSION))["bug button"]
    assert "not installed" in features(Facts(SESSION))["side panel"]
    assert "box at the top" in features(FRONT_ENDS[VSCODE])["debugger"]
    assert features(FRONT_ENDS[MARIMO])["magics"].startswith("none")
    assert features(FRONT_ENDS[MARIMO])["displays"].startswith("live")
    assert "anywidget" in features(Facts({}, frozenset({"marimo"}), kernel=False, widgets=False))["displays"]


def test_the_panel_is_there_where_installed_and_not_switched_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "share"))
    monkeypatch.setenv("JUPYTER_CONFIG_DIR", str(tmp_path / "config"))
    (tmp_path / "share" / "labextensions" / "monarch-nb-lab").mkdir(parents=True)
    (tmp_path / "share" / "labextensions" / "monarch-nb-lab" / "package.json").write_text("{}")
    assert panel_installed()
    page_config = tmp_path / "config" / "labconfig" / "page_config.json"
    page_config.parent.mkdir(parents=True)
    for text, installed in (
        ('{"disabledExtensions": {"monarch-nb-lab": true}}', False),
        ('{"disabledExtensions": {"monarch-nb-lab": false}}', True),
        ('{"disabledExtensions": ["monarch-nb-lab"]}', False),
        ("{}", True),
        ("not JSON", True),
    ):
        page_config.write_text(text)
        assert panel_installed() is installed, text


def kernel(**attributes: Any) -> Any:
    return SimpleNamespace(get_parent=lambda channel: {"content": {"allow_stdin": True}}, **attributes)


def test_the_shape_of_the_kernel_is_read_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    new = kernel(
        kernel_info={"supported_features": ["debugger", "kernel subshells"]}, comm_manager=object(), debugger=object()
    )
    facts = facts_of(SimpleNamespace(kernel=new, user_ns={"__vsc_ipynb_file__": "a.ipynb", "x": 1}))
    assert (facts.kernel, facts.subshells, facts.comms, facts.debugger, facts.stdin) == (True,) * 5
    assert facts.variables == {"__vsc_ipynb_file__"}
    old = facts_of(SimpleNamespace(kernel=kernel(kernel_info={}, comm_manager=None), user_ns={}))
    assert (old.subshells, old.comms, old.debugger) == (False, False, False)
    none = facts_of(None)
    assert (none.kernel, recognised(none)[0]) == (False, TERMINAL)


@pytest.mark.parametrize(("mode", "page"), [("edit", True), ("run", True), ("script", False)])
def test_a_marimo_page_is_a_notebook_and_its_program_a_script(
    monkeypatch: pytest.MonkeyPatch, mode: str, page: bool
) -> None:
    marimo = SimpleNamespace(running_in_notebook=lambda: page, app_meta=lambda: SimpleNamespace(mode=mode))
    assert not in_marimo()
    monkeypatch.setitem(sys.modules, "marimo", marimo)
    assert in_marimo() is page


def test_a_value_is_shown_without_ipython_as_in_marimo() -> None:
    with cluster():
        procs = this_host().spawn_procs(per_host={"gpus": 2}, name="seen")
        procs.initialized.get(10)
        kind, html = show(procs)._mime_()
        assert kind == "text/html"
        assert "seen" in html
        assert "<table" in html
        assert show(procs)._repr_html_().startswith('<div class="mnb"')
    assert show("<b>")._mime_() == ("text/html", "<pre>&#x27;&lt;b&gt;&#x27;</pre>")
