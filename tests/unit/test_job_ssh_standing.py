"""An SSH connection that is cut and restored, the message about one that fails, and where agents are dialled."""

import errno
import socket
from pathlib import Path

import pytest

from monarch_nb.job.ssh.adapter import addresses
from monarch_nb.job.ssh.machine import ConnectionState


def test_a_cut_connection_is_retried_at_growing_intervals_with_its_error() -> None:
    connection = ConnectionState()
    assert (connection.cut, connection.trouble(5.0)) == (False, "")
    connection.lost(10.0, "no answer to keepalives")
    assert connection.cut
    assert connection.trouble(12.2) == "the SSH connection is cut for 2 s (no answer to keepalives)"
    pauses = []
    for _ in range(8):
        pauses.append(connection.pause)
        connection.failed("port 22 of node1 refuses the connection")
    assert pauses == sorted(pauses)
    assert (pauses[0], connection.pause) == (0.5, 3.0)
    connection.lost(30.0, "again")
    assert connection.trouble(70.0) == (
        "the SSH connection is cut for 60 s (no answer to keepalives); the last attempt to have it again: port 22 of "
        "node1 refuses the connection"
    )
    connection.back()
    assert (connection.cut, connection.trouble(71.0)) == (False, "")
    connection.lost(80.0, "the other end closed it")
    assert connection.trouble(80.0) == "the SSH connection is cut for 0 s (the other end closed it)"
    assert connection.pause == 0.5


def test_an_agent_is_dialled_at_the_address_ssh_used() -> None:
    joins = ["tcp://box:5000", "tcp://10.0.0.7:5000"]
    assert addresses(joins, "192.0.2.9", 5000) == (*joins, "tcp://192.0.2.9:5000")
    assert addresses(joins, "10.0.0.7", 5000) == tuple(joins)
    assert addresses(joins, "2001:db8::9", 5000) == (*joins, "tcp://[2001:db8::9]:5000")
    assert addresses(joins, "", 5000) == tuple(joins)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connect call failed ('10.1.2.3', 2022)"),
         "port 2022 of 10.1.2.3 (which box is in ~/.ssh/config) refuses the connection: no SSH server listens there."),
        (socket.gaierror(-2, "Name or service not known"), "no machine is known here as '10.1.2.3' (Name or service"),
        (OSError(errno.EHOSTUNREACH, "No route to host"), "no way leads from here to port 2022 of 10.1.2.3 (which box"),
        (TimeoutError(), "no answer from port 2022 of 10.1.2.3 (which box is in ~/.ssh/config) within 20 s: "),
        (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), "broke the connection off ("),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "/no/key"), "/no/key: No such file or directory"),
    ],
    ids=["refused", "name", "route", "silence", "reset", "file"],
)  # fmt: skip
def test_failures_name_the_dialled_address_the_alias_and_the_remedy(
    error: OSError, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("asyncssh", reason="NOT TESTED HERE: pip install 'monarch-nb[ssh]'")
    from monarch_nb.job.ssh.machine import advice, dial_target

    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "config").write_text("Host box\n  HostName 10.1.2.3\n  Port 2022\nHost far\n  ProxyJump box\n")
    message = advice(error, dial_target("me@box", {}), 20.0)
    assert text in message
    assert "Errno" not in message
    assert (dial_target("me@box", {}).jumps, dial_target("far", {}).jumps) == (False, True)
    assert str(dial_target("node7", {})) == "port 22 of node7"
    assert str(dial_target("node7:99", {"port": 99})) == "port 99 of node7"
