"""Host meshes of a running job, by name."""

from collections.abc import Mapping
from typing import Any

from monarch_nb.mesh import HostMesh
from monarch_nb.wire import counted


class JobState:
    """The host meshes of a job, as attributes. Attributes of telemetry and admin servers, which do not exist here, are
    None: a program's own job class may set them.
    """

    def __init__(
        self,
        hosts: Mapping[str, HostMesh],
        query_engine: Any = None,
        query_engine_client: Any = None,
        telemetry_url: str | None = None,
        dashboard_url: str | None = None,
        admin_url: str | None = None,
    ) -> None:
        self._hosts = dict(hosts)
        self.query_engine = query_engine
        self.query_engine_client = query_engine_client
        self.telemetry_url = telemetry_url
        self.dashboard_url = dashboard_url
        self.admin_url = admin_url

    def __getattr__(self, name: str) -> HostMesh:
        hosts: dict[str, HostMesh] = self.__dict__.get("_hosts", {})
        if name in hosts:
            return hosts[name]
        raise AttributeError(f"{name!r} is not a host mesh of this job. It has: {', '.join(sorted(hosts)) or 'none'}")

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._hosts})

    def __repr__(self) -> str:
        return f"JobState({', '.join(_mesh_text(name, mesh) for name, mesh in self._hosts.items())})"


def _mesh_text(name: str, mesh: HostMesh) -> str:
    spares = len(mesh.spares)
    return f"{name}={counted(len(mesh), 'host')}" + (f" and {counted(spares, 'spare')}" if spares else "")
