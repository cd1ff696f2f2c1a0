"""Python environments with the kernels of other front ends, in build/kernels; made on first use.

    .venv/bin/python scripts/kernels.py [NAME ...]

Each holds a kernel of one version and what the library needs; the library itself comes by PYTHONPATH.
"""

import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "kernels"
PATH = os.pathsep.join((str(ROOT), str(ROOT / "kernel_ext")))  # their PYTHONPATH, with the library
LIBRARY = ("pyzmq>=26,<28", "msgspec>=0.19,<1", "cloudpickle>=3.0,<4", "numpy>=1.26")  # numpy for displays

KERNELS = {
    "ipykernel-7.3": ("ipykernel==7.3.0", "anywidget>=0.9,<1", "ipywidgets>=8.1,<9"),
    "ipykernel-7.4": ("ipykernel==7.4.0", "anywidget>=0.9,<1", "ipywidgets>=8.1,<9"),
    # As in JupyterLab 4.3 and older notebooks: no subshells.
    "ipykernel-6.31": ("ipykernel==6.31.0", "anywidget>=0.9,<1", "ipywidgets>=8.1,<9"),
    "ipykernel-6.17": ("ipykernel==6.17.0", "ipython>=8.6,<9", "anywidget>=0.9,<1", "ipywidgets>=8.1,<9"),
    # As in Colab.
    "colab": (
        *("ipykernel==6.17.1", "ipython==7.34.0", "ipywidgets==7.7.1", "jupyter_client==7.4.9", "traitlets==5.7.1"),
        *("pyzmq==26.2.1", "tornado==6.5.1", "anywidget==0.9.21", "setuptools<81"),
    ),
    # No widgets at all.
    "plain": ("ipykernel==7.4.0",),
}


# Front ends that are no kernels.
SERVERS = {
    "marimo": ("marimo>=0.20,<1", "anywidget>=0.9,<1", "ipywidgets>=8.1,<9"),
    # A Hub, its culler of idle servers, and the servers themselves; its proxy is a program of npm's.
    "jupyterhub": (
        *("jupyterhub>=5,<7", "jupyterhub-idle-culler", "jupyter_server>=2.14,<3"),
        *("ipykernel>=7,<8", "anywidget>=0.9,<1", "ipywidgets>=8.1,<9"),
    ),
}
PROXY = "configurable-http-proxy@5"


def interpreter(name: str) -> Path:
    """The Python of a kernel; its environment is made first. Raises CalledProcessError where it cannot be."""
    folder = FOLDER / name
    python, stamp = folder / "bin" / "python", folder / ".requirements"
    requirements = "\n".join((sys.version, *LIBRARY, *_packages(name)))
    if python.exists() and stamp.exists() and stamp.read_text() == requirements:
        return python
    print(f"making {folder.relative_to(ROOT)}", file=sys.stderr, flush=True)
    venv.create(folder, with_pip=False, clear=True)
    pip = (sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--disable-pip-version-check")
    subprocess.run([*pip, *_packages(name), *LIBRARY], check=True, capture_output=True, text=True)
    stamp.write_text(requirements)
    return python


def hub_proxy() -> Path:
    """The program of JupyterHub's own proxy, which is installed first. Raises CalledProcessError or OSError."""
    folder = FOLDER / "jupyterhub" / "node"
    program = folder / "node_modules" / ".bin" / "configurable-http-proxy"
    if not program.exists():
        npm = ("npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(folder), PROXY)
        subprocess.run(npm, check=True, capture_output=True, text=True)
    return program


def _packages(name: str) -> tuple[str, ...]:
    return {**KERNELS, **SERVERS}[name]


if __name__ == "__main__":
    for name in sys.argv[1:] or (*KERNELS, *SERVERS):
        print(f"{name}: {interpreter(name).relative_to(ROOT)}")
