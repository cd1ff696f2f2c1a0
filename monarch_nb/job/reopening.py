"""Jobs of another process, had again in this one: ways to their hosts, and hosts for meshes that came from there."""

import os
from typing import Any

import msgspec

from monarch_nb.job.adapted import AdapterJob, WrittenHosts, jobs_here
from monarch_nb.job.adapter import EngineError
from monarch_nb.job.elastic import JobHosts
from monarch_nb.job.kinds import adapter_of
from monarch_nb.job.record import JobFileError
from monarch_nb.job.trait import job_from, load_file
from monarch_nb.job.tunnels import TunnelRecord
from monarch_nb.lifecycle.elastic import source_of_mesh
from monarch_nb.mesh.host_record import NoMoreHostsError
from monarch_nb.transport import knock
from monarch_nb.wire import json_decoder, kind_of

_KNOCK_S = 1.0
_COME_S = 5.0  # for hosts that no mesh is on to be attached


def opened(written: str) -> str:
    """Opens such a way, and gives the endpoint of this machine; blocks. It stays for as long as this process.

    Raises EngineError, in the words of the engine.
    """
    try:
        tunnel = json_decoder(TunnelRecord).decode(written)
        adapter = adapter_of(tunnel.job.kind)
    except (msgspec.MsgspecError, LookupError) as error:
        raise EngineError(f"there is no way to it that this version knows: {error}") from None
    adapter.hold(tunnel.job, True)
    ways = adapter.join(tunnel.job, tunnel.name, tunnel.joins)
    way = next((each for each in ways if knock(each, _KNOCK_S)), "")
    if not way:
        raise EngineError(f"{tunnel.name} of the {tunnel.job.kind} job {tunnel.job.job[:8]} does not answer")
    return way


def hosts_again(written: str) -> JobHosts:
    """What gives a mesh its hosts, of what another process has written down. Blocks while its hosts are looked for.

    Raises NoMoreHostsError where the job is not to be had here.
    """
    try:
        wanted = json_decoder(WrittenHosts).decode(written)
        job = job_from(wanted.job.encode(), "the record of the mesh", load=True)
        if not isinstance(job, AdapterJob):
            raise JobFileError(f"{kind_of(job)} gives no hosts")
        for known in jobs_here(job.apply_id):
            return known.source(wanted.mesh)
        job.taken_up()
    except (msgspec.MsgspecError, EngineError, JobFileError, LookupError) as error:
        raise NoMoreHostsError(f"the job that gave the mesh its hosts cannot be asked: {error}") from None
    job._applied.path = wanted.path if wanted.path is not None and _is_at(wanted.path, job) else None
    hosts = job.source(wanted.mesh)
    for arrival in job.arrivals:
        arrival.wait(_COME_S)
    return hosts


def job_of(mesh: Any) -> AdapterJob:
    """The job that gives the hosts of a mesh, also of one that was attached. Blocks for some seconds at first.

    Raises LookupError for a mesh whose hosts are of no job, NoMoreHostsError where the job is not to be had here.
    """
    source = source_of_mesh(mesh)
    if not isinstance(source, JobHosts) or not isinstance(source.job, AdapterJob):
        raise LookupError(f"the hosts of {mesh!r} are of no job")
    return source.job


def _is_at(path: str, job: AdapterJob) -> bool:
    """Whether a file still holds this job."""
    try:
        return os.path.exists(path) and load_file(path).apply_id == job.apply_id
    except (OSError, JobFileError):
        return False
