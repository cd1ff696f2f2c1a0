"""Checks of a notebook kernel and of its front end, which is recognised by facts of its process.

`python -m monarch_kernel.doctor` starts a kernel and writes its findings as JSON.
"""

import importlib
import os
import queue
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from monarch_nb._package import HOMEPAGE, page
from monarch_nb.doctor import Check, summary, table, visit_known
from monarch_nb.host.packages import installed
from monarch_nb.wire import json_decoder

from .views.live import built

LAB, VSCODE, COLAB, LIGHTNING, KAGGLE, HUB, MARIMO, TERMINAL, RUN, OTHER = (
    "JupyterLab or Notebook 7",
    "VS Code",
    "Colab",
    "Lightning Studio",
    "Kaggle",
    "JupyterLab of a JupyterHub",
    "marimo",
    "IPython in a terminal",
    "a run without a front end (nbclient, papermill)",
    "a front end that says nothing about itself",
)
_GUIDES = {
    COLAB: page("guides/colab.md"),
    VSCODE: page("guides/vscode.md"),
    LIGHTNING: page("guides/lightning.md"),
    HUB: page("guides/jupyterhub.md"),
    MARIMO: page("guides/marimo.md"),
}
_EXTENSION = "monarch-nb-lab"
_LABS = (LAB, HUB, LIGHTNING)  # where JupyterLab's extensions can be
_SECONDS = 40.0  # for the findings of a kernel that is started
_ASK = """
%load_ext monarch_nb
import msgspec as _msgspec
from monarch_kernel.doctor import kernel_findings as _findings
print(_msgspec.json.encode(_findings(get_ipython())).decode())
"""


class FrontEndFacts(Struct, frozen=True):
    """Facts from which the front end is recognised."""

    environment: Mapping[str, str]
    modules: frozenset[str] = frozenset()  # that are loaded
    variables: frozenset[str] = frozenset()  # of the notebook, whose names begin with two underscores
    kernel: bool = True
    ipykernel: str = ""
    subshells: bool = False  # the kernel can handle messages of widgets while a cell runs
    comms: bool = True
    widgets: bool = True  # anywidget, ipywidgets and our front ends are there
    stdin: bool = True  # the sender of the running cell takes questions
    debugger: bool = False  # the kernel answers a debugger
    panel: bool = False  # our extension for JupyterLab is installed


def facts_of(shell: object) -> FrontEndFacts:
    """Facts of the process that runs a shell; `shell` is None without IPython."""
    kernel = getattr(shell, "kernel", None)
    request = (kernel.get_parent("shell") or {}) if kernel is not None else {}
    info = getattr(kernel, "kernel_info", {}) if kernel is not None else {}
    return FrontEndFacts(
        environment=dict(os.environ),
        modules=frozenset(name for name in ("google.colab", "marimo") if name in sys.modules),
        variables=frozenset(name for name in getattr(shell, "user_ns", {}) if str(name).startswith("__")),
        kernel=kernel is not None,
        ipykernel=installed("ipykernel"),
        subshells="kernel subshells" in info.get("supported_features", ()),
        comms=getattr(kernel, "comm_manager", None) is not None,
        widgets=bool(installed("anywidget") and installed("ipywidgets")) and built(),
        stdin=bool(request.get("content", {}).get("allow_stdin", True)),
        debugger=getattr(kernel, "debugger", None) is not None,
        panel=panel_installed(),
    )


def panel_installed() -> bool:
    """Returns whether JupyterLab finds the extension and it is not disabled."""
    try:
        from jupyter_core.paths import jupyter_config_path, jupyter_path
    except ImportError:
        return False
    folders = jupyter_path("labextensions")
    installed = any(os.path.isfile(os.path.join(folder, _EXTENSION, "package.json")) for folder in folders)
    return installed and not any(_switched_off(os.path.join(folder, "labconfig")) for folder in jupyter_config_path())


def _switched_off(folder: str) -> bool:
    """Returns whether `jupyter labextension disable` has written so into this folder."""
    try:
        with open(os.path.join(folder, "page_config.json"), "rb") as file:
            off = json_decoder(dict[str, object]).decode(file.read()).get("disabledExtensions")
    except (OSError, msgspec.DecodeError):
        return False
    return bool(off.get(_EXTENSION)) if isinstance(off, dict) else isinstance(off, list) and _EXTENSION in off


