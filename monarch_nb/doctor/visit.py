"""Visits to hosts: a process is started on each, and says how things are there."""

import time
from collections.abc import Mapping, Sequence
from os import PathLike

from monarch_nb.connect import AttachError, attach_hosts
from monarch_nb.connect.routes import Routes
from monarch_nb.doctor.facts import Facts, facts_of_this_machine
from monarch_nb.doctor.finding import Finding
from monarch_nb.doctor.judgement import judge
from monarch_nb.doctor.legs import legs, shut
from monarch_nb.mesh import HostMesh, this_host
from monarch_nb.runtime import runtime
from monarch_nb.transport import TransportError

_SECONDS = 30.0
_LOST = "Start its host agent again (monarch-nb agent), then heal the meshes that were there: %heal NAME"
_ADVICE = "Where the reason is not clear, look into agent.log in the run folder of that host."


def visit(hosts: Mapping[str, HostMesh], timeout: float = _SECONDS) -> dict[str, list[Finding]]:
    """Looks at each of these hosts, given by name as a mesh of one. Blocks up to `timeout` seconds."""
    controller = facts_of_this_machine()
    begun = time.monotonic()
    started = {name: (host.spawn_procs(name="doctor"), time.monotonic()) for name, host in hosts.items()}
    findings: dict[str, list[Finding]] = {}
    for name, (procs, at) in started.items():
        try:
            facts: Facts = procs.run(facts_of_this_machine).get(max(0.1, begun + timeout - time.monotonic())).item()
            took = f"started and answered within {time.monotonic() - at:.1f} s"
            findings[name] = [Finding("a process", "ok", took), *judge(facts, controller)]
        except Exception as error:
            findings[name] = [Finding("a process", "error", f"did not start: {error}", _ADVICE)]
        finally:
            procs.stop("the doctor is done")
    return findings


def visit_known(timeout: float = _SECONDS) -> dict[str, list[Finding]]:
    """Looks at this machine and at all hosts that are attached."""
    hosts, first = {"this machine": this_host()}, {}
    for host, remote in tuple(runtime().part(Routes).attached.items()):
        name = remote.endpoint or host
        if remote.lost:
            first[name] = [Finding("connection", "error", f"the host is lost: {remote.lost}", _LOST)]
        else:
            hosts[name] = HostMesh.of_host(host)
            first[name] = [] if remote.near else [_key(getattr(remote, "keys", None) is not None)]
    findings = visit(hosts, timeout)
    return {name: [*first.get(name, ()), *findings.get(name, ())] for name in (*hosts, *first)}


def visit_endpoints(
    endpoints: Sequence[str], key: "str | PathLike[str] | None", timeout: float = 10.0
) -> dict[str, list[Finding]]:
    """Tries each leg of the way to hosts whose agents listen at these addresses, and looks at those that are reached.

    A refused connection is tried once: what starts just now is told as shut.
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
                findings[endpoint].append(Finding("connection", "error", str(error)))
    for name, more in visit(hosts).items():
        findings[name] += more
    return findings


def _key(there: bool) -> Finding:
    if there:
        return Finding("key", "ok", "both sides have it; messages are encrypted")
    return Finding("key", "ok", "none; it is not needed for connections inside a machine")
