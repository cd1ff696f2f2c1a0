"""Checks of hosts, each by a process started there."""

import os
import socket
import time
from collections.abc import Mapping, Sequence
from os import PathLike

from monarch_nb.connect import AttachError, attach_hosts
from monarch_nb.connect.hosts import objection, read_key
from monarch_nb.connect.routes import HostRoutes
from monarch_nb.doctor.facts import facts_of_this_machine
from monarch_nb.doctor.judgement import Check, judge
from monarch_nb.host.introduction import introduce
from monarch_nb.host.protocol import HostState
from monarch_nb.mesh import HostMesh, spawn_helpers, this_host
from monarch_nb.runtime import current_runtime
from monarch_nb.transport import Keys, TransportError, TrustError, UnreachableError, greet, knock, split

_SECONDS = 30.0
_LOST = "Start its host agent again (monarch-nb agent), then heal the meshes that were there: %heal NAME"
_ADVICE = "Where the reason is not clear, look into agent.log in the run folder of that host."
_NAME = "Check the name, or use the machine's IP address; names of a cluster are often known only inside of it."
_REFUSED = "The machine is there: start an agent on it (monarch-nb agent --tcp tcp://0.0.0.0:PORT --key FILE --keep)."
_SILENT = "No such machine, or a firewall drops what comes to this port: open it, or go through a gateway or a tunnel."
_OTHER = "Another program has this port: stop it, or start the agent at another one."
_KEY = "Both sides must have the same file, of mode 0600: copy that of the agent, or start the agent with yours."


def visit(hosts: Mapping[str, HostMesh], timeout: float = _SECONDS) -> dict[str, list[Check]]:
    """Checks hosts, given by name as meshes of one. Blocks up to `timeout` seconds."""
    controller = facts_of_this_machine()
    begun = time.monotonic()
    started = {name: (spawn_helpers(host, "doctor"), time.monotonic()) for name, host in hosts.items()}
    findings: dict[str, list[Check]] = {}
    for name, (procs, since) in started.items():
        try:
            facts = procs.run(facts_of_this_machine).get(max(0.1, begun + timeout - time.monotonic())).item()
            detail = f"started and answered within {time.monotonic() - since:.1f} s"
            findings[name] = [Check("a process", "ok", detail), *judge(facts, controller)]
        except Exception as error:
            findings[name] = [Check("a process", "error", f"did not start: {error}", _ADVICE)]
        finally:
            procs.stop("the doctor is done")
    return findings


def visit_known(timeout: float = _SECONDS) -> dict[str, list[Check]]:
    """Checks this machine and all attached hosts."""
    hosts, checks = {"this machine": this_host()}, {}
    for host, remote in tuple(current_runtime().part(HostRoutes).attached.items()):
        name = remote.endpoint or host
        if remote.lost:
            checks[name] = [Check("connection", "error", f"the host is lost: {remote.lost}", _LOST)]
        else:
            hosts[name] = HostMesh.of_host(host)
            checks[name] = [] if remote.is_local else [_key(getattr(remote, "keys", None) is not None)]
    findings = visit(hosts, timeout)
    return {name: [*checks.get(name, ()), *findings.get(name, ())] for name in (*hosts, *checks)}


def visit_endpoints(
    endpoints: Sequence[str], key: "str | PathLike[str] | None", timeout: float = 10.0
) -> dict[str, list[Check]]:
    """Checks each leg of the connections to agents at these addresses, and the hosts that are reached.

    A refused connection is tried once: a host that is just starting is reported as shut.
    """
    hosts, findings = {}, {}
    for endpoint in endpoints:
        findings[endpoint] = legs(endpoint, key, timeout)
        if not shut(findings[endpoint]):
            try:
                hosts[endpoint] = attach_hosts(
                    [endpoint], key=key, insecure_loopback=key is None, timeout=timeout
                ).slice(hosts=0)
            except (AttachError, TransportError, ValueError) as error:
                findings[endpoint].append(Check("connection", "error", str(error)))
    for name, checks in visit(hosts).items():
        findings[name] += checks
    return findings


def _key(encrypted: bool) -> Check:
    if encrypted:
        return Check("key", "ok", "both sides have it; messages are encrypted")
    return Check("key", "ok", "none; it is not needed for connections inside a machine")


def legs(endpoint: str, key: "Keys | str | os.PathLike[str] | None", timeout: float) -> list[Check]:
    """Checks each leg of a connection, up to the first that fails. Blocks up to `timeout` seconds for each."""
    if endpoint.startswith("ipc://"):
        return [_socket(endpoint.removeprefix("ipc://"))]
    try:
        host, port = split(endpoint)
        keys = read_key(key)
    except ValueError as error:
        return [Check("address", "error", str(error))]
    except (TrustError, OSError) as error:
        return [Check("key", "error", str(error), _KEY)]
    checks = [_name(host, port)]
    if checks[-1].level == "ok":
        checks.append(_port(endpoint, port, timeout))
    if checks[-1].level == "ok":
        checks.append(_agent(endpoint, timeout))
    if checks[-1].level == "ok":
        checks += _key_and_versions(endpoint, keys, timeout)
    return checks


def shut(checks: list[Check]) -> bool:
    """Returns whether any check has failed."""
    return any(check.level == "error" for check in checks)


def _socket(path: str) -> Check:
    if os.path.exists(path):
        return Check("socket", "ok", f"{path} is there")
    return Check("socket", "error", f"{path} is not there: the worker has ended", "Start the job anew.")


def _name(host: str, port: int) -> Check:
    try:
        entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        return Check("name", "error", f"{host!r} is not known here: {error.strerror or error}", _NAME)
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in entries))
    return Check("name", "ok", host if addresses == [host] else f"{host} is {', '.join(addresses)}")


def _port(endpoint: str, port: int, timeout: float) -> Check:
    reply = knock(endpoint, timeout)
    if reply:
        return Check("port", "ok", f"{port} is open")
    if reply is False:
        return Check("port", "error", f"nobody listens at {endpoint}: the connection is refused", _REFUSED)
    return Check("port", "error", f"there is no answer from {endpoint} within {timeout:g} s", _SILENT)


def _agent(endpoint: str, timeout: float) -> Check:
    try:
        greet(endpoint, timeout)
    except UnreachableError as error:
        return Check("agent", "error", str(error), _OTHER)
    return Check("agent", "ok", "a ZeroMQ socket answers")


def _key_and_versions(endpoint: str, keys: Keys | None, timeout: float) -> list[Check]:
    try:
        [answer] = introduce([endpoint], keys, insecure_loopback=keys is None, timeout=timeout)
    except TransportError as error:
        return [Check("key", "error", str(error), _KEY)]
    if not isinstance(answer, HostState):
        about = "key" if isinstance(answer, TrustError) else "agent"
        return [Check(about, "error", str(answer), _KEY if about == "key" else "")]
    words = "both sides have it; messages are encrypted" if keys is not None else "none; this machine alone needs none"
    key = Check("key", "ok", words)
    problem = objection(endpoint, answer, ())
    if problem is not None:
        return [key, Check("versions", "error", str(problem))]
    return [key, Check("versions", "ok", f"host {answer.host}: Python {answer.python}, monarch-nb {answer.version}")]