def recognised(facts: FrontEndFacts) -> tuple[str, str]:
    """Returns the first front end that matches, and the sign of it; hosted ones set JupyterLab's variables too."""
    environment = facts.environment

    def variable(*prefixes: str) -> str:
        return next((name for name in sorted(environment) if name.startswith(prefixes)), "")

    signs: tuple[tuple[str, str], ...] = (
        (MARIMO, "the module marimo" if "marimo" in facts.modules and not facts.kernel else ""),
        (TERMINAL, "there is no kernel" if not facts.kernel else ""),
        (
            COLAB,
            variable("COLAB_RELEASE_TAG") or ("the module google.colab" if "google.colab" in facts.modules else ""),
        ),
        (KAGGLE, variable("KAGGLE_KERNEL_RUN_TYPE")),
        (VSCODE, "__vsc_ipynb_file__" if "__vsc_ipynb_file__" in facts.variables else ""),
        (LIGHTNING, variable("LIGHTNING_CLOUD", "LIGHTNING_STUDIO")),
        (RUN, "its cells take no questions" if not facts.stdin else ""),
        (HUB, variable("JUPYTERHUB_API_URL", "JUPYTERHUB_USER")),
        (LAB, variable("JPY_SESSION_NAME")),
        (VSCODE, variable("VSCODE_PID", "VSCODE_CWD")),  # also in kernels of a Jupyter that was started in its terminal
    )
    return next(((name, sign) for name, sign in signs if sign), (OTHER, "no sign of any is there"))


def levels(facts: FrontEndFacts) -> list[Check]:
    """Returns the front end, and how much of each feature it gives. Pure."""
    front_end, sign = recognised(facts)
    guide = _GUIDES.get(front_end)
    description = f"{front_end} ({sign})" + (f"; its guide: {guide}" if guide else "")
    levels: tuple[tuple[str, Callable[[FrontEndFacts, str], tuple[str, str]]], ...] = (
        ("magics", _magics),
        ("displays", _displays),
        ("buttons", _buttons),
        ("debugger", _debugger),
        ("bug button", _bug_button),
        ("side panel", _panel),
        ("away", _away),
    )
    return [Check("front end", "ok", description)] + [
        Check(about, "ok", *level(facts, front_end)) for about, level in levels
    ]


def _magics(facts: FrontEndFacts, front_end: str) -> tuple[str, str]:
    if front_end == MARIMO:
        return "none: cells use the Python calls that the help of each magic names", ""
    return "all of them", ""


def _displays(facts: FrontEndFacts, front_end: str) -> tuple[str, str]:
    if front_end == TERMINAL:
        return "text", ""
    if front_end == MARIMO:
        if facts.widgets:
            return "live: monarch_kernel.show(mesh) in a cell", ""
        return "tables that do not change: anywidget is missing; monarch_kernel.show(mesh) in a cell", (
            "pip install 'monarch-nb[notebook]', then restart the kernel."
        )
    if front_end == RUN:
        return "tables that do not change: nobody looks while it runs", ""
    if not facts.comms or not facts.widgets:
        reason = "the kernel has no comms" if not facts.comms else "anywidget, ipywidgets or their bundles are missing"
        return f"tables that do not change: {reason}", "pip install 'monarch-nb[notebook]', then restart the kernel."
    if front_end == COLAB:
        return "live: they change while a cell runs; Colab asks once for custom widgets", ""
    return "live: they change while a cell runs", ""


def _buttons(facts: FrontEndFacts, front_end: str) -> tuple[str, str]:
    if front_end == MARIMO and facts.widgets:
        return "they wait until the running cell ends", ""
    if front_end in (TERMINAL, RUN, MARIMO) or not (facts.comms and facts.widgets):
        return "none: use the magics, or the Python calls", ""
    if not facts.subshells:
        return f"they wait until the running cell ends: ipykernel {facts.ipykernel} has no subshells", ""
    if front_end in _LABS:
        return "they work while a cell runs", ""
    return "they work while a cell runs where this front end uses subshells, else after it", ""


def _debugger(facts: FrontEndFacts, front_end: str) -> tuple[str, str]:
    if not facts.stdin or front_end == RUN:
        return "no prompt: calls raise StoppedAtBreakpoint, and %%mdb gives commands from the next cell", ""
    if front_end == VSCODE:
        return "its prompt is the box at the top of the window; what is stopped stands in the cell", ""
    if front_end == MARIMO:
        return "monarch.debug: group(), step(), eval(); there is no prompt", ""
    return "its prompt is in the cell", ""


def _bug_button(facts: FrontEndFacts, front_end: str) -> tuple[str, str]:
    if front_end in _LABS and facts.debugger:
        return "breakpoints in the margin of cells hold on the ranks", ""
    if front_end == VSCODE and facts.debugger:
        return "Debug Cell is answered, and ends with the cell; %break sets breakpoints that last", ""
    if front_end in (LAB, HUB, LIGHTNING, VSCODE):
        return "none: this kernel has no debugger; %break sets breakpoints", "pip install --upgrade ipykernel debugpy"
    return "none here: %break sets breakpoints in actors that run", ""


def _panel(facts: FrontEndFacts, front_end: str) -> tuple[str, str]:
    if front_end == MARIMO and facts.widgets:
        return "none: monarch_kernel.panel() shows it in a cell", ""
    if front_end not in (*_LABS, TERMINAL, RUN, MARIMO) and facts.comms and facts.widgets:
        return "none: %panel shows it in a cell", ""
    if front_end not in _LABS:
        return "none: only JupyterLab and Notebook 7 have one; %meshes, %failures and %logs show the same", ""
    if not facts.panel:
        return "not there: off, or not installed beside this kernel; a wheel that was built with npm brings it", ""
    return "the tab with four squares opens it", ""


