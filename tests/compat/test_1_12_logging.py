"""Section 1.12: logging. Lines, windows, levels: tests/cluster/test_logging_option.py, test_api_output.py."""

import asyncio
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from monarch.actor import ProcMesh
from monarch_nb.logs import MeshLogs
from monarch_nb.logs.options import LogOption
from monarch_nb.mesh.handle import state_of
from monarch_nb.runtime import current_runtime

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("faults")]

PROGRAM = """
import asyncio, logging
from monarch.actor import Actor, current_rank, endpoint, this_host
from monarch.config import configure

class Printer(Actor):
    @endpoint
    async def print_it(self, text: str) -> None:
        print(text, flush=True)

    @endpoint
    async def log_it(self, text: str) -> None:
        self.logger.warning(text)

async def main() -> None:
    configure(enable_log_forwarding=True)
    procs = this_host().spawn_procs(per_host={"gpus": 2})
    await procs.logging_option(stream_to_client=True, aggregate_window_sec=None, level=logging.INFO)
    printers = procs.spawn("printers", Printer)
    await printers.print_it.call("from a print")
    await printers.log_it.call("from a logger")
    await procs.stop()

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.slow
def test_the_program_of_the_documentation_shows_what_its_processes_write(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(PROGRAM)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    shown = done.stdout + done.stderr
    assert shown.count("from a print") == 2
    assert shown.count("from a logger") == 2
    assert "[actor=<root>." in shown


def test_levels_are_0_to_255_and_windows_need_streaming(quad: ProcMesh) -> None:
    for level in (-1, 256):
        with pytest.raises(ValueError, match="level"):
            asyncio.run(quad.logging_option(level=level))
    with pytest.raises(RuntimeError):
        asyncio.run(quad.logging_option(stream_to_client=False, aggregate_window_sec=1))
    asyncio.run(quad.logging_option(stream_to_client=True, aggregate_window_sec=1, level=logging.WARNING))
    asyncio.run(quad.logging_option(stream_to_client=True))


def test_a_window_of_no_seconds_gathers_nothing(quad: ProcMesh) -> None:
    asyncio.run(quad.logging_option(stream_to_client=True, aggregate_window_sec=0))
    assert current_runtime().part(MeshLogs).options.of(state_of(quad).address(0)) == LogOption(True, None, logging.INFO)
    asyncio.run(quad.logging_option())
