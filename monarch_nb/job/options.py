"""Options of services that torchmonarch starts for a job. They are accepted; there are no such services here."""

from dataclasses import dataclass


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
