"""Code on the pages on frameworks runs as it stands, each page in a fresh notebook."""

from pathlib import Path

import pytest

from tests.frameworks.needs import need
from tests.notebook.notebook import Notebook
from tests.notebook.pages import FRAMEWORKS, run_page

pytestmark = [pytest.mark.timeout(400), pytest.mark.frameworks, pytest.mark.slow]
NEEDS = {
    "accelerate": ("accelerate",),
    "lightning": ("lightning",),
    "pytorch": ("torch",),
    "torchtitan": ("torchtitan", "datasets", "tokenizers"),
    "transformers": ("transformers", "accelerate", "peft"),
    "trl": ("trl", "datasets", "tokenizers"),
}
TITAN_ON_CPU = Path(__file__).with_name("titan_cpu.py")


@pytest.mark.parametrize("page", FRAMEWORKS)
def test_a_page_runs_from_top_to_bottom_with_the_stated_results(page: str, fresh: Notebook) -> None:
    name = Path(page).stem
    need(*NEEDS[name])
    if name == "torchtitan":
        fresh.aside("%load_ext monarch")
        fresh.aside("%mesh spmd gpus=2")
        fresh.aside(f"%%on spmd\n{TITAN_ON_CPU.read_text()}")
    run_page(page, fresh, timeout=200, warns=name != "pytorch")
