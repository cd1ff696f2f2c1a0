"""The hooks that MkDocs calls while it builds the site."""

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "kernel_ext")]

from mkdocs.structure.files import File, Files  # noqa: E402

from scripts.site import links, order, reference, stories  # noqa: E402


def on_config(config: Any) -> Any:
    config.nav = order.nav()
    return config


def on_files(files: Files, config: Any) -> Files:
    texts = {
        "index.md": (ROOT / "README.md").read_text(encoding="utf-8"),
        "changelog.md": (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"),
        **{stories.page_of(name): stories.text(name) for name in stories.stories()},
        **reference.pages(),
    }
    for page, text in texts.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    file = page.file.src_uri
    return markdown if file.startswith("reference/") else links.adapted(file, markdown)


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    folder, _, name = page.file.src_uri.rpartition("/")
    return stories.with_pictures(name.removesuffix(".md"), html) if folder == "stories" else html
