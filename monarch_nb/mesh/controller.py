"""How a notebook kernel, or a script, becomes the controller: its runtime, and the host agents it starts."""

import atexit
import os
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from monarch_nb.host import protocol as p
from monarch_nb.host.folders import make_run_folder, new_host_id, remove_run_folder, run_folder_for
from monarch_nb.host.launch import AgentHandle, start_agent
from monarch_nb.mesh.console import run_in_actor
from monarch_nb.mesh.host import HostMesh, host_labels
from monarch_nb.mesh.keeper import Keeper
from monarch_nb.mesh.requests import gather, request
from monarch_nb.runtime import Future, Runtime, install, runtime
from monarch_nb.settings import TRAVELS_IN, settings
from monarch_nb.supervision import MeshFailure
from monarch_nb.transport import Node

_lock = threading.RLock()
_agents: dict[str, AgentHandle] = {}
_fatal: list[MeshFailure] = []


def become_controller() -> Runtime:
    """Makes this process a controller. No process is started yet."""
    host = new_host_id()
    folder = run_folder_for(host)
    make_run_folder(folder)
    engine = Runtime(f"{host}/c{secrets.token_hex(4)}.0.0", f"{host}/agent")
    engine.run_in_actor = run_in_actor
    keeper = Keeper(engine, root=engine.root.stream)
    keeper.driver.fatal = _unhandled
    node = Node(
        engine.address,
        run_folders={host: Path(folder)},
        agent=None,
        handler=engine.handle,
        on_link_failed=lambda header, parcel, reason: engine.undelivered(header, reason),
    )
    engine.start(node)
    atexit.register(shutdown)
    return engine


def ensure_host(engine: Runtime) -> None:
    """Starts the agent of this host, if this process is its controller and it does not run yet; blocks about 0.2 s."""
    if engine.keeper._mesh is not None or engine.host in _agents:
        return
    with _lock:
        if engine.host not in _agents:
            folder = run_folder_for(engine.host)
            _start(engine, engine.host, Path(folder))


def _start(engine: Runtime, host: str, folder: Path) -> None:
    engine.keeper.agent_environment[host] = dict(os.environ)
    handle = start_agent(
        host,
        folder,
        env={**os.environ, TRAVELS_IN: settings.to_send()},
        lease_s=settings.get("mesh_orphan_timeout"),
        timeout_s=settings.get("host_spawn_ready_timeout"),
    )
    _agents[host] = handle
    engine.node.learn(host, run_folder=folder)
    engine.local_hosts.add(host)
    threading.Thread(target=_watch_agent, args=(engine, handle), name="monarch-agent-watch", daemon=True).start()


def _watch_agent(engine: Runtime, handle: AgentHandle) -> None:
    """An agent that dies takes its processes along: tell at once."""
    status = handle.wait()
    if engine.closed or _agents.get(handle.host) is not handle:
        return
    _agents.pop(handle.host, None)
    engine.keeper.host_lost(handle.host, f"its host agent (process {handle.pid}) ended with status {status}")
    remove_run_folder(handle.run_folder)


def local_hosts(count: int, name: str = "hosts") -> HostMesh:
    """`count` hosts that are all this machine, with an agent each: to try what needs several."""
    engine = runtime()
    ensure_host(engine)
    hosts = [engine.host]
    with _lock:
        for _ in range(count - 1):
            host = new_host_id()
            _start(engine, host, Path(run_folder_for(host)))
            hosts.append(host)
    folders = {host: f"ipc://{run_folder_for(host)}" for host in _agents}
    for host in _agents:
        engine.control(f"{host}/agent", "agent.hosts", p.Hosts(folders))
    return HostMesh(name, hosts, host_labels(hosts), owned=True)


def hosts_answer(hosts: Sequence[str]) -> "Future[Any]":
    """Resolves to True when the agents of all hosts have answered."""
    engine = runtime()
    asked = [request(engine, f"{host}/agent", "agent.status", p.Done(), p.HostState) for host in hosts]
    return gather(asked, lambda: f"{len(hosts)} hosts have not all answered yet", True)


def shutdown_hosts(hosts: Sequence[str]) -> "Future[None]":
    """Ends these hosts' agents and all processes on them."""
    engine = runtime()
    done: Future[None] = Future._make(story=lambda: "hosts are being shut down")

    def end() -> None:
        for host in hosts:
            for state in tuple(engine.meshes.values()):
                if getattr(state, "layout", None) is not None and host in state.layout.hosts and state.stopped is None:
                    engine.keeper.stop_mesh(state, "its host was shut down")
            handle = _agents.pop(host, None)
            if handle is not None:
                handle.close()
        done._set(None)

    threading.Thread(target=end, name="monarch-shutdown", daemon=True).start()
    return done


def shutdown() -> None:
    """Ends everything this controller has started, and leaves; a later call begins anew."""
    from monarch_nb.runtime import process

    engine = process._runtime
    if engine is None or engine.keeper is None or engine.keeper._mesh is not None:
        return
    with _lock:
        handles = list(_agents.values())
        _agents.clear()
    for cell in tuple(engine.cells.values()):
        cell.stop("its process ends")
    for cell in tuple(engine.cells.values()):
        cell.executor.thread.join(3.0)
    engine.close()
    for handle in handles:
        handle.close()
    remove_run_folder(run_folder_for(engine.host))
    install(None)
    if _fatal:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(1)


def shutdown_context(host_timeout: float | None = None) -> "Future[None]":
    """Ends what this process has started and leaves the cluster. Blocks until it is done."""
    shutdown()
    return Future._resolved(None)


def exit_on_fault(failure: MeshFailure) -> None:
    """What happens to a failure nobody handles, unless it is replaced: the program ends with status 1."""
    sys.exit(1)


_hook: Callable[[], Callable[[MeshFailure], None]] = lambda: exit_on_fault


def set_hook_lookup(lookup: Callable[[], Callable[[MeshFailure], None]]) -> None:
    """Where the current `unhandled_fault_hook` is found."""
    global _hook
    _hook = lookup


def _unhandled(failure: MeshFailure) -> None:
    """Scripts fail fast: the hook runs once; unless it returns, the program ends."""

    def run() -> None:
        try:
            _hook()(failure)
            return
        except SystemExit:
            pass
        except BaseException as error:
            sys.stderr.write(f"unhandled_fault_hook raised {type(error).__name__}: {error}\n")
        sys.stderr.write(f"Unhandled monarch failure: {failure.report()}\n")
        sys.stderr.flush()
        _fatal.append(failure)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    threading.Thread(target=run, name="monarch-fault", daemon=True).start()


def notebook_mode(show: Callable[[MeshFailure], None]) -> None:
    """In a notebook a failure must not end the process: it is told by a call that waits for it, else by `show`.

    An `unhandled_fault_hook` that the user has set is still called.
    """

    def tell(failure: MeshFailure) -> None:
        hook = _hook()
        if hook is exit_on_fault:
            show(failure)
        else:
            threading.Thread(target=_run_hook, args=(hook, failure), name="monarch-fault", daemon=True).start()

    driver = runtime().keeper.driver
    driver.machine.root_policy = "notebook"
    driver.show = tell


def _run_hook(hook: Callable[[MeshFailure], None], failure: MeshFailure) -> None:
    try:
        hook(failure)
    except BaseException as error:
        sys.stderr.write(f"unhandled_fault_hook raised {type(error).__name__}: {error}\n{failure.report()}\n")
