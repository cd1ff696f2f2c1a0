"""The hosts that a reference names, where a process was handed it by other means than a message.

So a child of `multiprocessing` gets a mesh of its parent. It is a controller by itself, with a host of its own.
"""

import threading
import time
from collections.abc import Iterable

from monarch_nb.connect.local_host import meet
from monarch_nb.connect.routes import Routes
from monarch_nb.host import find_run_folder
from monarch_nb.runtime import Runtime
from monarch_nb.settings import settings
from monarch_nb.transport import UnreachableError
from monarch_nb.wire import host_name, parse_address

_lock = threading.Lock()
_learned: set[str] = set()  # hosts without an agent: programs that have spawned nothing on this machine


def reach(runtime: Runtime, hosts: Iterable[str], name: str) -> None:
    """Makes hosts known to this process that are on this machine; blocks until their agents have answered.

    Only a controller needs it: the agent of a process that was spawned knows the routes. Raises UnreachableError for a
    host that is neither here nor attached.
    """
    if not parse_address(runtime.address).is_controller:
        return
    with _lock:
        unknown = [host for host in dict.fromkeys(hosts) if not _is_known(runtime, host)]
        met = [host for host in unknown if _meet(runtime, host, name)]
    if met:
        runtime.part(Routes).settle(met, settings.message_delivery_timeout)


def _is_known(runtime: Runtime, host: str) -> bool:
    return (
        host == runtime.host
        or host in runtime.part(Routes).local
        or host in runtime.part(Routes).attached
        or host in _learned
    )


def _meet(runtime: Runtime, host: str, name: str) -> bool:
    """Whether it has an agent, which has been met."""
    folder = find_run_folder(host)
    if folder is None:
        raise UnreachableError(
            f"{name} has a part on host {host_name(host)}, which is not on this machine and has not been attached by "
            "this process: attach it here first (attach_hosts, attach_to_workers)"
        )
    if not (folder / "agent").exists():
        runtime.node.learn(host, run_folder=folder)
        _learned.add(host)
        return False
    limit = settings.message_delivery_timeout
    local = meet(runtime, str(folder / "agent"), time.monotonic() + limit, lambda: runtime.closed)
    runtime.part(Routes).attached[host] = local
    local.join().get(limit)
    return True
