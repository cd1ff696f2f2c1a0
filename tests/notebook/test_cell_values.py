"""The value of a cell on ranks: it is transferred, or shown by its repr where it cannot or need not be."""

from pathlib import Path

import pytest

from tests.notebook.notebook import Cell, Notebook

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("mesh", ["w", "a"])
def test_unsendable_values_are_shown_as_a_local_cell_shows_them(nb: Notebook, mesh: str) -> None:
    shown = nb.run(f"%%on {mesh}\nimport threading\n(x for x in range(3))").ok()
    assert "all 4 ranks: <generator object <genexpr>>" in shown.text
    wrong = nb.run("_.get(0).gi_frame").traceback
    assert "stayed on its rank, since it cannot be sent (TypeError: cannot pickle 'generator' object)" in wrong
    sour = "class Sour:\n    __repr__ = lambda self: 'sour'\n    def __reduce__(self): raise ValueError('no')"
    assert "all 4 ranks: sour" in nb.run(f"%%on {mesh}\n{sour}\nSour()").ok().text


LARGE = """%%on w
class Net:
    def __init__(self, size): self.weights = bytes(size)
    def __repr__(self): return f"Net({len(self.weights)})"
"""


def test_large_objects_stay_and_data_comes(nb: Notebook) -> None:
    assert "all 4 ranks: Net(5000000)" in nb.run(f"{LARGE}net = Net(5_000_000)\nnet").ok().text
    assert nb.run("type(_.get(3)).__name__").ok().text == "'StayedOnRank'"
    assert "stayed on its rank, since it has 5.0 MB" in nb.run("__.get(0).weights").traceback
    assert nb.run("%%on w\nlen(net.weights)").ok().text.endswith("all 4 ranks: 5000000"), "it is there for other cells"
    nb.run("%%on w gpus=0\n{'weights': net.weights}").ok()
    assert nb.run("len(_.item()['weights'])").ok().text == "5000000", "data is brought, however large"
    nb.run("%%on w gpus=0\nsmall = Net(10)\nsmall").ok()
    assert nb.run("len(_.item().weights)").ok().text == "10"


LOGGING = """
from monarch.telemetry import log

class Loud(Actor):
    @endpoint
    def step(self, loss):
        log(loss=loss)

loud = w.spawn("loud", Loud)
"""


def test_metrics_right_after_a_call_have_what_was_logged_in_it(nb: Notebook) -> None:
    nb.run(LOGGING).ok()
    for number in range(1, 4):
        shown = nb.run(f"loud.step.call({number}.5).get()\nprint(repr(loud.metrics))").ok().stdout
        assert f"loss    4      {number}      {number}.5" in shown
    assert "loss    4      4      9" in nb.run("loud.step.call(9).get()\nprint(repr(w.metrics))").ok().stdout
    nb.run("%stop loud").ok()


RECORDED = """
from monarch_nb.telemetry import exports

class Recorded:
    made = []
    def __init__(self, name, **options):
        self.name, self.options, self.values = name, options, []
        self.made.append(self)
    def write(self, points): self.values += [(rank, point.name, point.value) for rank, point in points]
    def close(self): pass

exports.TARGETS["wandb"] = Recorded
"""


def test_a_line_has_metrics_written_elsewhere_once(nb: Notebook) -> None:
    nb.run(LOGGING + RECORDED).ok()
    line = "export = %metrics loud --to wandb trial group='of four'"
    nb.run(f"loud.step.call(1.5).get()\n{line}\nfirst = export").ok()
    assert "True" in nb.run(f"{line}\nexport is first").ok().text, "the cell was run again"
    nb.run("loud.step.call(2.5).get(); export.close()").ok()
    shown = nb.run("[[made.name, made.options, len(made.values)] for made in Recorded.made]").ok().text
    assert shown == "[['loud', {'project': 'trial', 'group': 'of four'}, 8]]"
    nb.run(f"{line}\nassert export is not first\nexport.close()").ok()
    nb.run("%stop loud").ok()


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("w --to tensorbord", "write %metrics w, or %metrics w --to tensorboard|wandb|mlflow [PLACE]"),
        ("w --from wandb", "write %metrics w, or"),
        ("w --to tensorboard a b", "'b' is one word too many"),
        ("w --to mlflow", "needs mlflow: pip install mlflow"),
        ("", "%metrics takes a name"),
    ],
)
def test_a_line_about_metrics_that_is_wrong_says_what_to_write(nb: Notebook, line: str, error: str) -> None:
    hidden = "import sys; sys.modules['mlflow'] = None\n"
    assert error in nb.run(f"{hidden}%metrics {line}").stderr
    nb.run("del sys.modules['mlflow']").ok()


def test_targets_of_metrics_are_completed(nb: Notebook) -> None:
    assert nb.complete("%metrics w ") == ["--to"]
    assert nb.complete("%metrics w --to ") == ["tensorboard", "wandb", "mlflow"]


SLOW = """
import os, pathlib, sys, time
folder = pathlib.Path({folder!r})
(folder / "slow_to_import.py").write_text('''
import os, time
class Grain:
    pass
if os.getpid() == {pid}:
    until = time.monotonic() + 20
    while not os.path.exists({gate!r}) and time.monotonic() < until:
        time.sleep(0.01)
''')
sys.path.insert(0, str(folder))
"""


def test_an_answer_whose_package_imports_slowly_says_so(nb: Notebook, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    nb.run(SLOW.format(folder=str(tmp_path), gate=str(gate), pid=nb.pid)).ok()
    nb.run(f"%%on w\nimport sys\nsys.path.insert(0, {str(tmp_path)!r})").ok()
    cell = Cell()
    request = nb.start("%%on w gpus=0\nimport slow_to_import\nslow_to_import.Grain()")
    nb.until(request, cell, "the answer is here; reading it imports slow_to_import into this kernel, once")
    gate.touch()
    assert "Grain" in nb.finish(request).ok().text
    nb.run("import slow_to_import, time; time.sleep(0.2)").ok()
