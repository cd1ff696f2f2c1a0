"""The configuration that the engine reads: an attribute for each key that has an effect here."""

from monarch_nb.settings.setting import ChannelTransport, Setting, count, flag, seconds, text

_MIB = 1 << 20


class Effective:
    """Keys as attributes; durations are in seconds, sizes in bytes."""

    # Messages
    message_delivery_timeout = seconds(30, "how long a message may take before it counts as lost")
    codec_max_frame_length = count(10 << 30, "the largest message to another process, in bytes", least=1)
    default_transport: Setting[ChannelTransport | str] = Setting(
        "transport", ChannelTransport.Unix, "how hosts are reached; see enable_transport"
    )
    link_credit_window = count(256 * _MIB, "how many bytes may be under way to one process", least=1024)
    link_down_timeout = seconds(60, "how long a connection may be down before what waits for it is lost")
    shared_memory_threshold = count(
        256 * 1024, "the size, in bytes, from which a buffer travels as shared memory", least=4096
    )
    call_error_window = seconds(3, "how long a call waits for other ranks once one has raised")
    capture_warning_size = count(10_000_000, "the size, in bytes, from which a captured global is warned of by name")
    enable_otel_tracing = flag(True, "whether endpoints run in spans, where OpenTelemetry records any")

    # Starting
    host_spawn_ready_timeout = seconds(30, "how long a host agent may take to start")
    host_prestart = flag(True, "whether %load_ext starts the host agent in the background")
    host_light_procs = count(4, "how many processes a host starts before its template has imported torch")
    mesh_proc_spawn_max_idle = seconds(30, "how long a host agent may take to answer a spawn")
    actor_spawn_max_idle = seconds(0, "how long __init__ of an actor may take; 0s: any time", optional=True)
    torchrun_environment = flag(
        True,
        "whether processes have what torchrun would set: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT...",
    )
    share_gpus: Setting[bool | str] = Setting(
        "sharing",
        False,
        "whether several processes of a host may have one GPU, where `gpus` asks for more than it has; 'mps': by "
        "NVIDIA's MPS, so that their kernels run at the same time; 'mps-equal': each on an equal part of it at most",
    )
    mesh_attach_config_timeout = seconds(60, "how long hosts may take to answer when they are attached")

    # Ending
    stop_actor_timeout = seconds(
        10, "how long a stopped actor's endpoint or __cleanup__ may run before it is interrupted"
    )
    cleanup_timeout = seconds(3, "how long an async __cleanup__, or what a stop has interrupted, may take to end")
    mesh_terminate_timeout = seconds(10, "how long a stopped process may take to end before it is killed")
    process_exit_timeout = seconds(10, "how long host agents may take to end when the program does")
    mesh_keep = seconds(
        0, "how long processes live on, and can be attached, when the program that spawned them ends; 0s: not at all"
    )
    kept_results_size = count(
        64 * _MIB, "how many bytes a process keeps of what its actors answer while nobody is there who called them"
    )
    mesh_orphan_timeout = seconds(60, "how long processes live when their owner is silent")
    mesh_unheld_timeout = seconds(0, "how long a notebook's mesh lives that nothing refers to; 0s: any time")
    mesh_unheld_most = count(16, "how many meshes that nothing refers to a notebook keeps; the oldest end first")
    mesh_unheld_memory = count(
        10, "the free memory, in per cent of this machine's, below which meshes that nothing refers to end one by one"
    )

    # Memory of other processes
    rdma_movers = text(
        "",
        "which movers RDMABuffer may use, with commas: local, cross-memory, gpu, nixl, streams, messages; all, "
        "if empty",
    )
    rdma_allow_tcp_fallback = flag(True, "whether RDMABuffer may move bytes through sockets")
    rdma_encrypt_streams = flag(True, "whether streams to other machines are encrypted; both ends must say no to this")
    rdma_put_kept = count(
        1024 * _MIB, "how many bytes of values nobody refers to, and of other hosts' values, a process keeps for put()"
    )
    rdma_tcp_fallback_parallelism = count(1, "how many TCP streams divide the bytes of a large buffer; 0 is 1")

    # Failures
    heal_max_restarts = count(3, "how often one rank may be healed within heal_window")
    heal_window = seconds(60, "see heal_max_restarts")
    interrupt_on_failure = flag(False, "whether a failure that no call waits for interrupts the running cell")

    # Output
    enable_log_forwarding = flag(False, "whether processes put ranks before lines of those they start, as scripts do")
    tail_log_lines = count(20, "how many last lines of a process its failure shows")
    prefix_with_rank = flag(True, "whether forwarded lines begin with the rank they come from")
    log_dedup = flag(True, "whether a notebook shows equal lines of several ranks once, with their ranks")
    log_kept_lines = count(10_000, "how many last lines of each process mesh.logs() has", least=1)
    log_file_size = count(
        64 * _MIB, "the size, in bytes, at which a process's log file is closed and a new one begins", least=4096
    )
    log_file_count = count(4, "how many log files are kept for a process", least=1)
    log_folder = text("", "the folder in which log files stay; without it they go when the host ends")

    # Sharded tensors
    tensor_gather = text(
        "warn",
        "what operations do that need whole tensors on every rank: warn (once for each operation), allow, refuse",
    )

    # Debugging
    debug_freeze_on_error = flag(False, "whether an endpoint that raises stops there, as at a breakpoint")
    debug_keep_failures = count(
        3, "how many failed calls of each actor keep their frames and arguments, for %mpm and %reproduce; 0: none"
    )
    debug_keep_bytes = count(256 * _MIB, "how many bytes these frames may hold in each process")
    debug_command_timeout = seconds(10, "how long a debugger command may run on a rank before it is ended")
    debug_lease = seconds(60, "how long a stopped rank waits for a controller that is silent")
    debug_orphan = text("resume", "what the rank does after that: resume, or end (the call fails)")
    debug_page_lease = seconds(
        180, "how long ranks that JupyterLab's debugger has stopped wait for a page that is silent"
    )
    debug_prompt = flag(True, "whether cells ask for commands where ranks are stopped; if not, calls raise")
    debug_patience = seconds(3, "how long a call without a prompt waits for ranks that do not stop as others have")
