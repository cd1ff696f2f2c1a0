"""Options of parts that this version does not have; they can be made, not used."""

from dataclasses import dataclass


@dataclass
class TelemetryConfig:
    """What `enable_telemetry` will take."""

    retention_secs: int = 3600
    include_dashboard: bool = False
    dashboard_port: int = 8265
    snapshot_interval_secs: float = 30.0


@dataclass
class MeshAdminConfig:
    """What `enable_admin` will take."""

    admin_addr: str | None = None
