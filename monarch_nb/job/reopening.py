"""Jobs of another process, reopened in this one: tunnels to their hosts, and hosts for meshes that came from there."""

import os
from pathlib import Path

import msgspec
from msgspec import Struct

from monarch_nb.job.adapter import EngineError
from monarch_nb.job.adapter_job import AdapterJob, WrittenHosts, jobs_here
from monarch_nb.job.elastic import JobHosts
from monarch_nb.job.kinds import adapter_of
from monarch_nb.job.record import JobFileError, TunnelRecord
from monarch_nb.job.trait import job_from, load_file
from monarch_nb.lifecycle.elastic import source_of_mesh
from monarch_nb.mesh.host_record import NoMoreHostsError
from monarch_nb.transport import knock
from monarch_nb.wire import json_decoder, kind_of

_KNOCK_S = 1.0
_COME_S = 5.0  # for hosts without a mesh to be attached


def opened(written: str) -> str:
    """Opens a recorded tunnel, and returns its endpoint on this machine; blocks. It lives as long as this process.

    Raises EngineError with the scheduler's message.
    """
    try:
        tunnel = json_decoder(TunnelRecord).decode(written)
        adapter = adapter_of(tunnel.job.kind)
    except (msgspec.MsgspecError, LookupError) as error:
        raise EngineError(f"there is no way to it that this version knows: {error}") from None
    adapter.hold(tunnel.job, True)
    joins = adapter.join(tunnel.job, tunnel.name, tunnel.joins)
    address = next((join for join in joins if knock(join, _KNOCK_S)), "")
    if not address:
        raise EngineError(f"{tunnel.name} of the {tunnel.job.kind} job {tunnel.job.job[:8]} does not answer")
    return address


def hosts_again(written: str) -> JobHosts:
    """Returns the source of a mesh's hosts from another process's record. Blocks while its hosts are looked for.

    Raises NoMoreHostsError if the job cannot be loaded here.
    """
    try:
        record = json_decoder(WrittenHosts).decode(written)
        job = job_from(record.job.encode(), "the record of the mesh", load=True)
        if not isinstance(job, AdapterJob):
            raise JobFileError(f"{kind_of(job)} gives no hosts")
        for local in jobs_here(job.apply_id):
            return local.source(record.mesh)
        job.taken_up()
    except (msgspec.MsgspecError, EngineError, JobFileError, LookupError) as error:
        raise NoMoreHostsError(f"the job that gave the mesh its hosts cannot be asked: {error}") from None
    job._applied.path = record.path if record.path is not None and _is_at(record.path, job) else None
    hosts = job.source(record.mesh)
    for arrival in job.arrivals:
        arrival.wait(_COME_S)
    return hosts


def job_of(mesh: object) -> AdapterJob:
    """Returns the job of a mesh's hosts, also of an attached mesh. Blocks for some seconds at first.

    Raises LookupError for a mesh whose hosts belong to no job, NoMoreHostsError if the job cannot be loaded here.
    """
    source = source_of_mesh(mesh)
    if not isinstance(source, JobHosts) or not isinstance(source.job, AdapterJob):
        raise LookupError(f"the hosts of {mesh!r} are of no job")
    return source.job


def _is_at(path: str, job: AdapterJob) -> bool:
    """Returns whether a file still holds this job."""
    try:
        return os.path.exists(path) and load_file(path).apply_id == job.apply_id
    except (OSError, JobFileError):
        return False


class HostOfJob(Struct, frozen=True):
    """One host according to its scheduler."""

    name: str
    runs: bool
    description: str  # of the scheduler
    addresses: tuple[str, ...]  # where this process would reach it; empty while unknown
    key: Path | None  # of the job
    wrong: str = ""  # with the tunnel to it


def hosts_of_job(job: AdapterJob) -> list[HostOfJob]:
    """Returns all hosts of a job. Blocks; opens its tunnels. Raises EngineError if the scheduler cannot be asked."""
    running, hosts = job._job, []
    key = Path(running.folder, "key")
    job._adapter.hold(running, True)
    for name, state in job._adapter.look(running).items():
        joins: tuple[str, ...] = ()
        problem = ""
        if state.state == "running" and state.joins:
            try:
                joins = tuple(job._adapter.join(running, name, state.joins))
            except EngineError as error:
                problem = str(error)
        hosts.append(
            HostOfJob(name, state.state == "running", state.description, joins, key if key.exists() else None, problem)
        )
    return hosts
