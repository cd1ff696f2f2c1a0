"""examples/serve.ipynb, executed where nobody can type: a replica is killed, new weights come, and no request fails."""

import re

import pytest

from tests.notebook.examples import Example
from tests.notebook.notebook import Notebook

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(300)]


def test_no_request_fails_while_replicas_die_and_weights_change(fresh: Notebook) -> None:
    for package in ("fastapi", "uvicorn", "httpx"):
        pytest.importorskip(package, reason=f"NOT TESTED HERE: the example needs {package}")
    example = Example("serve.ipynb").run(fresh)
    assert "killed by signal 9 (SIGKILL)" in example.text("kill")
    result = example.text("result")
    requests = re.search(r"([\d,]+) requests, (\d+) failed", result)
    assert requests is not None, result
    assert (int(requests[1].replace(",", "")) > 100, int(requests[2])) == (True, 0), result
    correct = re.search(r"correct: (\d+)% before the rollout, (\d+)% after it", result)
    assert correct is not None, result
    assert int(correct[2]) > int(correct[1]) + 5
