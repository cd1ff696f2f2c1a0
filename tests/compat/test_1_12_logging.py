"""Section 1.12: logging. Lines, windows, levels: tests/cluster/test_logging_option.py, test_api_output.py."""

import asyncio
import logging

import pytest

from monarch.actor import ProcMesh
from monarch_nb.logs import MeshLogs
from monarch_nb.logs.mesh_logs import LogOption
from monarch_nb.mesh.handle import state_of
from monarch_nb.runtime import current_runtime

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("faults")]


def test_a_window_of_no_seconds_gathers_nothing(quad: ProcMesh) -> None:
    asyncio.run(quad.logging_option(stream_to_client=True, aggregate_window_sec=0))
    assert current_runtime().part(MeshLogs).options.of(state_of(quad).address(0)) == LogOption(True, None, logging.INFO)
    asyncio.run(quad.logging_option())
