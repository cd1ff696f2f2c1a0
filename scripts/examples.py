"""Runs the notebooks of examples/ from top to bottom, each in a kernel of its own, and saves them with their outputs.

Saved outputs are static: texts, pictures and the plain form of displays, without the state of widgets and without names
that only this machine has. Ends with status 1 where a notebook fails, or its outputs are too large for a repository.
"""

import argparse
import re
import socket
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from scripts.demo import execute  # noqa: E402

EXAMPLES = ROOT / "examples"
KINDS = ("text/plain", "text/html", "text/markdown", "text/latex", "image/png", "image/svg+xml")
CELL_S = 900  # for a cell: a machine may be busy
MOST = 300_000  # bytes of a notebook with its outputs
HOST = "workstation"  # the name of the machine in saved outputs
WARNING = re.compile(r"^\[IPKernelApp\] WARNING.*\n?", re.MULTILINE)


def names() -> list[str]:
    """The names of all notebooks."""
    return sorted(path.stem for path in EXAMPLES.glob("*.ipynb"))


def words() -> dict[str, str]:
    """Names that only this machine has, and their replacements."""
    replacements = {
        str(ROOT): "~/monarch-nb",
        sysconfig.get_path("purelib"): "~/packages",
        sys.prefix: "~/venv",
        str(Path.home()): "~",
        socket.getfqdn(): HOST,
        socket.gethostname(): HOST,
        socket.gethostname().partition(".")[0]: HOST,
    }
    return {word: put for word, put in replacements.items() if len(word) > 1 and word != "localhost"}


def cleaned(value: Any, put: dict[str, str]) -> Any:
    """A value of an output, with the words of this machine replaced, longest first."""
    if isinstance(value, dict):
        return {key: cleaned(item, put) for key, item in value.items()}
    if isinstance(value, list):
        return [cleaned(item, put) for item in value]
    if not isinstance(value, str):
        return value
    for word in sorted(put, key=len, reverse=True):
        value = re.sub(rf"(?<![\w.]){re.escape(word)}(?!\w)", put[word], value)
    value = re.sub(re.escape(tempfile.gettempdir()) + r"/[\w.-]+", "/tmp/monarch", value)
    return WARNING.sub("", value)


def static(output: dict[str, Any], put: dict[str, str]) -> dict[str, Any] | None:
    """An output as it is saved; None where nothing of it is left."""
    kind = output["output_type"]
    if kind == "stream":
        text = cleaned(output["text"], put)
        return {**output, "text": text} if text else None
    if kind == "error":
        return dict(cleaned(output, put))
    data = {mime: value for mime, value in output["data"].items() if mime in KINDS and value.strip()}
    data = {mime: value if mime == "image/png" else cleaned(value, put) for mime, value in data.items()}
    if not data:
        return None  # a display that was cleared
    return {**output, "data": data, "metadata": {}}


def saved(notebook: Any) -> Iterator[tuple[Any, list[Any]]]:
    """The cells of code, each with its outputs as they are saved."""
    put = words()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            entries = [entry for output in cell.outputs if (entry := static(output, put)) is not None]
            yield cell, [nbformat.from_dict(entry) for entry in entries]


def run(name: str) -> str:
    """Runs a notebook and saves it; returns the problem, "" if none."""
    path = EXAMPLES / f"{name}.ipynb"
    began = time.perf_counter()
    executed = execute(path, cell_s=CELL_S)
    seconds = time.perf_counter() - began
    if executed.error is not None:
        return f"{name}: {executed.error}"
    notebook = executed.notebook
    for cell, outputs in saved(notebook):
        cell.outputs = outputs
        cell.metadata = {key: value for key, value in cell.metadata.items() if key == "tags"}
    before = nbformat.read(path, as_version=4).metadata
    notebook.metadata = before
    text = nbformat.writes(notebook) + "\n"
    print(f"{name:14} {seconds:6.1f} s  {len(text) / 1000:6.0f} kB", flush=True)
    if len(text.encode()) > MOST:
        return f"{name}: {len(text.encode())} bytes with its outputs, more than {MOST}"
    path.write_text(text.rstrip("\n") + "\n", encoding="utf-8")
    if executed.left_behind:
        return f"{name}: processes stayed behind: {executed.left_behind}"
    return ""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Run the notebooks of examples/ and save what they show.")
    parser.add_argument("names", nargs="*", default=names(), metavar="NAME")
    wrong = [problem for name in parser.parse_args(argv).names if (problem := run(name))]
    for problem in wrong:
        print(f"EXAMPLE FAILED: {problem}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
