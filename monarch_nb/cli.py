"""The command `monarch-nb`: version, agents, jobs, meshes, findings, top, the doctor."""

import argparse
import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from monarch_nb._package import __version__, open_streams, page
from monarch_nb.settings import positive_seconds
from monarch_nb.wire import json_decoder

if TYPE_CHECKING:
    from monarch_nb.doctor import Check
    from monarch_nb.mesh import HostMesh

_KERNEL_SECONDS = 60
_WAY_IN = f"""\
In a notebook, type %load_ext monarch and then %monarch, which shows what to type next.
The manual: {page("manual/README.md")}
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Executes a command line; returns the exit status: 0, 1 for a problem that was found, 2 for a wrong line."""
    open_streams()
    try:
        try:
            return _execute(list(sys.argv[1:] if argv is None else argv))
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # its reader, such as head, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter writes the rest at its end
        return 1


def _execute(words: list[str]) -> int:
    if words[:1] == ["agent"]:
        from monarch_nb.host.agent import main as agent

        return agent(words[1:], prog="monarch-nb agent")
    if words[:1] == ["job"]:
        from monarch_nb.job.cli import main as job

        return job(words[1:])
    if words[:1] == ["top"]:
        from monarch_nb.top.cli import main as top

        return top(words[1:])
    if words[:1] == ["torchrun"]:
        from monarch_nb._torchrun import main as torchrun

        return torchrun(words[1:])
    parser = _parser()
    options = parser.parse_args(words)
    if options.command is None:
        parser.print_help(sys.stderr)
        return 2
    return _doctor(options) if options.command == "doctor" else _mesh(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="monarch-nb",
        description="Monarch-NB makes a notebook kernel the controller of a cluster.",
        epilog=_WAY_IN,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"monarch-nb {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    commands.add_parser(
        "agent", help="let this machine take part in a cluster (monarch-nb agent --help)", add_help=False
    )
    commands.add_parser(
        "job", help="start, list, watch and end jobs: hosts on Slurm, Kubernetes, SSH, ...", add_help=False
    )
    commands.add_parser("top", help="show the ranks of a running controller in this terminal", add_help=False)
    commands.add_parser("torchrun", help="run a script on processes of this machine, as torchrun does", add_help=False)
    mesh = commands.add_parser("mesh", help="list meshes that were left without a controller, or stop one")
    verbs = mesh.add_subparsers(dest="verb", metavar="ls|stop")
    mesh.set_defaults(verb="ls")
    verbs.add_parser(
        "ls", aliases=["list"], help="what can be attached, where, since when, and how much of its lease is left"
    )
    stop = verbs.add_parser("stop", help="end the processes of a mesh")
    stop.add_argument("name", help="its name, or its id where several have that name")
    stop.add_argument("--steal", action="store_true", help="also if a program holds it, which is notified")
    reasons = commands.add_parser(
        "why", help="show what was found about a mesh while it had no controller, also afterwards"
    )
    reasons.add_argument(
        "run", metavar="RUN", help="its name or id, or the name of actors on it, as in monarch-nb mesh ls"
    )
    doctor = commands.add_parser("doctor", help="check this machine, its notebook kernel, and hosts; say what to do")
    doctor.add_argument("hosts", nargs="*", metavar="tcp://HOST:PORT|JOB",
                        help="hosts where monarch-nb agent runs, and jobs: each leg of the way is tried")  # fmt: skip
    doctor.add_argument("--key", help="the key file that the agents of these hosts were started with")
    doctor.add_argument("--timeout", type=positive_seconds, default=10.0, help="seconds for each host (default: 10)")
    doctor.add_argument("--no-kernel", action="store_true", help="leave the notebook kernel out")
    doctor.add_argument("--json", action="store_true", help="write the findings as JSON")
    return parser


