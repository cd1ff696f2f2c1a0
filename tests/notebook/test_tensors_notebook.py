"""examples/tensors.ipynb, executed where nobody can type: a tensor over eight processes, in view, through a death."""

from pathlib import Path

import pytest

from tests.effort import AS_LATER

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "tensors.ipynb"
pytestmark = [pytest.mark.long, pytest.mark.timeout(180)]


def test_a_tensor_is_seen_where_it_lies_and_the_mesh_survives_a_death() -> None:
    from scripts.demo import execute  # here: Jupyter's libraries take seconds, and collecting tests must not

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MONARCH_NB_PRELOAD", AS_LATER)  # as a user's kernel would be
        executed = execute(NOTEBOOK)
    assert executed.error is None, executed.error
    assert executed.left_behind == []
    outputs = {cell.id: cell.outputs for cell in executed.notebook.cells if cell.cell_type == "code"}
    text = {
        name: "".join(out.get("text") or out.get("data", {}).get("text/plain", "") for out in shown)
        for name, shown in outputs.items()
    }
    html = {name: "".join(out.get("data", {}).get("text/html", "") for out in shown) for name, shown in outputs.items()}
    assert "data_parallel=4   Shard(0)     cuts dimension 0: 1024 → 4 × 256" in text["mesh"]
    for picture in ("mesh", "matmul", "both", "parts", "uneven", "lost"):  # saved, for who looks without a kernel
        assert html[picture].count("<svg") == 2, picture
    assert text["equal"] == "'as local PyTorch has it: True'"
    assert text["reduced"] == "True"
    assert "hatch" in html["parts"]
    assert "w        1024×4096 float32" in text["tensors"]
    assert "the last cell moved" in text["tensors"]
    assert "largest = scaled.abs().max().item()" in text["sync"]
    assert "Send it there first: monarch.distribute" in text["shape"]
    assert "SupervisionError" in text["kill"]
    assert html["lost"].count('class="lost"') == 1
    assert "healed, and equal: True" in text["heal"]
    written = [out for shown in outputs.values() for out in shown if out.get("name") == "stderr"]
    assert written == []
