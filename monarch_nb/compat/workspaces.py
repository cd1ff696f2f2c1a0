"""Folders and environments that a job uses: `monarch.tools.config`, as far as no cluster is needed."""

import os
import shutil
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NOT_SET = "__NOT_SET__"


def MONARCH_HOME(*subfolders: str) -> Path:  # noqa: N802 - its name there
    """Returns a folder for this user's own files, created if necessary: `~/.monarch`, or the value of MONARCH_HOME."""
    folder = Path(os.environ.get("MONARCH_HOME") or Path.home() / ".monarch").joinpath(*subfolders)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


class conda:  # noqa: N801 - its name there
    """The active Conda environment."""

    @staticmethod
    def active_env_dir() -> str | None:
        """Returns its folder; None without an active environment."""
        return os.environ.get("CONDA_PREFIX")

    @staticmethod
    def active_env_name() -> str | None:
        """Returns the name of its folder; None without an active environment."""
        folder = conda.active_env_dir()
        return os.path.basename(folder) if folder else None


class Environment:
    """The packages that a workspace needs."""


class CondaEnvironment(Environment):
    """A Conda environment: that of `conda_prefix`, or the active one at the time of use."""

    def __init__(self, conda_prefix: str | None = None) -> None:
        self._conda_prefix = conda_prefix

    @property
    def conda_prefix(self) -> str:
        """Its folder. Raises AssertionError when none was named and none is active."""
        prefix = self._conda_prefix or conda.active_env_dir()
        if not prefix:
            raise AssertionError("no Conda environment is active: activate one, or name it with conda_prefix=")
        return prefix

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CondaEnvironment) and self._conda_prefix == other._conda_prefix

    def __hash__(self) -> int:
        return hash((CondaEnvironment, self._conda_prefix))


ACTIVE_CONDA_ENV = CondaEnvironment()


class Workspace:
    """Folders with code, which `HostMesh.sync_workspace` copies to hosts.

    `dirs` lists folders, or maps each to its place inside the workspace ("" is the workspace itself).
    """

    def __init__(
        self,
        dirs: Sequence[str | Path] | Mapping[str | Path, str] | None = None,
        env: Environment | None = ACTIVE_CONDA_ENV,
    ) -> None:
        if isinstance(dirs, str | Path):
            raise TypeError(f"Workspace wants a list of folders: write dirs=[{str(dirs)!r}]")
        named = dirs if isinstance(dirs, Mapping) else dict.fromkeys(dirs or ())
        if not all(str(folder) for folder in named):
            raise AssertionError("an empty name would mean the current folder: write '.'")
        self.env = env
        self.dirs = {Path(folder): Path(folder).name if to is None else to for folder, to in named.items()}

    @classmethod
    def null(cls) -> "Workspace":
        """Returns a workspace without folders and environment."""
        return cls(env=None)

    def merge(self, outdir: str | Path) -> None:
        """Copies the folders to their places inside `outdir`, which is created if necessary."""
        target = Path(outdir)
        target.mkdir(parents=True, exist_ok=True)
        for folder, to in self.dirs.items():
            shutil.copytree(folder, target / to, dirs_exist_ok=True)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Workspace) and (self.env, self.dirs) == (other.env, other.dirs)

    def __repr__(self) -> str:
        return f"Workspace({ {str(folder): to for folder, to in self.dirs.items()} })"


@dataclass
class Config:
    """Settings for a job's scheduler. Nothing here schedules; programs create them and pass them on."""

    scheduler: str = NOT_SET
    scheduler_args: dict[str, Any] = field(default_factory=dict)
    workspace: Workspace = field(default_factory=Workspace.null)
    dryrun: bool = False
    appdef: Any = None

    def __post_init__(self) -> None:
        workspace: Any = self.workspace
        if workspace is None or workspace == "":
            warnings.warn("workspace=None: write Workspace.null()", FutureWarning, stacklevel=3)
            self.workspace = Workspace.null()
        elif isinstance(workspace, str):
            warnings.warn(f"workspace={workspace!r}: write Workspace(dirs=[...])", FutureWarning, stacklevel=3)
            self.workspace = Workspace(dirs={workspace: ""})


__all__ = [
    "ACTIVE_CONDA_ENV",
    "MONARCH_HOME",
    "NOT_SET",
    "CondaEnvironment",
    "Config",
    "Environment",
    "Workspace",
    "conda",
]
