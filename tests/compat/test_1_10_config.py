"""Section 1.10: the configuration.

Elsewhere: accepted values (unit/test_config*.py), accumulators (memory_network/test_api_local.py), telemetry
(unit/test_telemetry.py), transports (cluster/test_api_transport.py), all in tests.
"""

from typing import Any

import pytest

import monarch
from monarch.config import clear_runtime_config, configure, configured, get_global_config, get_runtime_config

pytestmark = pytest.mark.timeout(120)

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


@pytest.mark.parametrize("key", sorted(DEFAULTS))
def test_defaults_are_those_that_programs_expect(key: str) -> None:
    assert get_global_config()[key] == DEFAULTS[key]


def test_the_package_has_them_too() -> None:
    assert monarch.configure is configure
    assert monarch.configured is configured
    assert monarch.get_global_config is get_global_config
    assert monarch.get_runtime_config is get_runtime_config
    assert monarch.clear_runtime_config is clear_runtime_config
