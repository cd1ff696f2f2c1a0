"""Workers as a mesh of hosts, attached in the background over TCP and on this machine alike.

The requested transport is only recorded: links choose their own by their ends.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from monarch_nb.connect.hosts import AttachError, objection, reach_hosts
from monarch_nb.connect.local_host import connect_local_host
from monarch_nb.connect.own_hosts import give_up_hosts
from monarch_nb.connect.remote_host import Gateway
from monarch_nb.connect.routes import HostRoutes
from monarch_nb.connect.trust import CA, TRUST_ALL, PrivateKey, check_trust, local_name, read_keys
from monarch_nb.mesh.host import HostMesh, host_labels
from monarch_nb.routing.routes import ChannelEndpoint, parse_dialled
from monarch_nb.runtime import Future, Runtime, current_runtime, fail_future, pending_future, resolve_future, started
from monarch_nb.runtime.ids import ProcId
from monarch_nb.settings import ChannelTransport, settings
from monarch_nb.settings import transport as named
from monarch_nb.transport import Keys

logger = logging.getLogger(__name__)
_SERVED = {
    ChannelTransport.Unix,
    ChannelTransport.Local,
    ChannelTransport.TcpWithHostname,
    ChannelTransport.TcpWithLocalhost,
}
_lock = threading.Lock()
_enabled: ChannelTransport | str | None = None
T = TypeVar("T")


def enable_transport(transport: ChannelTransport | str) -> None:
    """Selects the transport to hosts: one of ChannelTransport, its short name ("tcp", "ipc"…) or an address.

    Nothing has to be enabled here: processes of a host use local sockets, hosts with a `tcp://` address TCP, encrypted
    with the key of the job. The choice is stored in `default_transport`; the transports of other clusters are accepted,
    but TCP is used instead, with a warning. Repeating a call does nothing; another transport raises RuntimeError, as
    does any after the first other call. Raises ValueError for an unknown transport.
    """
    global _enabled
    requested = named(transport)
    with _lock:
        if requested == (_enabled or settings.default_transport):
            _enabled = requested
            return
        if started() is not None:
            raise RuntimeError("enable_transport() must come before any other call: this program has a context already")
        if _enabled is not None:
            raise RuntimeError(f"only one transport can be enabled: it is {_enabled}, and cannot become {requested}")
        settings.configure({"default_transport": requested})
        _enabled = requested
    scheme = requested.partition(":")[0] if isinstance(requested, str) else ""
    if requested not in _SERVED and scheme not in ("tcp", "ipc"):
        logger.warning(
            "the transport %s is not available: hosts are connected by TCP, encrypted with the job's key", requested
        )


def attach_to_workers(
    *,
    private_key: PrivateKey = None,
    ca: CA,
    workers: "Sequence[str | Future[str]]",
    name: str | None = None,
    service_proc_ids: Sequence[ProcId] | None = None,
) -> HostMesh:
    """Returns a mesh, with dimension `hosts`, of the hosts where `run_worker_loop_forever` runs at these addresses.

    Does not block: hosts are connected in the background. Those that have not started yet are waited for, up to the
    setting `mesh_attach_config_timeout`, or until the mesh is given up. `initialized` is a future of the outcome: it
    fails with AttachError, which names each host that cannot be reached. Spawning on the mesh waits until all are
    attached. `service_proc_ids` are arguments of earlier versions of torchmonarch, one for each worker; hosts have
    their own ids. Raises AddressError, and TrustError without a key for an address that needs one.
    """
    if isinstance(workers, str) or not workers:
        raise ValueError("attach_to_workers takes a list of addresses, such as ['tcp://node7:22222']")
    if service_proc_ids is not None and len(service_proc_ids) != len(workers):
        raise ValueError(f"attach_to_workers: {len(service_proc_ids)} ids for {len(workers)} workers")
    keys = read_keys(private_key, ca)
    endpoints = [worker if isinstance(worker, Future) else _endpoint(worker, keys) for worker in workers]
    urls = [endpoint.url for endpoint in endpoints if isinstance(endpoint, ChannelEndpoint)]
    repeated = sorted({url for url in urls if urls.count(url) > 1})
    if repeated:
        raise ValueError(f"{', '.join(repeated)} is named more than once: list each worker once")
    runtime = current_runtime()
    mesh = name or "hosts"
    hosts: Future[tuple[str, ...]] = pending_future(
        describe=lambda: f"the hosts of {mesh} have not all been reached yet"
    )
    ended: list[str] = []

    def attach() -> None:
        try:
            resolve_future(hosts, _attach(runtime, endpoints, keys, lambda: bool(ended) or runtime.closed))
        except BaseException as error:
            fail_future(hosts, error)
            return
        if ended and not runtime.closed:  # given up in the last moment
            give_up_hosts(hosts.get(0), ended[0])

    run_in_thread(attach)
    return HostMesh(mesh, hosts, host_labels([str(endpoint) for endpoint in endpoints]), owned=True, ended=ended)


def attach(addr: str, *, private_key: PrivateKey = None, ca: CA = TRUST_ALL) -> None:
    """Reaches workers that are attached from now on through the one at `addr`, the gateway, which dials them.

    For a client outside a cluster: it needs to reach only that worker, and no host needs to reach it. Processes of
    this machine are reached as before. `private_key` is the job's key, as in `attach_to_workers`. Blocks until the
    gateway has answered. Repeating the call does nothing.
    Raises AttachError if it does not answer, RuntimeError for a second gateway.
    """
    endpoint = local_name(parse_dialled(addr), read_keys(private_key, ca))
    routes = current_runtime().part(HostRoutes)
    if routes.gateway is not None:
        if routes.gateway.address == endpoint.url:
            return
        raise RuntimeError(
            f"this process reaches its workers through the gateway {routes.gateway.address} already, "
            f"and cannot use {addr} too; monarch.actor.shutdown_context() ends all that is attached"
        )
    hosts = attach_to_workers(private_key=private_key, ca=ca, workers=[endpoint.url], name="gateway")
    hosts.initialized.get()
    routes.set_gateway(Gateway(current_runtime(), routes.attached[hosts.host_ids[0]], endpoint.url))


def _endpoint(text: str, keys: Keys | None) -> ChannelEndpoint:
    endpoint = parse_dialled(text)
    if current_runtime().part(HostRoutes).gateway is None or endpoint.scheme == "ipc":
        endpoint = local_name(endpoint, keys)
        check_trust(endpoint, keys)
    return endpoint  # else the gateway, which dials it with its own key, checks


def _attach(
    runtime: Runtime, workers: "Sequence[ChannelEndpoint | Future[str]]", keys: Keys | None,
    given_up: Callable[[], bool],
) -> tuple[str, ...]:  # fmt: skip
    deadline = time.monotonic() + settings.mesh_attach_config_timeout
    errors: dict[str, Exception] = {}

    def resolve(index: int, worker: "ChannelEndpoint | Future[str]") -> ChannelEndpoint | None:
        if isinstance(worker, ChannelEndpoint):
            return worker
        try:
            return _endpoint(worker.get(max(0.0, deadline - time.monotonic())), keys)
        except Exception as error:
            error.add_note(f"it is the address of worker {index}")
            errors[f"worker {index}"] = error
            return None

    endpoints = [resolve(index, worker) for index, worker in enumerate(workers)]
    hosts: dict[str, str] = {}
    urls = [endpoint.url for endpoint in endpoints if endpoint is not None and endpoint.scheme == "tcp"]
    jobs: list[Callable[[], dict[str, str]]] = [
        partial(_connect_path, runtime, endpoint, deadline, given_up)
        for endpoint in endpoints
        if endpoint is not None and endpoint.scheme == "ipc"
    ]
    if urls:
        jobs.append(partial(_dial, urls, keys, deadline, given_up))
    for answer in [run_in_thread(job) for job in jobs]:
        try:
            hosts.update(answer.get())
        except AttachError as error:
            errors.update(error.errors)
    if errors:
        raise AttachError(errors, len(workers))
    runtime.part(HostRoutes).settle(hosts.values(), max(1.0, deadline - time.monotonic()))
    return tuple(hosts[endpoint.url] for endpoint in endpoints if endpoint is not None)


def _connect_path(
    runtime: Runtime, endpoint: ChannelEndpoint, deadline: float, given_up: Callable[[], bool]
) -> dict[str, str]:
    gateway = runtime.part(HostRoutes).gateway
    if gateway is not None and gateway.address == endpoint.url and not gateway.remote.lost:
        return {endpoint.url: gateway.remote.host}  # connected already, even if that path is gone
    try:
        local = connect_local_host(runtime, endpoint.path, deadline, given_up)
        if runtime.part(HostRoutes).attached.get(local.host) is not local:
            refusal = objection(endpoint.url, local.state, ())
            if refusal is not None:
                raise refusal
            runtime.part(HostRoutes).attached[local.host] = local
            local.join().get(max(1.0, deadline - time.monotonic()))
    except Exception as error:
        raise AttachError({endpoint.url: error}, 1) from error
    return {endpoint.url: local.host}


def _dial(endpoints: list[str], keys: Keys | None, deadline: float, given_up: Callable[[], bool]) -> dict[str, str]:
    wait = max(1.0, deadline - time.monotonic())
    hosts = reach_hosts(endpoints, keys, keys is None, None, wait, given_up)
    return dict(zip(endpoints, hosts, strict=True))


def run_in_thread(function: Callable[[], T], name: str = "monarch-attach") -> Future[T]:
    """Runs a function on a daemon thread; returns a future of its result.

    Threads of a pool would keep the program from ending.
    """
    future: Future[T] = pending_future()

    def run() -> None:
        try:
            resolve_future(future, function())
        except BaseException as error:
            fail_future(future, error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
