"""Findings with advice, derived from the facts of a machine without I/O, and their text."""

from collections.abc import Iterable
from typing import Literal

from msgspec import Struct

from monarch_nb.doctor.facts import Facts
from monarch_nb.host.packages import how_to_install
from monarch_nb.wire import counted, size_text

Level = Literal["ok", "warning", "error"]

_MARKS: dict[Level, str] = {"ok": "✓", "warning": "!", "error": "✗"}
_LEAST_FILES, _GOOD_FILES = 512, 4096
_FEW_PROCESSES = 256
_SMALL_SHARED = 1 << 30
_LITTLE_DISK = 256 << 20
_LITTLE_LOCKED = 1 << 30
_PYTHON = (3, 11)
_COMPARED = ("torch", "numpy")
_NIXL = ("nixl-cu12", "nixl-cu13")
# The oldest driver that runs a CUDA of each major version, without packages for compatibility.
# Source: CUDA Toolkit Release Notes, "CUDA Toolkit and Minimum Required Driver Version".
_DRIVERS = {12: 525, 13: 580}


class Check(Struct, frozen=True):
    """Result of a check. `advice` says what to do, "" for nothing."""

    about: str
    level: Level
    found: str
    advice: str = ""

    @property
    def mark(self) -> str:
        """The character in front of the result."""
        return _MARKS[self.level]


def table(findings: Iterable[Check]) -> str:
    """Formats findings as lines, each with its advice below."""
    rows = list(findings)
    width = max((len(finding.about) for finding in rows), default=0)
    lines = []
    for finding in rows:
        first, *more = finding.found.splitlines() or [""]
        lines.append(f"{finding.mark} {finding.about.ljust(width)}  {first}")
        lines += [f"{' ' * (width + 4)}{line}" for line in (*more, *finding.advice.splitlines())]
    return "\n".join(lines)


def summary(findings: Iterable[Check]) -> str:
    """Summarizes findings in one line."""
    levels = [finding.level for finding in findings]
    errors, warnings = levels.count("error"), levels.count("warning")
    if not errors and not warnings:
        return "No problems were found."
    counts = [_many(errors, "error", _MARKS["error"]), _many(warnings, "warning", _MARKS["warning"])]
    return f"{' and '.join(filter(None, counts))}. The lines below the marks say what to do."


def _many(count: int, noun: str, mark: str) -> str:
    return f"{counted(count, noun)} ({mark})" if count else ""


def judge(facts: Facts, controller: Facts | None = None) -> list[Check]:
    """Returns the findings about a machine, including differences to the machine of the controller, if given."""
    return [
        _python(facts, controller),
        _versions(facts, controller),
        _files(facts),
        _processes(facts),
        _memory(facts),
        _shared(facts),
        _folder(facts),
        _ports(facts),
        _name(facts),
        _start(facts),
        _gpus(facts),
        _rdma(facts),
    ]


def _gpus(facts: Facts) -> Check:
    if not facts.gpus:
        return Check("GPUs", "ok", "none: gpus is a dimension like any other")
    packages = dict(facts.gpu_packages)
    models = ", ".join(dict.fromkeys(facts.gpu_models))
    parts = [f"{facts.gpus}" + f" × {models}" * bool(models)]
    parts += [f"driver {facts.gpu_driver}"] * bool(facts.gpu_driver)
    parts += [f"PyTorch for CUDA {facts.torch_cuda}"] * bool(facts.torch_cuda)
    parts += [f"{name} {version}" for name, version in packages.items() if version]
    fact = ", ".join(parts)
    if not facts.torch_cuda:
        return Check(
            "GPUs", "warning", f"{fact}; PyTorch is missing, or built without CUDA",
            "Processes cannot compute on the GPUs: install PyTorch's build for CUDA (pytorch.org/get-started).",
        )  # fmt: skip
    needed, has = _DRIVERS.get(int(facts.torch_cuda.split(".")[0]), 0), int((facts.gpu_driver or "0").split(".")[0])
    if 0 < has < needed:
        return Check(
            "GPUs", "error", fact,
            f"PyTorch for CUDA {facts.torch_cuda} needs driver {needed} or newer: update the driver, or install a "
            "build for an older CUDA.",
        )  # fmt: skip
    missing = [name for name in ("cuda-bindings", "nvidia-ml-py") if not packages.get(name)]
    if missing:
        return Check(
            "GPUs", "warning", f"{fact}; without {' and '.join(missing)}",
            "pip install 'monarch-nb[gpu]': without cuda-bindings, tensors go from process to process through the\n"
            "host, and RDMABuffer takes none of a GPU; without nvidia-ml-py, displays do not show how busy a GPU is,\n"
            "and show the memory of all its processes as that of each.",
        )  # fmt: skip
    return Check("GPUs", "ok", fact)


