"""Keys of torchmonarch 0.7.0, and of versions before it whose programs still set them, that do nothing here.

All are accepted, so that programs which set them run, with one warning each.
"""

from collections.abc import Iterator
from datetime import timedelta
from typing import Annotated, Any, TypedDict, get_args

from monarch_nb.settings.kinds import SECOND, Encoding, Kind, Setting

Duration = str | float | timedelta
"""Text such as "1h 30m", a number of seconds, or a timedelta."""

_KINDS: dict[Any, Kind] = {
    Duration: "duration",
    bool: "flag",
    int: "count",
    int | None: "count",
    float: "ratio",
    str: "text",
    Encoding: "encoding",
    slice | None: "range",
}


class AcceptedArgs(TypedDict, total=False):
    """Each key with its type, its default (durations in seconds), and its environment variables."""

    actor_queue_dispatch: Annotated[bool, True]
    channel_net_rx_buffer_full_check_interval: Annotated[Duration, 5]
    channel_reconnect_timeout: Annotated[Duration, 60]
    channel_tcp_congestion: Annotated[str, ""]
    channel_tcp_keepalive_idle: Annotated[Duration, 60]
    default_encoding: Annotated[Encoding, Encoding.Multipart]
    enable_dest_actor_reordering_buffer: Annotated[bool, True]
    enable_file_capture: Annotated[bool, False]
    enable_otel_metrics: Annotated[bool, True]
    enable_recorder_tracing: Annotated[bool, True]
    enable_sqlite_tracing: Annotated[bool, False]
    enable_unawaited_python_task_traceback: Annotated[bool, False]
    file_log_level: Annotated[str, ""]
    force_file_log: Annotated[bool, False]
    forwarder_flush_timeout: Annotated[Duration, 5]
    get_actor_state_max_idle: Annotated[Duration, 30]
    get_proc_state_max_idle: Annotated[Duration, 60]
    max_cast_dimension_size: Annotated[int, 16]
    max_cast_fanout: Annotated[int, 16]
    mesh_admin_addr: Annotated[str, "[::]:1729"]
    mesh_admin_config_dump_bridge_timeout: Annotated[Duration, 5]
    mesh_admin_max_concurrent_resolves: Annotated[int, 2]
    mesh_admin_pyspy_bridge_timeout: Annotated[Duration, 13]
    mesh_admin_pyspy_client_timeout: Annotated[Duration, 20]
    mesh_admin_pyspy_max_profile_duration: Annotated[Duration, 300]
    mesh_admin_pyspy_timeout: Annotated[Duration, 10]
    mesh_admin_query_child_timeout: Annotated[Duration, 0.1]
    mesh_admin_resolve_actor_timeout: Annotated[Duration, 0.2]
    mesh_admin_single_host_timeout: Annotated[Duration, 3]
    mesh_admin_tree_timeout: Annotated[Duration, 10]
    mesh_bootstrap_enable_pdeathsig: Annotated[bool, True]
    mesh_terminate_concurrency: Annotated[int, 16]
    message_ack_every_n_messages: Annotated[int, 1000]
    message_ack_time_interval: Annotated[Duration, 0.5]
    message_latency_sampling_rate: Annotated[float, 0.01]
    message_ttl_default: Annotated[int, 64]
    monarch_log_suffix: Annotated[str, "", "MONARCH_LOG_SUFFIX"]
    otel_metric_export_interval: Annotated[Duration, 1]
    pending_actor_delivery_timeout: Annotated[Duration, 30]
    proc_launcher_kind: Annotated[str, ""]
    proc_stop_max_idle: Annotated[Duration, 30]
    process_memory_metric_interval: Annotated[Duration, 300]
    pyspy_bin: Annotated[str, "", "PYSPY_BIN"]
    rdma_cq_poller_per_device: Annotated[bool, True]
    rdma_disable_ibverbs: Annotated[bool, False]
    rdma_host_odp: Annotated[bool, False]
    rdma_ibverbs_target: Annotated[str, ""]
    rdma_max_chunk_size_mb: Annotated[int, 64]
    rdma_max_nics_per_buffer: Annotated[int | None, None]
    rdma_min_stripe_size_kb: Annotated[int, 512]
    rdma_peer_device_affinity: Annotated[str, ""]
    rdma_qp_init_timeout: Annotated[Duration, 30]
    rdma_qps_per_cq: Annotated[int, 64]
    rdma_qps_per_peer: Annotated[int, 4]
    rdma_runtime_worker_threads: Annotated[int, 4]
    read_log_buffer: Annotated[int, 100]
    remote_alloc_allowed_port_range: Annotated[slice | None, None]
    remote_alloc_bind_to_inaddr_any: Annotated[bool, False]
    remote_alloc_bootstrap_addr: Annotated[str, ""]
    remote_allocator_heartbeat_interval: Annotated[Duration, 300]
    scuba_log_enter_exit: Annotated[bool, False]
    sequencer_max_locked_keys: Annotated[int, 128]
    server_heartbeat_interval: Annotated[Duration, 1]
    shared_asyncio_runtime: Annotated[bool, False]
    small_write_threshold: Annotated[int, 256]
    split_max_buffer_age: Annotated[Duration, 0.05]
    split_max_buffer_size: Annotated[int, 5]
    stop_grace_period: Annotated[Duration, 10, "HYPERACTOR_REMOTE_STOP_GRACE_PERIOD"]
    supervision_watchdog_timeout: Annotated[Duration, 120]
    terminated_snapshot_retention: Annotated[int, 100]
    tokio_worker_threads: Annotated[int | None, None]
    use_direct_spawn: Annotated[bool, False]


AT_LEAST_ONE = frozenset(
    {
        "max_cast_fanout",
        "rdma_max_nics_per_buffer",
        "rdma_min_stripe_size_kb",
        "rdma_qps_per_cq",
        "rdma_qps_per_peer",
        "sequencer_max_locked_keys",
        "tokio_worker_threads",
    }
)
"""Counts that must be at least 1, as in torchmonarch."""


def accepted() -> Iterator[Setting[object]]:
    """Yields the settings of these keys."""
    for name, annotation in AcceptedArgs.__annotations__.items():
        value_type, default, *env = get_args(annotation)
        kind = _KINDS[value_type]
        value = round(default * SECOND) if kind == "duration" else default
        least = int(name in AT_LEAST_ONE)
        yield Setting(kind, value, name=name, optional=default is None, env=tuple(env), least=least)
