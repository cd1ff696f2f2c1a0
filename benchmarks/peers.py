"""The systems that we are measured against, each in an environment of its own, made on first use."""

import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "peers"


REQUIREMENTS = {
    "torchmonarch": ("torchmonarch==0.7.0", "torch==2.14.1", "numpy"),  # its tensors need the torch it was built with
    "ray": ("ray>=2.40,<3", "numpy"),
    "dask": ("dask", "distributed>=2026.8", "numpy"),
    "ipyparallel": ("ipyparallel>=9,<10", "numpy"),
    "jupyter-distributed": ("jupyter-distributed==0.1.1", "torch", "numpy"),
}


# The programs of `make bench`: ours, and theirs that is measured beside it.
PEERS = {
    "torchmonarch": {
        "program_actors.py": "program_actors.py",
        "program_scale.py": "program_scale.py",
        "program_data.py": "program_data.py",
        "program_tensors.py": "program_tensors_peer.py",
        "program_ranks.py": "program_ranks.py",
    },
    "ray": {"program_actors.py": "program_ray.py"},
}


def interpreter(name: str) -> str:
    """The Python of a peer's environment; it is made, or mended, first. Raises CalledProcessError."""
    requirements = REQUIREMENTS[name]
    folder = FOLDER / name
    python = folder / "bin" / "python"
    stamp = folder / ".requirements"
    text = "\n".join(requirements)
    if python.exists() and stamp.exists() and stamp.read_text() == text:
        return str(python)
    print(f"making {folder} with {', '.join(requirements)}", file=sys.stderr, flush=True)
    venv.create(folder, with_pip=True, clear=True)
    own = any(line.startswith("torch==") for line in requirements)  # the version of ours would rule it out
    constraints = () if own else ("--constraint", str(ROOT / "constraints.txt"))
    pip = (str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    subprocess.run([*pip, *constraints, *requirements], check=True)
    stamp.write_text(text)
    return str(python)
