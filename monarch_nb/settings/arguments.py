"""The arguments of `configure`, for editors and type checkers; a test holds them against the keys."""

from datetime import timedelta
from typing import TypedDict

from monarch_nb.settings.kinds import ChannelTransport, Encoding

Duration = str | float | timedelta
"""Text such as "1h 30m", a number of seconds, or a timedelta."""


class ConfigureArgs(TypedDict, total=False):
    """Keys and the types of their values; what they mean is in the manual's page on configuration."""

    actor_queue_dispatch: bool
    actor_spawn_max_idle: Duration | None
    call_error_window: Duration
    capture_warning_size: int
    channel_net_rx_buffer_full_check_interval: Duration
    channel_reconnect_timeout: Duration
    channel_tcp_congestion: str
    channel_tcp_keepalive_idle: Duration
    cleanup_timeout: Duration
    codec_max_frame_length: int
    debug_command_timeout: Duration
    debug_freeze_on_error: bool
    debug_keep_bytes: int
    debug_keep_failures: int
    debug_lease: Duration
    debug_orphan: str
    debug_patience: Duration
    default_encoding: Encoding
    default_transport: ChannelTransport | str
    enable_dest_actor_reordering_buffer: bool
    enable_file_capture: bool
    enable_log_forwarding: bool
    enable_otel_metrics: bool
    enable_otel_tracing: bool
    enable_recorder_tracing: bool
    enable_sqlite_tracing: bool
    enable_unawaited_python_task_traceback: bool
    file_log_level: str
    force_file_log: bool
    forwarder_flush_timeout: Duration
    get_actor_state_max_idle: Duration
    get_proc_state_max_idle: Duration
    heal_max_restarts: int
    heal_window: Duration
    interrupt_on_failure: bool
    host_light_procs: int
    host_prestart: bool
    host_spawn_ready_timeout: Duration
    link_credit_window: int
    link_down_timeout: Duration
    log_dedup: bool
    log_file_count: int
    log_file_size: int
    log_folder: str
    log_kept_lines: int
    max_cast_dimension_size: int
    max_cast_fanout: int
    mesh_admin_addr: str
    mesh_admin_config_dump_bridge_timeout: Duration
    mesh_admin_max_concurrent_resolves: int
    mesh_admin_pyspy_bridge_timeout: Duration
    mesh_admin_pyspy_client_timeout: Duration
    mesh_admin_pyspy_max_profile_duration: Duration
    mesh_admin_pyspy_timeout: Duration
    mesh_admin_query_child_timeout: Duration
    mesh_admin_resolve_actor_timeout: Duration
    mesh_admin_single_host_timeout: Duration
    mesh_admin_tree_timeout: Duration
    mesh_attach_config_timeout: Duration
    mesh_bootstrap_enable_pdeathsig: bool
    mesh_orphan_timeout: Duration
    mesh_proc_spawn_max_idle: Duration
    mesh_terminate_concurrency: int
    mesh_terminate_timeout: Duration
    message_ack_every_n_messages: int
    message_ack_time_interval: Duration
    message_delivery_timeout: Duration
    message_latency_sampling_rate: float
    message_ttl_default: int
    monarch_log_suffix: str
    otel_metric_export_interval: Duration
    pending_actor_delivery_timeout: Duration
    prefix_with_rank: bool
    proc_launcher_kind: str
    proc_stop_max_idle: Duration
    process_exit_timeout: Duration
    process_memory_metric_interval: Duration
    pyspy_bin: str
    rdma_allow_tcp_fallback: bool
    rdma_cq_poller_per_device: bool
    rdma_disable_ibverbs: bool
    rdma_host_odp: bool
    rdma_ibverbs_target: str
    rdma_max_chunk_size_mb: int
    rdma_max_nics_per_buffer: int | None
    rdma_min_stripe_size_kb: int
    rdma_peer_device_affinity: str
    rdma_qp_init_timeout: Duration
    rdma_qps_per_cq: int
    rdma_qps_per_peer: int
    rdma_runtime_worker_threads: int
    rdma_tcp_fallback_parallelism: int
    read_log_buffer: int
    remote_alloc_allowed_port_range: slice | None
    remote_alloc_bind_to_inaddr_any: bool
    remote_alloc_bootstrap_addr: str
    remote_allocator_heartbeat_interval: Duration
    scuba_log_enter_exit: bool
    sequencer_max_locked_keys: int
    server_heartbeat_interval: Duration
    shared_memory_threshold: int
    shared_asyncio_runtime: bool
    small_write_threshold: int
    split_max_buffer_age: Duration
    split_max_buffer_size: int
    stop_actor_timeout: Duration
    stop_grace_period: Duration
    supervision_watchdog_timeout: Duration
    tail_log_lines: int
    terminated_snapshot_retention: int
    tokio_worker_threads: int | None
    use_direct_spawn: bool
