"""Ways that a job has opened from this machine to its hosts, written down for another process to open."""

from dataclasses import replace

import msgspec

from monarch_nb.connect.routes import HostRoutes, Tunnel
from monarch_nb.job.adapter import Running
from monarch_nb.runtime import current_runtime


class TunnelRecord(msgspec.Struct, frozen=True):
    """The way to one host of a job."""

    job: Running
    name: str  # of the host
    joins: tuple[str, ...]  # where it is met from near it


def opened_here(endpoint: str, job: Running, name: str, joins: tuple[str, ...], tunnel: Tunnel) -> None:
    """An endpoint of this machine leads to a host: others cannot dial it, but can open such a way themselves."""
    written = msgspec.json.encode(TunnelRecord(job, name, joins)).decode()
    current_runtime().part(HostRoutes).tunnels[endpoint] = replace(tunnel, written=written)
