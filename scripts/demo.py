"""Runs examples/quickstart.ipynb in a real kernel, cell by cell, and reports its results.

The executed notebook and a page of it are left in build/demo/. Ends with status 1, and the cell's error, when a cell
fails, when the notebook did not reach its results, or when a process stays behind.
"""

import argparse
import dataclasses
import os
import re
import secrets
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbconvert import HTMLExporter

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from scripts.processes import MARK, left_behind

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"
BUILD = ROOT / "build" / "demo"
CELL_SECONDS = 120
SUMMARY = {
    "accuracy": re.compile(r"test accuracy +([\d.]+)%"),
    "detected_ms": re.compile(r"kill to detection +([\d.]+) ms"),
    "healed_ms": re.compile(r"kill to healed +([\d.]+) ms"),
}


class ThisPython(KernelSpecManager):
    """The one kernel is this interpreter's, whatever kernels the user has."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        curve = {"supported_encryption": ["curve"]}
        return KernelSpec(argv=argv, display_name="Python 3", language="python", metadata=curve)


class OwnKernel(AsyncKernelManager):
    """A kernel of this interpreter."""

    def __init__(self, **options: Any) -> None:
        super().__init__(kernel_spec_manager=ThisPython(), **options)
        if self.has_trait("transport_encryption"):  # newer Jupyters have it, and newer kernels warn without
            self.transport_encryption = "auto"


@dataclasses.dataclass
class Executed:
    """A notebook after its run."""

    notebook: nbformat.NotebookNode
    error: Exception | None
    left_behind: list[str]

    def outputs(self, kind: str) -> list[nbformat.NotebookNode]:
        return [out for cell in code_cells(self.notebook) for out in cell.outputs if out.output_type == kind]

    def stream(self) -> str:
        return "".join(out.text for out in self.outputs("stream"))

    def summary(self) -> dict[str, float]:
        """The figures that the notebook prints last; the accuracy as a fraction. Raises LookupError."""
        text = self.stream()
        matches = {name: pattern.search(text) for name, pattern in SUMMARY.items()}
        missing = [name for name, match in matches.items() if match is None]
        if missing:
            raise LookupError(f"the notebook did not print its {', '.join(missing)}")
        figures = {name: float(match[1]) for name, match in matches.items() if match is not None}
        figures["accuracy"] /= 100
        return figures


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def execute(path: Path, report: Callable[[str], None] = lambda line: None, cell_s: float = CELL_SECONDS) -> Executed:
    """Runs a notebook from top to bottom in a kernel of this interpreter, and ends the kernel."""
    notebook = nbformat.read(path, as_version=4)
    mark = secrets.token_hex(8)
    reporter = _Reporter(notebook, report)
    client = NotebookClient(
        notebook,
        kernel_manager_class=OwnKernel,
        timeout=cell_s,
        resources={"metadata": {"path": str(path.parent)}},
        on_cell_start=reporter.start,
        on_cell_executed=reporter.executed,
    )
    error: Exception | None = None
    try:
        client.execute(env={**os.environ, MARK: mark})
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as failed:
        error = failed
    return Executed(notebook, error, left_behind(mark))


class _Reporter:
    """A line for each cell, when it is done."""

    def __init__(self, notebook: nbformat.NotebookNode, report: Callable[[str], None]) -> None:
        self._report = report
        self._count = len(code_cells(notebook))
        self._done = 0
        self._began = 0.0
        self._titles: dict[str, str] = {}
        title = ""
        for cell in notebook.cells:
            if cell.cell_type == "markdown":
                title = next((line.lstrip("# ") for line in cell.source.splitlines() if line.startswith("#")), title)
            else:
                self._titles[cell.id] = title

    def start(self, cell: nbformat.NotebookNode, **_: Any) -> None:
        self._began = time.perf_counter()

    def executed(self, cell: nbformat.NotebookNode, execute_reply: dict[str, Any], **_: Any) -> None:
        if cell.cell_type != "code":
            return
        self._done += 1
        seconds = time.perf_counter() - self._began
        content = execute_reply["content"]
        meant = "raises-exception" in cell.metadata.get("tags", ())
        how = "ok" if content["status"] == "ok" else f"{content.get('ename')}{', as it should' if meant else ''}"
        first = next((line for line in cell.source.splitlines() if line.strip()), "")
        title = self._titles[cell.id]
        self._report(f"[{self._done:2}/{self._count}] {seconds:5.1f} s  {title[:38]:38}  {first[:42]:42}  {how}")


def save(executed: Executed, folder: Path) -> tuple[Path, Path]:
    """Writes the executed notebook and its page."""
    folder.mkdir(parents=True, exist_ok=True)
    saved, page = folder / "quickstart.ipynb", folder / "quickstart.html"
    nbformat.write(executed.notebook, saved)
    body, _ = HTMLExporter().from_notebook_node(executed.notebook)
    page.write_text(body, encoding="utf-8")
    return saved, page


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Run the quickstart notebook in a real kernel.")
    parser.add_argument("--notebook", type=Path, default=NOTEBOOK)
    parser.add_argument("--out", type=Path, default=BUILD)
    options = parser.parse_args(argv)

    began = time.perf_counter()
    print(f"running {options.notebook} in a kernel of {sys.executable}", flush=True)
    executed = execute(options.notebook, lambda line: print(line, flush=True))
    saved, page = save(executed, options.out)
    problems = []
    if executed.error is not None:
        problems.append(f"a cell failed:\n{executed.error}")
    else:
        try:
            figures = executed.summary()
        except LookupError as missing:
            problems.append(str(missing))
        else:
            print()
            print(f"test accuracy      {figures['accuracy']:.1%}")
            print(f"kill to detection  {figures['detected_ms']:.0f} ms")
            print(f"kill to healed     {figures['healed_ms']:.0f} ms")
            if figures["accuracy"] <= 0.95:
                problems.append(f"the test accuracy should be above 95 %, it is {figures['accuracy']:.1%}")
    if executed.left_behind:
        problems.append("processes stayed behind (ended now):\n  " + "\n  ".join(executed.left_behind))
    print()
    print(f"executed notebook  {saved}")
    print(f"as a page          {page}")
    print(f"in all             {time.perf_counter() - began:.1f} s", flush=True)
    for problem in problems:
        print(f"\nDEMO FAILED: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
