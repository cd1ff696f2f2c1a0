"""`%%watch` shows where the first NaN comes from, beneath the value of its cell."""

import importlib.util

import pytest

from tests.notebook.notebook import Notebook

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="torch is not installed"),
]

ACTORS = """
%mesh workers gpus=2
from monarch.actor import Actor, current_rank, endpoint
class Divider(Actor):
    @endpoint
    def divide(self, x):
        import torch
        return float(torch.tensor(0.0) / (x if current_rank().rank else 1.0))
dividers = workers.spawn("dividers", Divider)
"""
FINDING = "gpus=1: in call 1 of divide() aten.div.Tensor gave 1 NaN in float32[] ("


def test_a_watched_cell_shows_its_value_and_the_finding(loaded: Notebook) -> None:
    loaded.run(ACTORS).ok()
    cell = loaded.run("%%watch dividers\ndividers.divide.call(0.0).get()").ok()
    assert FINDING in cell.text
    assert any("nan" in display["text/plain"] for display in cell.displays)
    assert "nonfinite (1,)" in loaded.run("print(_.findings[0].kind, _.findings[0].ranks)").ok().stdout
    assert "no NaN was found" in loaded.run("%%watch dividers gpus=0\ndividers.divide.call(0.0).get()").ok().text
    failed = loaded.run("%%watch dividers\ndividers.divide.call(0.0).get()\nraise ValueError('stop')")
    assert any(FINDING in display["text/plain"] for display in failed.displays)
    assert f"Before that, {FINDING}" in failed.traceback
    assert "with monarch.watch(NAME)" in loaded.run("%%watch dividers\nawait dividers.divide.call(1.0)").stderr
    assert "%%watch" in loaded.run("%%watch dividers --halt\n1").stderr
    loaded.run("%stop workers").ok()


def test_the_debugger_stops_a_rank_at_its_first_nan(loaded: Notebook) -> None:
    loaded.run(ACTORS).ok()
    loaded.run("from monarch_nb import debug, watch; found = watch(dividers, stop=True).__enter__()").ok()
    loaded.run("call = dividers.divide.call(0.0)").ok()
    loaded.run("_ = debug.wait(timeout=30)").ok()
    assert "NaN in the result of aten.div.Tensor" in loaded.run("%mdb").ok().text
    loaded.run("%%mdb dividers\nc all").ok()
    loaded.run("call.get(10)").ok()
    loaded.run("found.__exit__(None, None, None)").ok()
    loaded.run("%stop workers").ok()
