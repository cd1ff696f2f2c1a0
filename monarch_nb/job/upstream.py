"""Methods of torchmonarch's jobs that are not about machines: telemetry, an admin server, a profiler, mounts.

Programs call these, so they exist: mounts are copies, harmless ones are accepted with one notice, the others raise.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, Self

from monarch_nb._package import refuse
from monarch_nb.job.mounts import WantedMount, say_once

logger = logging.getLogger("monarch_nb.job")


@dataclass
class TelemetryConfig:
    """What `enable_telemetry` takes."""

    retention_secs: int = 3600
    include_dashboard: bool = False
    dashboard_port: int = 8265
    snapshot_interval_secs: float = 30.0


@dataclass
class MeshAdminConfig:
    """What `enable_admin` takes."""

    admin_addr: str | None = None


class UpstreamServices:
    """These methods, for all jobs."""

    _wanted_mounts: tuple[WantedMount, ...] = ()

    def enable_telemetry(self, config: Any = None, *, mesh_admin_config: Any = None, **kwargs: Any) -> Self:
        """Accepted, and gives the job. Says once that nothing is recorded, and what there is instead.

        Raises TypeError for an option that `TelemetryConfig` does not have.
        """
        if config is None:
            TelemetryConfig(**kwargs)
        say_once(
            logger,
            "enable_telemetry: accepted; there is no telemetry server here, so telemetry_url and dashboard_url stay "
            "None. Spans and measurements go to OpenTelemetry where the program sets that up; %meshes, %failures and "
            "mesh.logs() describe the meshes",
        )
        return self

    def enable_admin(self, config: Any = None, **kwargs: Any) -> Self:
        """Accepted, and gives the job. Says once that no server is started, and what there is instead.

        Raises TypeError for an option that `MeshAdminConfig` does not have.
        """
        if config is None:
            MeshAdminConfig(**kwargs)
        say_once(
            logger,
            "enable_admin: accepted; there is no admin server here, so admin_url stays None. In a notebook, %meshes "
            "and the side panel show what the server would",
        )
        return self

    def telemetry_query_client(self) -> NoReturn:
        """Raises NotImplementedError: there is no telemetry to query."""
        refuse("telemetry_query_client", "telemetry by SQL")

    def profile(self, *, on_trace_ready: Callable[[Any], object] | None = None) -> NoReturn:
        """Raises NotImplementedError: there is no such profiler."""
        refuse("profile", "the profiler of distributed telemetry")

    def remote_mount(
        self,
        source: str,
        mntpoint: str | None = None,
        meshes: list[str] | None = None,
        python_exe: str | None = ".venv/bin/python",
        **_tuning: object,
    ) -> None:
        """Has `state()` bring a folder of this machine to the hosts of `meshes`, None for all; again, what has changed.

        It comes to `mntpoint`, by default the same path. Their processes run `python_exe`, a path in the folder; None
        leaves that as it is. Further arguments, which tune torchmonarch's file system, have no effect.
        Raises ValueError for a Python that is not there.
        """
        self._wanted_mounts = (*self._wanted_mounts, WantedMount.to_hosts(source, mntpoint, meshes, python_exe))

    def gather_mount(self, remote_mount_point: str, local_mount_point: str, meshes: list[str] | None = None) -> None:
        """Has `state()` gather a folder of the hosts of `meshes`, None for all, below `local_mount_point` here.

        Of several meshes each gets a folder with its name. `kill()` removes the copies.
        """
        mount = WantedMount.to_here(remote_mount_point, local_mount_point, meshes)
        self._wanted_mounts = (*self._wanted_mounts, mount)
