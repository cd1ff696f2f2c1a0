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
        Key("message_delivery_timeout", "duration", 30 * _S, "a message that does not arrive for that long is lost"),
        Key("codec_max_frame_length", "count", 10 << 30, "bytes of the largest message to another process", least=1),
        Key("default_transport", "transport", ChannelTransport.Unix, "how hosts are reached; see enable_transport"),
        # Starting
        Key("host_spawn_ready_timeout", "duration", 30 * _S, "for a host agent to come up"),
        Key("host_prestart", "flag", True, "%load_ext starts the host agent, in the background"),
        Key("host_light_procs", "count", 2, "processes a host may start while its template still imports torch"),
        Key("mesh_proc_spawn_max_idle", "duration", 30 * _S, "for a host agent to answer a wish for processes"),
        Key("actor_spawn_max_idle", "duration", 0, "for actors' __init__; 0s: as long as it takes", optional=True),
        Key("mesh_attach_config_timeout", "duration", 60 * _S, "for hosts to answer when they are attached"),
        # Ending
        Key(
            "stop_actor_timeout",
            "duration",
            10 * _S,
            "for the endpoint or __cleanup__ of a stopped actor, before an interrupt",
        ),
        Key(
            "cleanup_timeout",
            "duration",
            3 * _S,
            "for an async __cleanup__, and for what a stop has interrupted to end",
        ),
        Key("mesh_terminate_timeout", "duration", 10 * _S, "for a stopped process to leave, before SIGKILL"),
        Key("process_exit_timeout", "duration", 10 * _S, "for host agents to leave at the end of the program"),
        Key("mesh_orphan_timeout", "duration", 60 * _S, "that processes live on when nothing is heard of their owner"),
        # Output
        Key("enable_log_forwarding", "flag", False, "the output of processes is shown where the controller runs"),
        Key("tail_log_lines", "count", 20, "last lines of a process that its failure tells"),
        Key("prefix_with_rank", "flag", True, "forwarded lines begin with the rank they come from"),
        Key("log_dedup", "flag", True, "a notebook shows equal lines of several ranks once, with their ranks"),
        Key("log_kept_lines", "count", 10_000, "last lines of each process that mesh.logs() has", least=1),
        Key("log_file_size", "count", 64 * _MIB, "bytes of a process's log file, before it is set aside", least=4096),
        Key("log_file_count", "count", 4, "log files that are kept for a process", least=1),
        Key("log_folder", "text", "", "where log files go and stay; else beside the host's sockets, till it ends"),
        # Of our own
        Key("link_credit_window", "count", 256 * _MIB, "bytes on their way to one process, not yet taken", least=1024),
        Key("shared_memory_threshold", "count", 256 * 1024, "bytes from which a buffer travels as memory", least=4096),
        Key("link_down_timeout", "duration", 60 * _S, "without a connection, until what waits for it is lost"),
        Key("heal_max_restarts", "count", 3, "heals of one rank within heal_window"),
        Key("heal_window", "duration", 60 * _S, "see heal_max_restarts"),
        Key("call_error_window", "duration", 3 * _S, "that a call waits for other ranks once one has raised"),
        Key("interrupt_on_failure", "flag", False, "a failure nobody waits for interrupts the running cell"),
        # Debugging
        Key("debug_freeze_on_error", "flag", False, "an endpoint that raises stops at the raise, as at a breakpoint"),
        Key("debug_keep_failures", "count", 3, "failed calls of each actor whose frames are kept for %mpm; 0: none"),
        Key("debug_keep_bytes", "count", 256 * _MIB, "of what the frames that are kept hold, in each process"),
        Key("debug_command_timeout", "duration", 10 * _S, "for a command in a stopped rank, before it is broken off"),
        Key("debug_lease", "duration", 60 * _S, "that a stopped rank waits when nothing is heard of its controller"),
        Key("debug_orphan", "text", "resume", "what a stopped rank does then: resume, or end (the call fails)"),
        Key("debug_patience", "duration", 3 * _S, "without a prompt, for ranks that do not stop where others have"),
        Key("capture_warning_size", "count", 10_000_000, "bytes of a captured global from which a warning names it"),
    ]


def _accepted() -> list[Key]:
    return [
        Key("channel_net_rx_buffer_full_check_interval", "duration", 5 * _S),
        Key("channel_reconnect_timeout", "duration", 60 * _S),
        Key("channel_tcp_congestion", "text", ""),
        Key("channel_tcp_keepalive_idle", "duration", 60 * _S),
        Key("default_encoding", "encoding", Encoding.Multipart),
        Key("enable_dest_actor_reordering_buffer", "flag", True),
        Key("enable_file_capture", "flag", False),
        Key("enable_otel_metrics", "flag", True),
        Key("enable_otel_tracing", "flag", True, "endpoints run in spans where OpenTelemetry records any"),
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
        Key("scuba_log_enter_exit", "flag", False),
        Key("sequencer_max_locked_keys", "count", 128),
        Key("server_heartbeat_interval", "duration", _S),
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
