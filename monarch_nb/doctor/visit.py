"""Visits to hosts: a process is started on each, and says how things are there."""

import time
from collections.abc import Mapping, Sequence
from os import PathLike

from monarch_nb.doctor.facts import Facts, facts_of_this_machine
from monarch_nb.doctor.finding import Finding
from monarch_nb.doctor.judgement import judge
from monarch_nb.mesh import AttachError, HostMesh, attach_hosts, this_host, ways
from monarch_nb.transport import TrustError

_SECONDS = 30.0
_LOST = "Start its host agent again (monarch-nb agent), then heal the meshes that were there: %heal NAME"
_ADVICE = "Where the reason is not clear, look into agent.log in the run folder of that host."


def visit(hosts: Mapping[str, HostMesh], timeout: float = _SECONDS) -> dict[str, list[Finding]]:
    """Looks at each of these hosts, given by name as a mesh of one. Blocks up to `timeout` seconds."""
    controller = facts_of_this_machine()
    begun = time.monotonic()
    started = {name: (host.spawn_procs(name="doctor"), time.monotonic()) for name, host in hosts.items()}
    found: dict[str, list[Finding]] = {}
    for name, (procs, at) in started.items():
        try:
            facts: Facts = procs.run(facts_of_this_machine).get(max(0.1, begun + timeout - time.monotonic())).item()
            took = f"started and answered within {time.monotonic() - at:.1f} s"
            found[name] = [Finding("a process", "ok", took), *judge(facts, controller)]
        except Exception as error:
            found[name] = [Finding("a process", "error", f"did not start: {error}", _ADVICE)]
        finally:
            procs.stop("the doctor is done")
    return found


def visit_known(timeout: float = _SECONDS) -> dict[str, list[Finding]]:
    """Looks at this machine and at all hosts that are attached."""
    hosts, lost = {"this machine": this_host()}, {}
    for host, remote in tuple(ways.remotes.items()):
        name = remote.endpoint or host
        if remote.lost:
            lost[name] = [Finding("connection", "error", f"the host is lost: {remote.lost}", _LOST)]
        else:
            hosts[name] = HostMesh.of_host(host)
    return {**visit(hosts, timeout), **lost}


def visit_endpoints(
    endpoints: Sequence[str], key: "str | PathLike[str] | None", timeout: float = 10.0
) -> dict[str, list[Finding]]:
    """Attaches hosts whose agents listen at these addresses, and looks at each."""
    hosts, found = {}, {}
    for endpoint in endpoints:
        try:
            hosts[endpoint] = attach_hosts([endpoint], key=key, timeout=timeout).slice(hosts=0)
            found[endpoint] = [Finding("connection", "ok", "the host agent has answered")]
        except TrustError as error:
            found[endpoint] = [Finding("key", "error", str(error))]
        except (AttachError, ValueError, OSError) as error:
            found[endpoint] = [Finding("connection", "error", str(error), _reach(endpoint))]
    for name, findings in visit(hosts).items():
        found[name] += findings
    return found


def _reach(endpoint: str) -> str:
    place = endpoint.rpartition("/")[2]
    command = f"monarch-nb agent --tcp tcp://0.0.0.0:{place.rpartition(':')[2]} --key job.key --keep"
    return f"Run `{command}` there, with this same key file, and let its firewall pass {place}."