def _mesh(options: argparse.Namespace) -> int:
    from monarch_nb.connect import AttachError, detached_meshes, end_mesh, findings_report, listing

    if options.command == "why":
        try:
            report = findings_report(options.run)
        except (LookupError, OSError) as error:
            sys.stderr.write(f"{error.args[0] if isinstance(error, LookupError) else error}\n")
            return 1
        sys.stdout.write(f"{report}\n")
        return 0
    if options.verb in ("ls", "list"):
        sys.stdout.write(f"{listing(detached_meshes())}\n")
        return 0
    try:
        sys.stdout.write(f"{end_mesh(options.name, steal=options.steal)}\n")
    except AttachError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from monarch_nb import doctor

    checks: dict[str, list[Check]] = doctor.visit({"this machine": _this_host()})
    if not options.no_kernel:
        checks["notebook kernel"] = _kernel()
    endpoints = [host for host in options.hosts if "://" in host]
    checks.update(doctor.visit_endpoints(endpoints, options.key, options.timeout))
    for job in (word for word in options.hosts if word not in endpoints):
        checks.update(_legs_of_job(job, options.timeout))
    every = [finding for findings in checks.values() for finding in findings]
    if options.json:
        text = msgspec.json.format(msgspec.json.encode(checks)).decode()
    else:
        parts = [f"{name}\n{doctor.table(findings)}\n" for name, findings in checks.items()]
        text = "\n".join([*parts, doctor.summary(every)])
    sys.stdout.write(f"{text}\n")
    return int(any(finding.level == "error" for finding in every))


def _legs_of_job(word: str, timeout: float) -> "dict[str, list[Check]]":
    """Returns the engine's report on each host of a job, and the legs of the ways to it until one is open."""
    from monarch_nb import doctor
    from monarch_nb.job.named import find_job, hosts_of_job

    try:
        hosts = hosts_of_job(find_job(word))
    except (RuntimeError, LookupError, ValueError, OSError) as error:
        text = error.args[0] if isinstance(error, LookupError) and error.args else error
        return {word: [doctor.Check("job", "error", str(text))]}
    checks: dict[str, list[Check]] = {}
    for host in hosts:
        findings = [doctor.Check("engine", "ok" if host.runs else "error", f"{host.name} {host.description}")]
        if host.wrong:
            findings.append(doctor.Check("tunnel", "error", host.wrong))
        elif host.runs and not host.addresses:
            findings.append(doctor.Check("address", "warning", "its agent has not reported its address yet"))
        tried = []
        for address in host.addresses:
            tried.append(doctor.legs(address, host.key, timeout))
            if not doctor.shut(tried[-1]):
                break
        best = next((legs for legs in tried if not doctor.shut(legs)), None)
        checks[f"{word} {host.name}"] = [*findings, *(best or [leg for legs in tried for leg in legs])]
    return checks


def _this_host() -> "HostMesh":
    from monarch_nb.actor import this_host

    return this_host()


def _kernel() -> "list[Check]":
    """Returns the findings of a new kernel of this Python, which runs in a process of its own, as in Jupyter."""
    from monarch_nb.doctor import Check

    if importlib.util.find_spec("ipykernel") is None:
        advice = (
            "For notebooks: pip install 'monarch-nb[lab]', or 'monarch-nb[notebook]' beside a Jupyter that is there."
        )
        return [Check("kernel", "warning", "ipykernel is not installed for this Python", advice)]
    command = [sys.executable, "-m", "monarch_kernel.doctor"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_KERNEL_SECONDS, check=True)
        return json_decoder(list[Check]).decode(done.stdout)
    except (subprocess.SubprocessError, msgspec.DecodeError) as error:
        last = (getattr(error, "stderr", "") or str(error)).strip().splitlines()[-1:]
        advice = "Install its parts again: pip install --upgrade --force-reinstall 'monarch-nb[notebook]'"
        return [Check("kernel", "error", f"no kernel could be started: {' '.join(map(str, last))}", advice)]