def _away(facts: FrontEndFacts, front_end: str) -> tuple[str, str]:
    if front_end in (COLAB, KAGGLE, LIGHTNING):
        return "a machine that sleeps, or is taken back, takes its processes along: save what has to last", ""
    if front_end == HUB:
        return "a Hub may end servers that seem idle: %detach --keep 1h keeps meshes that long, where hosts stay", ""
    return "processes end with the kernel; mesh.detach() leaves them running for a lease", ""


class Checkup:
    """Content of %monarch doctor: findings by host, and those of the kernel."""

    def __init__(self, findings: dict[str, list[Check]]) -> None:
        self.findings = findings

    @property
    def summary(self) -> str:
        """A one-line summary."""
        return summary(finding for findings in self.findings.values() for finding in findings)

    def __repr__(self) -> str:
        return "\n\n".join([*(f"{name}\n{table(findings)}" for name, findings in self.findings.items()), self.summary])


def checkup(shell: object) -> Checkup:
    """Checks the kernel that runs the shell, and all hosts that it knows."""
    return Checkup({"notebook kernel": kernel_findings(shell), **visit_known()})


def kernel_findings(shell: object) -> list[Check]:
    """Findings about the kernel that runs the shell."""
    kernel = getattr(shell, "kernel", None)
    if kernel is None:
        advice = "Magics and text work here. For displays, open a notebook: jupyter lab"
        return [Check("kernel", "warning", "this is IPython in a terminal, no notebook kernel", advice)]
    versions = ", ".join(f"{name} {installed(name)}" for name in ("ipykernel", "ipython", "pyzmq"))
    return [Check("kernel", "ok", f"{versions}; %load_ext works"), _comm(kernel), _widgets(), *levels(facts_of(shell))]


def _comm(kernel: object) -> Check:
    if getattr(kernel, "comm_manager", None) is None:
        advice = "pip install --upgrade ipykernel comm. Until then displays are tables that do not change."
        return Check("comm", "warning", "the kernel has no comms", advice)
    return Check("comm", "ok", "live displays and the panel have their connection")


def _widgets() -> Check:
    try:
        for package in ("anywidget", "ipywidgets"):
            importlib.import_module(package)
    except Exception as error:
        advice = "For live displays: pip install 'monarch-nb[notebook]', restart the kernel, load the page again."
        return Check("widgets", "warning", f"anywidget or ipywidgets cannot be imported: {error}", advice)

    if not built():
        return Check("widgets", "warning", "the front ends of live displays are missing", "In a checkout: make setup.")
    return Check("widgets", "ok", f"anywidget {installed('anywidget')}, ipywidgets {installed('ipywidgets')}")


def _ask_kernel() -> list[Check]:
    """Returns the findings of a new kernel of this Python. Raises RuntimeError with its output if it has none."""
    from jupyter_client.manager import KernelManager

    manager = KernelManager()
    spec: Any = manager.kernel_spec
    spec.argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    manager.start_kernel()
    client = manager.client()
    try:
        client.start_channels()
        client.wait_for_ready(timeout=_SECONDS)
        request, text = client.execute(_ASK, allow_stdin=False), ""
        deadline = time.monotonic() + _SECONDS
        while True:
            message = client.get_iopub_msg(timeout=max(0.1, deadline - time.monotonic()))
            if message["parent_header"].get("msg_id") != request:
                continue
            content = message["content"]
            if message["msg_type"] == "stream" and content["name"] == "stdout":
                text += content["text"]
            elif message["msg_type"] == "error":
                raise RuntimeError(f"%load_ext monarch failed: {content['ename']}: {content['evalue']}")
            elif message["msg_type"] == "status" and content["execution_state"] == "idle":
                return json_decoder(list[Check]).decode(text.encode())
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=False)


def main() -> int:
    """Writes the findings."""
    try:
        findings = _ask_kernel()
    except (RuntimeError, OSError, queue.Empty, msgspec.DecodeError) as error:
        text = f"{type(error).__name__}: {error}"
        advice = f"Restart the kernel and try again. If that does not help, report it: {HOMEPAGE}/issues"
        findings = [Check("kernel", "error", text, advice)]
    else:
        findings.append(_spec_check())
    sys.stdout.write(msgspec.json.encode(findings).decode() + "\n")
    return 0


def _spec_check() -> Check:
    """Returns the finding whether a kernel that Jupyter offers runs this Python."""
    from jupyter_client.kernelspec import KernelSpecManager

    specs = KernelSpecManager().get_all_specs().values()
    python = Path(sys.executable).absolute()
    for entry in specs:
        argv = entry["spec"].get("argv") or [""]
        if Path(argv[0]).absolute() == python or argv[0] in ("python", "python3"):
            return Check("Jupyter", "ok", f"its kernel {entry['spec'].get('display_name', '')!r} runs this Python")
    advice = "python -m ipykernel install --user --name monarch, then choose the kernel `monarch` in the notebook."
    return Check("Jupyter", "warning", "none of its kernels runs this Python", advice)


if __name__ == "__main__":
    sys.exit(main())
