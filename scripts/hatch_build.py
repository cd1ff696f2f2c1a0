"""Puts the JupyterLab extension into the wheel, if it was built (`make setup` does, with npm)."""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

BUILT = "labextension/built"
SHARED = "share/jupyter/labextensions/monarch-nb-lab"


class PanelHook(BuildHookInterface):
    """A wheel without it lacks only the panel; an editable install is linked by `make setup`."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version != "standard":
            return
        if (Path(self.root) / BUILT / "package.json").exists():
            build_data["shared_data"][BUILT] = SHARED
        else:
            self.app.display_warning(f"no {BUILT}: this wheel has no JupyterLab panel (`make setup` builds it)")
