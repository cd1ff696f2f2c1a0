"""%pip in a real kernel: IPython's own without a mesh, and on the hosts of one with it."""

from pathlib import Path

import pytest

from tests.cluster.test_pip import wheel
from tests.notebook.notebook import Notebook

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]


def test_pip_is_ipythons_or_runs_on_the_hosts_of_a_mesh(nb: Notebook, tmp_path: Path) -> None:
    assert "you may need to restart the kernel" in nb.run("%pip --version").ok().stdout
    done = nb.run(f"%pip install --no-index --target {tmp_path} {wheel(tmp_path, '1.0')} --mesh w").ok()
    assert "Successfully installed toy-of-test-1.0" in done.stdout
    assert "w gpus=0-3 (" in done.stdout
    assert "restart the kernel" not in done.stdout
    failed = nb.run("%pip install --no-index no-such-package-of-ours --mesh w")
    assert "No matching distribution found" in failed.stdout
    assert "pip has failed, with status 1" in failed.stderr
    assert "%pip: a is no mesh of processes" in nb.run("%pip list --mesh a").stderr
    assert "--mesh trainers" in nb.inspect("%pip")
