"""The ids of hosts, and the names that a controller gives them.

An id such as `node7.1f2e3d` has the name of the machine and a token: several hosts may be on one machine, and another
kernel may have started one there before. Users see `node7`, and for a second one there that the controller meets
`node7·2`: so the same program shows the same names each time.

Only a controller gives names. Other processes meet hosts in another order and would call the same host something else,
so they write ids; a controller replaces these in texts that arrive.
"""

import platform
import re
import threading

_LONGEST = 20  # characters of a machine's name in an id: sockets are in folders of that name, and their paths are short
_TOKEN = r"\.(?:[0-9a-f]{10}|[0-9a-f]{6})"
_ID = re.compile(rf"(.+){_TOKEN}")
# An id in a text, also at the start of an address and before the full stop of a sentence, but not in a path.
_WRITTEN = re.compile(rf"(?<![\w./~-])[\w~-]+{_TOKEN}(?!\.?[\w-])")
_names: dict[str, str] | None = None  # by id; None in a process that is no controller
_counts: dict[str, int] = {}  # of hosts, by the machine's name
_naming = threading.Lock()


def host_id(token: str, machine: str | None = None) -> str:
    """Returns the id of a host on a machine, by default this one."""
    name = re.sub(r"[^A-Za-z0-9_-]", "_", (platform.node() if machine is None else machine).partition(".")[0])
    if len(name) > _LONGEST:
        name = f"{name[: _LONGEST // 2 - 1]}~{name[-_LONGEST // 2 :]}"
    return f"{name or 'host'}.{token}"


def host_name(host: str) -> str:
    """Returns the name that a controller gives to a host, or to each of several with commas between them.

    In other processes, and for an id chosen by a user, it is the id.
    """
    if _names is None:
        return host
    if ", " in host:
        return ", ".join(map(host_name, host.split(", ")))
    parts = _ID.fullmatch(host)
    if parts is None:
        return host
    with _naming:
        if host not in _names:
            machine = parts[1]
            count = _counts[machine] = _counts.get(machine, 0) + 1
            _names[host] = machine if count == 1 else f"{machine}·{count}"
        return _names[host]


def with_host_names(text: str) -> str:
    """Returns a text, such as another process's error, with the ids of hosts replaced by their names here.

    Ids of unknown hosts stay, and so does the whole text in a process that is no controller.
    """
    if not _names or "." not in text:
        return text
    names = _names
    return _WRITTEN.sub(lambda match: names.get(match[0], match[0]), text)


def begin_host_names() -> None:
    """Makes this process the controller of a new cluster, which gives names from now on; earlier names are void."""
    global _names
    with _naming:
        _names = {}
        _counts.clear()
