"""What went wrong with an SSH connection, in words, and what to do."""

import errno
import socket
from pathlib import Path
from typing import Any, NamedTuple

import asyncssh

from monarch_nb.job.ssh.places import read_machine

_SSHD = 22
_NO_WAY = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EADDRNOTAVAIL)


class Meant(NamedTuple):
    """What a machine's name means to SSH, once its configuration was read."""

    name: str  # as users write it
    host: str
    port: int
    jumps: bool = False  # by another machine, or a command, which dials it

    def __str__(self) -> str:
        there, alias = f"port {self.port} of {self.host}", read_machine(self.name).host
        return there if alias == self.host else f"{there} (which {alias} is in ~/.ssh/config)"


def meant(name: str, given: dict[str, Any]) -> Meant:
    """What SSH dials for a machine; `given` are asyncssh's options. Its name itself where nobody can say."""
    host = read_machine(name).host
    own = Path.home() / ".ssh" / "config"
    config = given.get("config") or ([own] if own.is_file() else [])
    try:
        number = {"port": given["port"]} if "port" in given else {}
        options = asyncssh.SSHClientConnectionOptions(host=host, config=config, **number)
        jumps = bool(options.tunnel or options.proxy_command or given.get("tunnel"))
        return Meant(name, options.host or host, options.port or _SSHD, jumps)
    except (OSError, ValueError, asyncssh.Error):
        return Meant(name, host, int(given.get("port", _SSHD)))


def words(error: BaseException) -> str:
    """Its text without numbers that nobody knows, or the name of its class."""
    told = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return told.strip() or type(error).__name__


def advice(error: BaseException, to: Meant, seconds: float) -> str:
    """What went wrong with a connection that was tried for so long, and what to do."""
    alone = read_machine(to.name)
    by_hand = (
        f"ssh {'-p ' + alone.port + ' ' if alone.port else ''}{alone.user + '@' if alone.user else ''}{alone.host}"
    )
    if isinstance(error, asyncssh.PermissionDenied):
        return (
            f"the login was refused ({words(error)}): it must go without a password. Put a key there (ssh-copy-id "
            f"{to.name}), or name one with ssh_args='-i FILE'; keys with a passphrase need an ssh-agent"
        )
    if isinstance(error, asyncssh.HostKeyNotVerifiable):
        return f"its host key is not known here ({words(error)}): log in once by hand ({by_hand}) and check it"
    if isinstance(error, TimeoutError) or getattr(error, "errno", 0) == errno.ETIMEDOUT:
        return f"no answer from {to} within {seconds:g} s: no such machine, or a firewall between"
    if isinstance(error, ConnectionRefusedError):
        return (
            f"{to} refuses the connection: no SSH server listens there. Look whether sshd runs on that machine, and at "
            "which port ('me@node:2222' names another one)"
        )
    if isinstance(error, socket.gaierror):
        return (
            f"no machine is known here as {to.host!r} ({error.strerror}): is it spelt right? Else give its address, or "
            f"a HostName for it in ~/.ssh/config, and try it by hand ({by_hand})"
        )
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}. It was named for the connection: see ssh_args and known_hosts"
    if isinstance(error, OSError) and error.errno in _NO_WAY:
        return f"no way leads from here to {to} ({error.strerror}): is that machine up, and this one in its network?"
    if isinstance(error, asyncssh.ConnectionLost | ConnectionError):
        return f"{to} broke the connection off ({words(error)}): try it by hand ({by_hand}), and see sshd's log there"
    return f"no connection to {to}: {words(error)}"
