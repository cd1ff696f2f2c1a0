"""JupyterLab's debugger, switched on before the extension is loaded: processes start as usual, and breakpoints work."""

from pathlib import Path

import pytest

from tests.browser.lab import Desk, Lab, panel_built, write_notebook
from tests.browser.test_lab_debugger import TRAINER, bug, click_gutter, command

pytestmark = [
    pytest.mark.slow,  # tests/notebook/test_dap.py has the same without a browser
    pytest.mark.timeout(240),
]


def test_a_bug_button_on_before_the_extension_loads_disturbs_nothing(desk: Desk, tmp_path: Path) -> None:
    panel_built()
    path = write_notebook(tmp_path / "bug_first.ipynb", ["# the button first"])
    with desk.open(path) as shown:
        first = Lab(shown)
        bug(first)
        shown.locator(".cm-breakpoint-gutter").first.wait_for(timeout=20_000)  # it is on
        first.run("import os\nos.environ['MONARCH_NB_PRELOAD'] = ''\n%load_ext monarch")
        first.run(TRAINER)
        assert "2 idle" in first.read(first.run("%mesh workers gpus=2"), "workers")
        first.run("trainers = workers.spawn('trainers', Trainer)\ntrainers.initialized.get()")
        click_gutter(first, "loss = x + rank / 2")
        shown.locator(".jp-DebuggerBreakpoint").wait_for(timeout=20_000)
        output = first.start("print(list(trainers.step.call(10).get().values()))")
        shown.locator(".jp-DebuggerCallstackFrame", has_text="Trainer.step").wait_for(timeout=20_000)
        command(first, "continue")
        first.idle()
        assert first.read(output, "21").strip() == "[20.0, 21.0]"
        bug(first)
        assert first.errors == []
