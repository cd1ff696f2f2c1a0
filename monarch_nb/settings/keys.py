"""Every key of the configuration: its kind, its value where nobody sets one, and whether it does anything here.

The keys of torchmonarch are all known, so that programs which set them run; those that tune parts this engine does
not have are accepted and said once.
"""

from typing import Any, Literal

from msgspec import Struct

from monarch_nb.settings.kinds import ChannelTransport, Encoding

Kind = Literal["duration", "flag", "count", "ratio", "text", "encoding", "transport", "range"]


class Key(Struct, frozen=True):
    """One key. Durations hold nanoseconds inside; `meaning` is empty where the key does nothing here."""

    name: str
    kind: Kind
    default: Any
    meaning: str = ""
    optional: bool = False  # None may be given: it is the default
    env: tuple[str, ...] = ()  # names of the environment beside those that all keys have
    least: int = 0  # of a count


_S = 10**9
_MIB = 1 << 20


def _effective() -> list[Key]:
    return [
        # Messages
        Key("message_delivery_timeout", "duration", 30 * _S, "how long a message may take before it counts as lost"),
        Key("codec_max_frame_length", "count", 10 << 30, "the largest message to another process, in bytes", least=1),
        Key("default_transport", "transport", ChannelTransport.Unix, "how hosts are reached; see enable_transport"),
        # Starting
        Key("host_spawn_ready_timeout", "duration", 30 * _S, "how long a host agent may take to start"),
        Key("host_prestart", "flag", True, "whether %load_ext starts the host agent in the background"),
        Key("host_light_procs", "count", 2, "how many processes a host starts before its template has imported torch"),
        Key("mesh_proc_spawn_max_idle", "duration", 30 * _S, "how long a host agent may take to answer a spawn"),
        Key(
            "actor_spawn_max_idle", "duration", 0, "how long __init__ of an actor may take; 0s: any time", optional=True
        ),
        Key(
            "mesh_attach_config_timeout",
            "duration",
            60 * _S,
            "how long hosts may take to answer when they are attached",
        ),
        # Ending
        Key(
            "stop_actor_timeout",
            "duration",
            10 * _S,
            "how long a stopped actor's endpoint or __cleanup__ may run before it is interrupted",
        ),
        Key(
            "cleanup_timeout",
            "duration",
            3 * _S,
            "how long an async __cleanup__, or what a stop has interrupted, may take to end",
        ),
        Key(
            "mesh_terminate_timeout",
            "duration",
            10 * _S,
            "how long a stopped process may take to end before it is killed",
        ),
        Key("process_exit_timeout", "duration", 10 * _S, "how long host agents may take to end when the program does"),
        Key("mesh_orphan_timeout", "duration", 60 * _S, "how long processes live when their owner is silent"),
        # Output
        Key(
            "enable_log_forwarding", "flag", False, "whether a script shows the rank before each line of its processes"
        ),
        Key("tail_log_lines", "count", 20, "how many last lines of a process its failure shows"),
        Key("prefix_with_rank", "flag", True, "whether forwarded lines begin with the rank they come from"),
        Key("log_dedup", "flag", True, "whether a notebook shows equal lines of several ranks once, with their ranks"),
        Key("log_kept_lines", "count", 10_000, "how many last lines of each process mesh.logs() has", least=1),
        Key(
            "log_file_size",
            "count",
            64 * _MIB,
            "the size, in bytes, at which a process's log file is closed and a new one begins",
            least=4096,
        ),
        Key("log_file_count", "count", 4, "how many log files are kept for a process", least=1),
        Key("log_folder", "text", "", "the folder in which log files stay; without it they go when the host ends"),
        # Of our own
        Key("link_credit_window", "count", 256 * _MIB, "how many bytes may be under way to one process", least=1024),
        Key(
            "shared_memory_threshold",
            "count",
            256 * 1024,
            "the size, in bytes, from which a buffer travels as shared memory",
            least=4096,
        ),
        Key(
            "link_down_timeout",
            "duration",
            60 * _S,
            "how long a connection may be down before what waits for it is lost",
        ),
        Key("heal_max_restarts", "count", 3, "how often one rank may be healed within heal_window"),
        Key("heal_window", "duration", 60 * _S, "see heal_max_restarts"),
        Key("call_error_window", "duration", 3 * _S, "how long a call waits for other ranks once one has raised"),
        Key(
            "interrupt_on_failure",
            "flag",
            False,
            "whether a failure that no call waits for interrupts the running cell",
        ),
        # Debugging
        Key("debug_freeze_on_error", "flag", False, "whether an endpoint that raises stops there, as at a breakpoint"),
        Key(
            "debug_keep_failures", "count", 3, "how many failed calls of each actor keep their frames for %mpm; 0: none"
        ),
        Key("debug_keep_bytes", "count", 256 * _MIB, "how many bytes these frames may hold in each process"),
        Key(
            "debug_command_timeout",
            "duration",
            10 * _S,
            "how long a debugger command may run on a rank before it is ended",
        ),
        Key("debug_lease", "duration", 60 * _S, "how long a stopped rank waits for a controller that is silent"),
        Key("debug_orphan", "text", "resume", "what the rank does after that: resume, or end (the call fails)"),
        Key(
            "debug_patience",
            "duration",
            3 * _S,
            "how long a call without a prompt waits for ranks that do not stop as others have",
        ),
        Key(
            "capture_warning_size",
            "count",
            10_000_000,
            "the size, in bytes, from which a captured global is warned of by name",
        ),
    ]


