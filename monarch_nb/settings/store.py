"""The configuration of this process: its keys, and their values in layers: defaults, the environment, the settings of
its controller, and those of the program here. The last layer that has a value counts.
"""

import json
import logging
import os
import threading
import warnings
from collections.abc import Mapping
from typing import Literal

from monarch_nb._deferred import difflib
from monarch_nb.settings.accepted_keys import AcceptedArgs, Duration, accepted
from monarch_nb.settings.kinds import (
    ChannelTransport,
    Setting,
    Value,
    checked,
    count,
    flag,
    from_text,
    public_value,
    seconds,
    text,
    to_text,
)

logger = logging.getLogger(__name__)

TRAVELS_IN = "MONARCH_NB_CONFIG"  # environment variable that passes a controller's settings to its processes
_WARNED = "environment.warned"  # among the settings that travel
_PREFIXES = ("MONARCH_NB_", "HYPERACTOR_MESH_", "HYPERACTOR_", "MONARCH_HYPERACTOR_", "MONARCH_")
_MIB = 1 << 20


class Effective:
    """The keys that have an effect here, as attributes; durations are in seconds, sizes in bytes."""

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


class ConfigureArgs(AcceptedArgs, total=False):
    """The arguments of `configure`, for editors and type checkers; the manual's page on configuration explains them.

    A test compares them with the keys.
    """

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


_effective = [value for value in vars(Effective).values() if isinstance(value, Setting)]
KEYS: dict[str, Setting[object]] = {
    key.name: key for key in sorted((*_effective, *accepted()), key=lambda key: key.name)
}


class Settings(Effective):
    """The values in force, as attributes; any thread may read and set them."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self._environ = os.environ if environ is None else environ
        self._lock = threading.RLock()
        self._env: dict[str, Value] | None = None  # None while it has to be read
        self._set: dict[str, Value] | None = None  # all layers merged; None after one has changed
        self._sent: dict[str, Value] = {}
        self._runtime: dict[str, Value] = {}
        self._warned: set[str] = set()  # names of settings, and lines of the environment

    # -- for the engine -----------------------------------------------------------------------------------------------

    def explicit(self, name: str) -> bool:
        """Returns whether any layer has set a key."""
        return name in self._merged()

    def value_of(self, key: Setting[object]) -> Value:
        """Returns the value of a key in force, durations in nanoseconds."""
        values = self._set
        return (self._merged() if values is None else values).get(key.name, key.default)

    def _merged(self) -> dict[str, Value]:
        with self._lock:
            if self._set is None:
                self._env = self._read_environment() if self._env is None else self._env
                self._set = {**self._env, **self._sent, **self._runtime}
            return self._set

    def _read_environment(self) -> dict[str, Value]:
        values: dict[str, Value] = {}
        names = {name: key for key in KEYS.values() for name in key.env}
        for prefix in reversed(_PREFIXES):  # ours is read last and wins
            for name, value in self._environ.items():
                if not name.startswith(prefix) and name not in names:
                    continue
                key = names.get(name) or KEYS.get(name.removeprefix(prefix).lower())
                if key is None:
                    continue
                try:
                    values[key.name] = from_text(key, value)
                except (TypeError, ValueError) as error:
                    if (line := f"{name}={value}") not in self._warned:
                        self._warned.add(line)
                        warnings.warn(f"the environment's {name} is ignored: {error}", stacklevel=2)
        return values

    # -- for programs -------------------------------------------------------------------------------------------------

    def configure(self, values: Mapping[str, object]) -> None:
        """Sets all of `values` or, if one of them is wrong, none. Raises ValueError, TypeError."""
        layer = {name: checked(_key(name), value) for name, value in values.items()}
        with self._lock:
            self._runtime = {**self._runtime, **layer}
            self._set = None
        for name, value in layer.items():
            self._warn_if_unused(KEYS[name], value)

    def replace(self, values: Mapping[str, object]) -> None:
        """Restores a layer that `runtime` has returned."""
        layer = {name: checked(_key(name), value) for name, value in values.items()}
        with self._lock:
            self._runtime = layer
            self._set = None

    def runtime(self) -> dict[str, Value]:
        """Returns the values that were set here, durations as text."""
        return {name: public_value(KEYS[name], value) for name, value in self._runtime.items()}

    def everything(self) -> dict[str, Value]:
        """Returns all keys with the values in force, durations as text."""
        return {key.name: public_value(key, self.value_of(key)) for key in KEYS.values()}

    def _warn_if_unused(self, key: Setting[object], value: Value) -> None:
        if key.meaning or value == key.default or key.name in self._warned:
            return
        self._warned.add(key.name)
        logger.warning("configuration: %s is accepted, but does nothing in monarch-nb", key.name)

    # -- from process to process --------------------------------------------------------------------------------------

    def to_send(self) -> str:
        """Returns the settings that this process passes on to those that it starts."""
        self._merged()  # those need not warn of what this process has warned of
        sent: dict[str, object] = {
            name: to_text(KEYS[name], value) for name, value in sorted({**self._sent, **self._runtime}.items())
        }
        if self._warned:
            sent[_WARNED] = sorted(self._warned)
        return json.dumps(sent) if sent else ""

    def receive(self, text: str) -> None:
        """Takes over settings from the controller, and reads the environment again. Ignores unknown ones, as the
        controller may be newer.
        """
        try:
            layer = json.loads(text) if text else {}
        except ValueError:
            layer = {}
        if not isinstance(layer, dict):
            layer = {}
        received, warned = {}, layer.get(_WARNED)
        for name, value in layer.items():
            if name in KEYS and isinstance(value, str):
                try:
                    received[name] = from_text(KEYS[name], value)
                except (TypeError, ValueError):
                    continue
        with self._lock:
            self._warned.update(map(str, warned if isinstance(warned, list) else ()))
            self._runtime, self._sent = {}, received
            self._env = self._set = None

    def reload(self) -> None:
        """Makes the next use read the environment again."""
        with self._lock:
            self._env = self._set = None


def _key(name: str) -> Setting[object]:
    key = KEYS.get(name)
    if key is None:
        matches = difflib.get_close_matches(name, KEYS, 1, 0.6)
        hint = f"; did you mean {matches[0]}?" if matches else "; get_global_config() has all"
        raise ValueError(f"invalid configuration key: `{name}`{hint}")
    return key


settings = Settings()
"""The settings of this process."""
