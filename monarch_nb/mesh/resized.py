"""The result of `grow` and `shrink`."""

import operator
from collections.abc import Mapping, Sequence

from msgspec import Struct

from monarch_nb.wire import counted, host_name


class Resized(Struct, frozen=True):
    """A change of a mesh to more hosts, or fewer; shown as one line."""

    mesh: str
    sizes: dict[str, int]  # of the mesh now
    hosts: tuple[str, ...]  # ids of the added or removed hosts
    actors: tuple[str, ...] = ()  # names of the meshes whose actors were created there, or have ended
    removed: str = ""  # the coordinates that the hosts had: "hosts=2"; empty for a mesh that grew
    freed: tuple[str, ...] = ()  # hosts that were returned to their job

    def __repr__(self) -> str:
        shape = ", ".join(f"{label}={size}" for label, size in self.sizes.items())
        count = f"{counted(len(self.hosts), 'host')}"
        names = f" ({', '.join(map(host_name, self.hosts))})" if len(self.hosts) <= 4 else ""
        actors = ", ".join(self.actors)
        if not self.removed:
            created = f", with {actors} created there" if actors else ""
            return f"<{self.mesh!r} {{{shape}}}: {count} more{names}{created}>"
        ended = f", with the actors of {actors} there" if actors else ""
        freed = len(self.freed)
        returned = f"; {counted(freed, 'host')} returned to {'its' if freed == 1 else 'their'} job" if freed else ""
        return f"<{self.mesh!r} {{{shape}}}: {self.removed} removed{names}{ended}{returned}>"


def more_of(more: Mapping[str, object], label: str, name: str) -> object:
    """Returns what `grow(hosts=2)` requests along the dimension of hosts: a number, or names. Raises ValueError."""
    target = _along(more, label, name, f"grow({label}=2)")
    if isinstance(target, (list, tuple)):
        if not target or not all(isinstance(host, str) and host for host in target) or len({*target}) < len(target):
            raise ValueError(f"{name}.grow({label}={target!r}): name machines, each once: {label}=['node7']")
        return tuple(target)
    if isinstance(target, int) and (isinstance(target, bool) or target < 1):
        raise ValueError(f"{name}.grow({label}={target!r}): say how many more, at least 1; shrink() removes hosts")
    return target


def leaving_positions(fewer: Mapping[str, object], label: str, name: str, hosts: Sequence[str]) -> list[int]:
    """Returns the positions, among hosts, that `shrink(hosts=-1)` or `hosts=[1]` means. Raises ValueError."""
    target = _along(fewer, label, name, f"shrink({label}=-1)")
    if isinstance(target, int) and not isinstance(target, bool) and target < 0:
        return list(range(max(0, len(hosts) + target), len(hosts)))
    if isinstance(target, (str, int)) or not isinstance(target, Sequence) or not target:
        raise ValueError(
            f"{name}.shrink({label}={target!r}): say {label}=-1 for the last one, {label}=[1] for that one, or name "
            f"the hosts: {label}=[{host_name(hosts[-1])!r}]"
        )
    names = [host_name(host) for host in hosts]
    positions: list[int] = []
    for entry in target:
        position = hosts.index(entry) if entry in hosts else names.index(entry) if entry in names else entry
        if isinstance(position, (str, bool)) or not 0 <= operator.index(position) < len(hosts):
            raise ValueError(f"{name} has no host {position!r}: it has {len(hosts)}, {', '.join(names[:8])}")
        positions.append(position)
    return sorted(set(positions))


def _along(dims: Mapping[str, object], label: str, name: str, example: str) -> object:
    if list(dims) != [label]:
        labels = ", ".join(dims) or "nothing"
        raise ValueError(f"{name} grows and shrinks along {label!r} alone, got {labels}: {name}.{example}")
    return dims[label]
