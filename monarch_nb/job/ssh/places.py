"""The machines of an SSH job, used and free."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from monarch_nb.job.adapter import Running


def first_machines(options: Mapping[str, Any]) -> list[str]:
    """Returns the machines of all meshes."""
    return [machine for machines in options["machines"].values() for machine in machines]


def unused(job: Running, mesh: str) -> list[str]:
    """Returns the machines for a mesh that have no agent of the job, each as often as it is named."""
    used = Counter(agent.id for agent in job.agents.values())
    candidates = [*job.options["machines"].get(mesh, ()), *job.options.get("more", ())]
    counts, free = Counter[str](), list[str]()
    for machine in candidates:
        counts[machine] += 1
        if counts[machine] > used[machine]:
            free.append(machine)
    return free


def refusal(job: Running, count: int, machines: Sequence[str], errors: Mapping[str, str]) -> str:
    """Explains why no `count` more agents can be started; `errors` has those of the machines that were tried."""
    failed = f"agents could not be started on {', '.join(errors)}:\n{errors_text(errors)}" if errors else ""
    if machines:
        return failed
    used = ", ".join(dict.fromkeys(agent.id for agent in job.agents.values()))
    return (
        f"its machines do not suffice for {count} more (in use: {used}). Name another one: "
        f"mesh.grow(hosts=['node7']), or give the job more of them: SSHJob(…, more=['node7'])"
        + (f"\n{failed}" if failed else "")
    )


def errors_text(errors: Mapping[str, str]) -> str:
    """Formats errors by machine, one a line."""
    return "\n".join(f"  {error}" for error in errors.values())


class MachineName(NamedTuple):
    """The parts of `[user@]name[:port]`; "" for absent ones."""

    user: str
    host: str
    port: str


def read_machine(machine: str) -> MachineName:
    """Parses a machine's name. An IPv6 address stands alone, or in brackets before a port."""
    user, _, address = machine.rpartition("@")
    if address.startswith("[") and "]" in address:
        host, _, rest = address[1:].partition("]")
        if not rest or (rest[0] == ":" and rest[1:].isdecimal()):
            return MachineName(user, host, rest[1:])
    host, colon, port = address.rpartition(":")
    if colon and port.isdecimal() and ":" not in host:
        return MachineName(user, host, port)
    return MachineName(user, address, "")


def addresses(joins: Sequence[str], dialled: str, port: int) -> tuple[str, ...]:
    """Returns addresses to reach an agent directly: its own ones, and the one that SSH has dialled, if any."""
    number = f"[{dialled}]" if ":" in dialled else dialled
    return tuple(dict.fromkeys([*joins, *([f"tcp://{number}:{port}"] if dialled else [])]))
