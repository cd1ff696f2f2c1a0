"""python -m scripts.site.versions FOLDER: the versions of the site that are in a folder, for the switch in its heading.

Each is in a folder of its own, `0.1`, `0.2`…: `make docs` builds that of this tree and leaves the others as they are.
The switch reads versions.json beside them; index.html leads to the newest. A folder like that is served as it is.
"""

import json
import re
import sys
from pathlib import Path

from monarch_nb import __version__

_FOLDER = re.compile(r"\d+\.\d+")
_LEADS = re.compile(r'url=([^/"]+)/"')
_INDEX = """<!doctype html>
<title>Monarch-NB</title>
<meta http-equiv="refresh" content="0; url={version}/">
<a href="{version}/">Monarch-NB {version}</a>
"""


def this() -> str:
    """The version of this tree, by which its folder is called: patches of a version share one."""
    return ".".join(__version__.split(".")[:2])


def built(folder: Path) -> list[str]:
    """The versions in a folder, the newest first."""
    names = [path.parent.name for path in folder.glob("*/index.html") if _FOLDER.fullmatch(path.parent.name)]
    return sorted(names, key=lambda name: tuple(map(int, name.split("."))), reverse=True)


def write(folder: Path) -> None:
    """Lists them for the switch, and has the folder lead to the newest."""
    names = built(folder)
    listed = [{"version": name, "title": name, "aliases": ["latest"] if name == names[0] else []} for name in names]
    (folder / "versions.json").write_text(json.dumps(listed, indent=1) + "\n", encoding="utf-8")
    (folder / "index.html").write_text(_INDEX.format(version=names[0]), encoding="utf-8")


def wrong(folder: Path) -> list[str]:
    """What the switch cannot use."""
    if not (folder / "versions.json").exists():
        return ["there is no versions.json"]
    versions = built(folder)
    listed = [entry["version"] for entry in json.loads((folder / "versions.json").read_text(encoding="utf-8"))]
    leads = _LEADS.findall((folder / "index.html").read_text(encoding="utf-8"))
    problems = []
    if listed != versions:
        problems.append(f"versions.json lists {', '.join(listed)}, and there are {', '.join(versions)}")
    if leads != versions[:1]:
        problems.append(f"index.html leads to {', '.join(leads) or 'no version'}")
    return problems


if __name__ == "__main__":
    write(Path(sys.argv[1]))
