"""Section 1.10: accumulator, telemetry, configuration.

Elsewhere: tests/unit/test_config*.py, test_telemetry.py, tests/cluster/test_api_config.py, test_api_transport.py.
"""

import asyncio
import operator
from typing import Any

import pytest

import monarch
from monarch.actor import Accumulator, Actor, ProcMesh, current_rank, endpoint, get_meter, span, traced
from monarch.config import clear_runtime_config, configure, configured, get_global_config, get_runtime_config

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("faults")]

DEFAULTS: dict[str, Any] = {
    "message_delivery_timeout": "30s",
    "host_spawn_ready_timeout": "30s",
    "mesh_proc_spawn_max_idle": "30s",
    "stop_actor_timeout": "10s",
    "cleanup_timeout": "3s",
    "process_exit_timeout": "10s",
    "mesh_terminate_timeout": "10s",
    "supervision_watchdog_timeout": "2m",
    "mesh_orphan_timeout": "1m",
    "get_proc_state_max_idle": "1m",
    "codec_max_frame_length": 10 * 1024**3,
    "enable_log_forwarding": False,
    "enable_file_capture": False,
    "prefix_with_rank": True,
    "mesh_admin_addr": "[::]:1729",
}


class Ranked(Actor):
    @endpoint
    async def times(self, factor: int) -> int:
        return current_rank().rank * factor

    @endpoint
    @traced
    async def traced_one(self) -> int:
        with span("inside"):
            return 1


def test_an_accumulator_folds_what_every_rank_answers(quad: ProcMesh) -> None:
    total = Accumulator(quad.spawn("ranked", Ranked).times, 0, operator.add)
    assert total.accumulate(10).get(20) == 60

    async def main() -> int:
        return await total.accumulate(factor=2)

    assert asyncio.run(main()) == 12


def test_spans_and_meters_work_where_nobody_records(quad: ProcMesh) -> None:
    @traced(name="other")
    def add(a: int, b: int) -> int:
        return a + b

    with span("outside"):
        assert add(1, 2) == 3
    get_meter().create_counter("things").add(1)
    assert quad.slice(gpus=0).spawn("ranked", Ranked).traced_one.call_one().get(20) == 1


@pytest.mark.parametrize("key", sorted(DEFAULTS))
def test_defaults_are_those_that_programs_expect(key: str) -> None:
    assert get_global_config()[key] == DEFAULTS[key]


def test_settings_are_made_for_a_block_and_for_good() -> None:
    before = get_global_config()["message_delivery_timeout"]
    with configured(message_delivery_timeout="1h 30m", enable_log_forwarding=True) as inside:
        assert inside["enable_log_forwarding"] is True
        assert get_global_config()["message_delivery_timeout"] == "1h 30m"
    assert get_global_config()["message_delivery_timeout"] == before
    configure(tail_log_lines=5)
    assert get_runtime_config()["tail_log_lines"] == 5
    clear_runtime_config()
    assert get_runtime_config() == {}


def test_the_package_has_them_too() -> None:
    assert monarch.configure is configure
    assert monarch.configured is configured
    assert monarch.get_global_config is get_global_config
    assert monarch.get_runtime_config is get_runtime_config
    assert monarch.clear_runtime_config is clear_runtime_config


def test_an_unknown_key_and_a_wrong_type_are_refused() -> None:
    with pytest.raises(ValueError, match="no_such_key"):
        configure(no_such_key=1)
    with pytest.raises(TypeError, match="enable_log_forwarding"):
        configure(enable_log_forwarding="yes")
    with pytest.raises((TypeError, ValueError), match="cleanup_timeout"):
        configure(cleanup_timeout="soon")
