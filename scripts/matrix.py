"""The suite on other versions of Python and PyTorch, each in an environment below build/matrix: `make test-matrix`.

    python scripts/matrix.py [NAME ...] [-- PYTEST ARGUMENTS]

The wheel is tested: each environment has it installed, and its tests run in a folder without the library's sources.
A Python that cannot be found is skipped with a loud line; PYTHON_3_14=/path names one. Ends with 1 if a suite fails.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "matrix"
EXTRAS = "lab,ssh,kubernetes,telemetry,debug,top,examples,dev"
SOURCES = ("monarch_nb", "kernel_ext")


@dataclass(frozen=True)
class Environment:
    """A version of Python, and the requirement of PyTorch that goes with it."""

    name: str
    python: str
    torch: str


ENVIRONMENTS = (
    Environment("oldest", "3.12", "torch==2.4.*"),
    Environment("oldest-tensors", "3.11", "torch==2.10.*"),
    Environment("newest", "3.13", "torch"),
    Environment("newest-python", "3.14", "torch"),
)


def say(text: str) -> None:
    """Prints a line at once."""
    print(f"matrix: {text}", file=sys.stderr, flush=True)


def interpreter(version: str) -> Path | None:
    """A Python of that minor version which runs: one that was named, one on PATH, or one of pyenv's."""
    named = os.environ.get("PYTHON_" + version.replace(".", "_"))
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    on_path = shutil.which(f"python{version}")
    candidates = [named, on_path, *sorted(str(path) for path in pyenv.glob(f"{version}*/bin/python"))]
    check = f"import sys, venv, ensurepip; sys.exit('%d.%d' % sys.version_info[:2] != {version!r})"
    for candidate in filter(None, candidates):
        if subprocess.run([candidate, "-c", check], capture_output=True, check=False).returncode == 0:
            return Path(candidate)
    return None


def build_wheel() -> Path:
    """The wheel of this tree."""
    dist = FOLDER / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(dist)], cwd=ROOT, check=True,
                   capture_output=True)  # fmt: skip
    return next(dist.glob("*.whl"))


def prepare(environment: Environment, python: Path, wheel: Path) -> Path:
    """An environment with PyTorch, which stays from run to run, and this wheel; gives its Python."""
    folder = FOLDER / environment.name
    own = folder / "venv" / "bin" / "python"
    if not own.exists():
        say(f"{environment.name}: making its environment with {python}")
        subprocess.run([python, "-m", "venv", folder / "venv"], check=True)
    pip = [own, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, environment.torch, "numpy"], check=True)
    subprocess.run([*pip, "--force-reinstall", "--no-deps", wheel], check=True)
    subprocess.run([*pip, f"monarch-nb[{EXTRAS}] @ {wheel.as_uri()}", environment.torch], check=True)
    return own


def copy_tests(environment: Environment) -> Path:
    """A folder with all files of the repository but the sources of the library."""
    tree = FOLDER / environment.name / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, files.split("\0")):
        if not name.startswith(tuple(f"{source}/" for source in SOURCES)) and (ROOT / name).exists():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    return tree


def main(arguments: list[str]) -> int:
    """Runs the suites that were asked for, one after the other; 1 if one fails or none could run."""
    split = arguments.index("--") if "--" in arguments else len(arguments)
    names, extra = arguments[:split], arguments[split + 1 :]
    if unknown := set(names) - {environment.name for environment in ENVIRONMENTS}:
        say(
            f"there is no environment {', '.join(sorted(unknown))}; there are {', '.join(e.name for e in ENVIRONMENTS)}"
        )
        return 2
    FOLDER.mkdir(parents=True, exist_ok=True)
    wheel = build_wheel()
    results: dict[str, str] = {}
    for environment in ENVIRONMENTS:
        if names and environment.name not in names:
            continue
        title = f"{environment.name} (Python {environment.python}, {environment.torch})"
        python = interpreter(environment.python)
        if python is None:
            variable = "PYTHON_" + environment.python.replace(".", "_")
            results[title] = f"NOT TESTED HERE: there is no Python {environment.python}; name one by {variable}="
            continue
        own, tree = prepare(environment, python, wheel), copy_tests(environment)
        say(f"{title}: running the suite")
        run = [own, "-m", "pytest", "-q", "-n", "4", "--dist", "loadfile", "--no-loadscope-reorder",
               "-m", "not slow and not sources"]  # fmt: skip
        code = subprocess.run([*run, *extra], cwd=tree, check=False).returncode
        results[title] = "passed" if code == 0 else f"FAILED (pytest ended with {code})"
    for title, result in results.items():
        say(f"{title}: {result}")
    tried = [result for result in results.values() if not result.startswith("NOT TESTED")]
    return int(not tried or any(result != "passed" for result in tried))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