def _python(facts: Facts, controller: Facts | None) -> Check:
    fact = f"{facts.python}, {facts.executable}"
    minor = tuple(int(part) for part in facts.python.split(".")[:2])
    if minor < _PYTHON:
        return Check("Python", "error", fact, "Use Python 3.11 or newer.")
    expected = ".".join(controller.python.split(".")[:2]) if controller is not None else ""
    if expected and ".".join(map(str, minor)) != expected:
        return Check(
            "Python", "error", f"{fact}; the controller runs {expected}",
            f"Start the agent there with Python {expected}: code travels only between the same minor versions.",
        )  # fmt: skip
    return Check("Python", "ok", fact)


def _versions(facts: Facts, controller: Facts | None) -> Check:
    fact = ", ".join(f"{name} {version}" for name, version in facts.versions.items() if version)
    missing = [name for name, version in facts.versions.items() if not version]
    if missing:
        return Check("versions", "error", f"{', '.join(missing)} is missing", f"pip install {' '.join(missing)}")
    if "torchmonarch" in facts.versions:
        return Check(
            "versions", "warning", fact,
            "torchmonarch is installed too, so `import monarch` is that one. To use Monarch-NB, write\n"
            "`import monarch_nb`, and %load_ext monarch_nb in a notebook.",
        )  # fmt: skip
    if controller is not None:
        expected, installed = controller.versions["monarch-nb"], facts.versions["monarch-nb"]
        if expected != installed:
            return Check(
                "versions", "error", f"monarch-nb {installed}; the controller has {expected}",
                f"Install the same version there: {how_to_install()}",
            )  # fmt: skip
        compared = [name for name in _COMPARED if name in facts.versions and name in controller.versions]
        differ = [name for name in compared if facts.versions[name] != controller.versions[name]]
        if differ:
            differences = ", ".join(
                f"{name} {facts.versions[name]} (controller: {controller.versions[name]})" for name in differ
            )
            return Check(
                "versions", "warning", differences,
                "Objects of these libraries may not be readable on the other side: install the same versions.",
            )  # fmt: skip
    return Check("versions", "ok", fact)


def _files(facts: Facts) -> Check:
    soft, hard = facts.files
    fact = f"a process may have {_number(soft)} open"
    if hard < _LEAST_FILES:
        return Check(
            "open files", "error", fact,
            f"That is enough for few processes. Raise it in /etc/security/limits.conf (nofile {_GOOD_FILES}), or\n"
            f"where the container is started (docker run --ulimit nofile={_GOOD_FILES}).",
        )  # fmt: skip
    if soft < _LEAST_FILES:
        return Check(
            "open files", "warning", fact,
            f"Run `ulimit -n {min(hard, 65536)}` before Jupyter is started: each process of a mesh takes a few.",
        )  # fmt: skip
    return Check("open files", "ok", fact)


def _processes(facts: Facts) -> Check:
    fact = f"this user may have {_number(facts.processes)}"
    if facts.processes < _FEW_PROCESSES:
        return Check(
            "processes", "warning", fact,
            "Threads count too, and each process has several: raise it with `ulimit -u` before Jupyter is started.",
        )  # fmt: skip
    return Check("processes", "ok", fact)


