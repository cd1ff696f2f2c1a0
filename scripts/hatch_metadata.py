"""The long description of the package: README.md, whose links and images lead to the repository from anywhere."""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

PAGE, PICTURE = re.compile(r"\]\((?!https?:|#)([^)]+)\)"), re.compile(r'(src|srcset)="(?!https?:)([^"]+)"')


class LongDescription(MetadataHookInterface):
    """On a package index there is no file beside the README."""

    def update(self, metadata: dict[str, Any]) -> None:
        home = metadata["urls"]["Homepage"]
        raw = home.replace("github.com", "raw.githubusercontent.com")
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        text = PAGE.sub(rf"]({home}/blob/main/\1)", text)
        text = PICTURE.sub(rf'\1="{raw}/main/\2"', text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
