"""Runs a program of `# %%` cells in a notebook of jupyter-distributed, by its kernel, with no page around it.

The first rank's report of a fact counts. Where a rank fails, what the notebook shows is a fact, and the next cell is
run.
"""

import json
import os
import re
import sys
import time
from typing import Any

from facts import ANSI, fact
from jupyter_client.manager import KernelManager

RICH = "application/vnd.jupyter-distributed.rank+json"
SECONDS = 60


class Group(KernelManager):  # type: ignore[misc]
    """The kernel that represents all processes."""

    def format_kernel_cmd(self, extra_arguments: "list[str] | None" = None) -> list[str]:
        return [sys.executable, "-m", "jupyter_distributed.kernel", "-f", self.connection_file]


def run(client: Any, code: str) -> dict[str, Any]:
    """Runs a cell; what it shows in the end, by kind."""
    shown: dict[str, Any] = {}
    request = client.execute(code)
    while True:
        message = client.get_iopub_msg(timeout=SECONDS)
        if message["parent_header"].get("msg_id") != request:
            continue
        kind, content = message["msg_type"], message["content"]
        if kind in ("display_data", "update_display_data", "execute_result"):
            shown = content["data"]
        elif kind == "status" and content["execution_state"] == "idle":
            return shown


def errors(shown: dict[str, Any]) -> list[str]:
    """The errors of ranks."""
    return [
        f"[Rank {rank['rank']} — {rank['status']}]\n"
        + ANSI.sub("", "\n".join(output["content"]["traceback"]))
        + f"\n{output['content']['ename']}: {output['content']['evalue']}"
        for rank in shown.get(RICH, {}).get("ranks", ())
        for output in rank["outputs"]
        if output["type"] == "error"
    ]


def main() -> None:
    program, ranks = sys.argv[1:]
    with open(program) as file:
        cells = re.split(r"^# %%\n", file.read(), flags=re.MULTILINE)[1:]
    began = time.perf_counter()
    manager = Group()
    manager.start_kernel(env={**os.environ, "JUPYTER_DISTRIBUTED_WORLD_SIZE": ranks})
    client = manager.client()
    client.start_channels()
    client.wait_for_ready(timeout=SECONDS)
    names: set[str] = set()
    try:
        for number, cell in enumerate(cells):
            shown = run(client, cell)
            for line in re.findall(r'\{"fact".*\}', shown.get("text/plain", "")):
                entry = json.loads(line)
                if entry["fact"] not in names:
                    names.add(entry["fact"])
                    fact(entry["fact"], entry["value"])
            if number == 0:
                fact("ready s", time.perf_counter() - began)
            if failed := errors(shown):
                fact("what is said", "\n".join(failed))
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


main()
