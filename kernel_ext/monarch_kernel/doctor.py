"""Checks of a notebook kernel; `python -m monarch_kernel.doctor` starts a kernel and writes its findings as JSON."""

import importlib
import queue
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from monarch_nb._package import HOMEPAGE
from monarch_nb.doctor import Check, summary, table, visit_known
from monarch_nb.host.packages import installed
from monarch_nb.wire import json_decoder

from .front_ends import facts_of, levels
from .views.bundle import built

_SECONDS = 40.0
_ASK = """
%load_ext monarch_nb
import msgspec as _msgspec
from monarch_kernel.doctor import kernel_findings as _findings
print(_msgspec.json.encode(_findings(get_ipython())).decode())
"""


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