def _memory(facts: Facts) -> Check:
    if facts.memory_files:
        return Check("memory files", "ok", "large arrays are handed over without a copy")
    return Check(
        "memory files", "warning", "memfd_create is not allowed or not there",
        "Everything works, but large arrays are copied. In a container, allow the call memfd_create.",
    )  # fmt: skip


def _shared(facts: Facts) -> Check:
    advice = (
        "Monarch-NB does without it. PyTorch's data loaders need it: start the container with --shm-size=8g, or use\n"
        "num_workers=0."
    )
    if facts.shared_memory is None:
        return Check("shared memory", "warning", "there is no /dev/shm", advice)
    fact = f"/dev/shm has {size_text(facts.shared_memory)}"
    if facts.shared_memory < _SMALL_SHARED:
        return Check("shared memory", "warning", fact, advice)
    return Check("shared memory", "ok", fact)


def _folder(facts: Facts) -> Check:
    fact = f"{facts.run_folder}, {size_text(facts.free_disk)} free"
    if facts.run_folder_problem:
        return Check(
            "run folder", "error", f"no socket can be made in {facts.run_folder}: {facts.run_folder_problem}",
            "Set TMPDIR to a folder of this machine's own disk, with a short path, that you may write to.",
        )  # fmt: skip
    if facts.free_disk < _LITTLE_DISK:
        return Check(
            "run folder", "warning", fact,
            "What processes print is kept there. Free some, or choose another place with configure(log_folder=...).",
        )  # fmt: skip
    return Check("run folder", "ok", fact)


def _ports(facts: Facts) -> Check:
    if facts.loopback_problem:
        return Check(
            "ports", "error", f"no connection to 127.0.0.1: {facts.loopback_problem}",
            "Allow connections of this machine to itself (127.0.0.1) in its firewall or sandbox.",
        )  # fmt: skip
    return Check("ports", "ok", "ports of 127.0.0.1 can be opened and reached")


def _name(facts: Facts) -> Check:
    if not facts.name_resolves:
        return Check(
            "host name", "warning", f"{facts.host} leads to no address",
            f"torch.distributed needs one: add a line `127.0.0.1 {facts.host}` to /etc/hosts.",
        )  # fmt: skip
    return Check("host name", "ok", facts.host)


def _start(facts: Facts) -> Check:
    if facts.quick_start:
        return Check("starting", "ok", "processes are forked from one that has imported the libraries")
    return Check(
        "starting", "warning", "this system has no pidfd",
        "Everything works, but each process imports its libraries itself, which takes seconds with PyTorch.",
    )  # fmt: skip


def _rdma(facts: Facts) -> Check:
    if facts.rdma_closed and not facts.rdma:
        return Check(
            "RDMA", "warning", f"{', '.join(facts.rdma_closed)} may not be used by this user",
            "Give this user /dev/infiniband/uverbs* for reading and writing; in a container, pass these devices in.\n"
            "Until then memory goes to other machines by TCP.",
        )  # fmt: skip
    nixl = next((f"{name} {facts.versions[name]}" for name in _NIXL if facts.versions.get(name)), "")
    if not facts.rdma:
        return Check("RDMA", "ok", "no device: memory goes to other machines by TCP")
    devices = ", ".join(facts.rdma)
    if not nixl:
        return Check(
            "RDMA", "warning", f"{devices}, and no NIXL",
            "To have memory go to other machines by it: pip install 'monarch-nb[rdma]', on all of them.",
        )  # fmt: skip
    if facts.locked_memory < _LITTLE_LOCKED:
        return Check(
            "RDMA", "warning", f"{devices}, but a process may lock {size_text(facts.locked_memory)} of memory",
            "A device needs memory that stays where it is: raise memlock in /etc/security/limits.conf, or start the\n"
            "container with --ulimit memlock=-1. What cannot be locked goes by TCP.",
        )  # fmt: skip
    return Check("RDMA", "ok", f"{devices}, by {nixl}")


def _number(value: int) -> str:
    return "any number" if value > 1 << 40 else f"{value:,}"
