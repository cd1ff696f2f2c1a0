"""The ids of hosts, and what people call them.

An id such as `node7.1f2e3d` has the name of the machine and a token: several hosts may be on one machine, and another
kernel's may have been there before. People are shown `node7`, and of a second one there that this process meets
`node7·2`: so the same program shows the same names each time.
"""

import platform
import re
import threading

_LONGEST = 20  # characters of a machine's name in an id: sockets lie in folders of that name, and their paths are short
_ID = re.compile(r"(.+)\.(?:[0-9a-f]{6}|[0-9a-f]{10})")
_met: dict[str, dict[str, str]] = {}  # by the machine's name: its hosts, in the order in which they were met, as shown
_meeting = threading.Lock()


def host_id(token: str, machine: str | None = None) -> str:
    """The id of a host on a machine, this one if none is named."""
    name = re.sub(r"[^A-Za-z0-9_-]", "_", (platform.node() if machine is None else machine).partition(".")[0])
    if len(name) > _LONGEST:
        name = f"{name[: _LONGEST // 2 - 1]}~{name[-_LONGEST // 2 :]}"
    return f"{name or 'host'}.{token}"


def host_name(host: str) -> str:
    """What people are shown of a host's id, or of several with commas; an id that somebody chose is shown as it is."""
    if ", " in host:
        return ", ".join(map(host_name, host.split(", ")))
    parts = _ID.fullmatch(host)
    if parts is None:
        return host
    machine = parts[1]
    with _meeting:
        names = _met.setdefault(machine, {})
        return names.setdefault(host, f"{machine}·{len(names) + 1}" if names else machine)


def forget_host_names() -> None:
    """Another cluster begins: nothing of the one before is met again."""
    with _meeting:
        _met.clear()
