"""Requirements for the hosts of one mesh of a job."""

from collections.abc import Mapping

import msgspec

from monarch_nb.wire import converted


class Role(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One mesh of a job: `hosts` machines with at least these resources; unset ones are left to the scheduler.

    A job may have hosts of several kinds: `{"trainers": Role(hosts=4, gpus=8), "loaders": Role(hosts=2, cpus=16)}`.
    A scheduler that does not support one of the fields refuses the job.
    """

    hosts: int = 1
    spares: int = 0  # additional hosts that join, and wait to replace lost ones
    gpus: int | None = None  # on each host, checked when it joins; a host with fewer is refused
    cpus: int | None = None  # on each host
    memory: str = ""  # on each host, in the scheduler's notation: 64G
    image: str = ""  # the container image, for schedulers that run images
    env: dict[str, str] = {}  # laid over the environment of its hosts


def read_roles(meshes: "Mapping[str, int | Role]") -> dict[str, Role]:
    """Returns the roles of a job's meshes, which may also be numbers of hosts. Raises ValueError."""
    roles = {}
    for name, entry in meshes.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(f"{name!r} cannot name a mesh: it must be a name as Python has them")
        role = entry if isinstance(entry, Role) else Role(hosts=entry)
        if isinstance(role.hosts, bool) or not isinstance(role.hosts, int) or role.hosts < 1:
            raise ValueError(f"{name}={role.hosts!r}: a mesh has a whole number of hosts, at least 1")
        if isinstance(role.spares, bool) or not isinstance(role.spares, int) or role.spares < 0:
            raise ValueError(f"{name}: spares={role.spares!r} must be a whole number of hosts, 0 for none")
        roles[name] = role
    return roles


def saved_roles(roles: Mapping[str, Role]) -> dict[str, object]:
    """Returns roles as plain data."""
    data: dict[str, object] = msgspec.to_builtins(dict(roles))
    return data


def loaded_roles(data: Mapping[str, object]) -> dict[str, Role]:
    """Restores roles from plain data. Raises ValueError."""
    return converted(dict(data), dict[str, Role])
