"""The arguments of `configure`, for editors and type checkers; a test holds them against the keys."""

from typing import Literal

from monarch_nb.settings.accepted_keys import AcceptedArgs, Duration
from monarch_nb.settings.setting import ChannelTransport


class ConfigureArgs(AcceptedArgs, total=False):
    """Keys and the types of their values; the manual's page on configuration explains them."""

    actor_spawn_max_idle: Duration | None
    call_error_window: Duration
    capture_warning_size: int
    cleanup_timeout: Duration
    codec_max_frame_length: int
    debug_command_timeout: Duration
    debug_freeze_on_error: bool
    debug_keep_bytes: int
    debug_keep_failures: int
    debug_lease: Duration
    debug_orphan: str
    debug_page_lease: Duration
    debug_patience: Duration
    debug_prompt: bool
    default_transport: ChannelTransport | str
    enable_log_forwarding: bool
    enable_otel_tracing: bool
    heal_max_restarts: int
    heal_window: Duration
    host_light_procs: int
    host_prestart: bool
    host_spawn_ready_timeout: Duration
    interrupt_on_failure: bool
    kept_results_size: int
    link_credit_window: int
    link_down_timeout: Duration
    log_dedup: bool
    log_file_count: int
    log_file_size: int
    log_folder: str
    log_kept_lines: int
    mesh_attach_config_timeout: Duration
    mesh_keep: Duration
    mesh_orphan_timeout: Duration
    mesh_unheld_memory: int
    mesh_unheld_most: int
    mesh_unheld_timeout: Duration
    mesh_proc_spawn_max_idle: Duration
    mesh_terminate_timeout: Duration
    message_delivery_timeout: Duration
    prefix_with_rank: bool
    process_exit_timeout: Duration
    rdma_allow_tcp_fallback: bool
    rdma_encrypt_streams: bool
    rdma_movers: str
    rdma_put_kept: int
    rdma_tcp_fallback_parallelism: int
    share_gpus: bool | Literal["mps", "mps-equal"]
    shared_memory_threshold: int
    stop_actor_timeout: Duration
    tail_log_lines: int
    tensor_gather: str
    torchrun_environment: bool