def _accepted() -> list[Key]:
    """Those of torchmonarch 0.7.0, and of versions before it whose programs still set them."""
    return [
        Key("actor_queue_dispatch", "flag", True),
        Key("channel_net_rx_buffer_full_check_interval", "duration", 5 * _S),
        Key("channel_reconnect_timeout", "duration", 60 * _S),
        Key("channel_tcp_congestion", "text", ""),
        Key("channel_tcp_keepalive_idle", "duration", 60 * _S),
        Key("default_encoding", "encoding", Encoding.Multipart),
        Key("enable_dest_actor_reordering_buffer", "flag", True),
        Key("enable_file_capture", "flag", False),
        Key("enable_otel_metrics", "flag", True),
        Key("enable_otel_tracing", "flag", True, "whether endpoints run in spans, where OpenTelemetry records any"),
        Key("enable_recorder_tracing", "flag", True),
        Key("enable_sqlite_tracing", "flag", False),
        Key("enable_unawaited_python_task_traceback", "flag", False),
        Key("file_log_level", "text", ""),
        Key("force_file_log", "flag", False),
        Key("forwarder_flush_timeout", "duration", 5 * _S),
        Key("get_actor_state_max_idle", "duration", 30 * _S),
        Key("get_proc_state_max_idle", "duration", 60 * _S),
        Key("max_cast_dimension_size", "count", 16),
        Key("max_cast_fanout", "count", 16),
        Key("mesh_admin_addr", "text", "[::]:1729"),
        Key("mesh_admin_config_dump_bridge_timeout", "duration", 5 * _S),
        Key("mesh_admin_max_concurrent_resolves", "count", 2),
        Key("mesh_admin_pyspy_bridge_timeout", "duration", 13 * _S),
        Key("mesh_admin_pyspy_client_timeout", "duration", 20 * _S),
        Key("mesh_admin_pyspy_max_profile_duration", "duration", 300 * _S),
        Key("mesh_admin_pyspy_timeout", "duration", 10 * _S),
        Key("mesh_admin_query_child_timeout", "duration", _S // 10),
        Key("mesh_admin_resolve_actor_timeout", "duration", _S // 5),
        Key("mesh_admin_single_host_timeout", "duration", 3 * _S),
        Key("mesh_admin_tree_timeout", "duration", 10 * _S),
        Key("mesh_bootstrap_enable_pdeathsig", "flag", True),
        Key("mesh_terminate_concurrency", "count", 16),
        Key("message_ack_every_n_messages", "count", 1000),
        Key("message_ack_time_interval", "duration", _S // 2),
        Key("message_latency_sampling_rate", "ratio", 0.01),
        Key("message_ttl_default", "count", 64),
        Key("monarch_log_suffix", "text", "", env=("MONARCH_LOG_SUFFIX",)),
        Key("otel_metric_export_interval", "duration", _S),
        Key("pending_actor_delivery_timeout", "duration", 30 * _S),
        Key("proc_launcher_kind", "text", ""),
        Key("proc_stop_max_idle", "duration", 30 * _S),
        Key("process_memory_metric_interval", "duration", 300 * _S),
        Key("pyspy_bin", "text", "", env=("PYSPY_BIN",)),
        Key("rdma_allow_tcp_fallback", "flag", True),
        Key("rdma_cq_poller_per_device", "flag", True),
        Key("rdma_disable_ibverbs", "flag", False),
        Key("rdma_host_odp", "flag", False),
        Key("rdma_ibverbs_target", "text", ""),
        Key("rdma_max_chunk_size_mb", "count", 64),
        Key("rdma_max_nics_per_buffer", "count", None, optional=True),
        Key("rdma_min_stripe_size_kb", "count", 512),
        Key("rdma_peer_device_affinity", "text", ""),
        Key("rdma_qp_init_timeout", "duration", 30 * _S),
        Key("rdma_qps_per_cq", "count", 64),
        Key("rdma_qps_per_peer", "count", 4),
        Key("rdma_runtime_worker_threads", "count", 4),
        Key("rdma_tcp_fallback_parallelism", "count", 1),
        Key("read_log_buffer", "count", 100),
        Key("remote_alloc_allowed_port_range", "range", None, optional=True),
        Key("remote_alloc_bind_to_inaddr_any", "flag", False),
        Key("remote_alloc_bootstrap_addr", "text", ""),
        Key("remote_allocator_heartbeat_interval", "duration", 300 * _S),
        Key("scuba_log_enter_exit", "flag", False),
        Key("sequencer_max_locked_keys", "count", 128),
        Key("server_heartbeat_interval", "duration", _S),
        Key("shared_asyncio_runtime", "flag", False),
        Key("small_write_threshold", "count", 256),
        Key("split_max_buffer_age", "duration", _S // 20),
        Key("split_max_buffer_size", "count", 5),
        Key("stop_grace_period", "duration", 10 * _S, env=("HYPERACTOR_REMOTE_STOP_GRACE_PERIOD",)),
        Key("supervision_watchdog_timeout", "duration", 120 * _S),
        Key("terminated_snapshot_retention", "count", 100),
        Key("tokio_worker_threads", "count", None, optional=True),
        Key("use_direct_spawn", "flag", False),
    ]


KEYS = {key.name: key for key in sorted((*_effective(), *_accepted()), key=lambda key: key.name)}
