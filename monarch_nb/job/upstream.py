"""Methods of torchmonarch's jobs that do not concern machines: telemetry, an admin server, a profiler, mounts.

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
    """Options of `enable_telemetry`."""

    retention_secs: int = 3600
    include_dashboard: bool = False
    dashboard_port: int = 8265
    snapshot_interval_secs: float = 30.0


@dataclass
class MeshAdminConfig:
    """Options of `enable_admin`."""

    admin_addr: str | None = None


class UpstreamServices:
    """These methods, for all jobs."""

    _wanted_mounts: tuple[WantedMount, ...] = ()

    def enable_telemetry(self, config: Any = None, *, mesh_admin_config: Any = None, **kwargs: Any) -> Self:
        """Accepted; returns the job. Logs once that nothing is recorded, and what exists instead.

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
        """Accepted; returns the job. Logs once that no server is started, and what exists instead.

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
        """Makes `state()` copy a folder of this machine to the hosts of `meshes`, None for all; again, its changes.

        It is copied to `mntpoint`, by default the same path. Their processes run `python_exe`, a path in the folder;
        None: the default interpreter. Further arguments, which tune torchmonarch's file system, have no effect. Raises
        ValueError if the Python does not exist.
        """
        self._wanted_mounts = (*self._wanted_mounts, WantedMount.to_hosts(source, mntpoint, meshes, python_exe))

    def gather_mount(self, remote_mount_point: str, local_mount_point: str, meshes: list[str] | None = None) -> None:
        """Makes `state()` gather a folder of the hosts of `meshes`, None for all, below `local_mount_point` here.

        Each of several meshes gets a folder with its name. `kill()` removes the copies.
        """
        mount = WantedMount.to_here(remote_mount_point, local_mount_point, meshes)
        self._wanted_mounts = (*self._wanted_mounts, mount)
