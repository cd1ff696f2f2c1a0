"""Names of machines that are reached by SSH."""

import pytest

from monarch_nb.job import Agent, Running
from monarch_nb.job.adapter import adapter_of
from monarch_nb.job.ssh.machine import read_machine

pytest.importorskip("asyncssh", reason="NOT TESTED HERE: pip install 'monarch-nb[ssh]'")


@pytest.mark.parametrize(
    ("machine", "parts", "line"),
    [
        ("node1", ("", "node1", ""), ["ssh", "node1"]),
        ("me@node1", ("me", "node1", ""), ["ssh", "me@node1"]),
        ("node1:2222", ("", "node1", "2222"), ["ssh", "-p", "2222", "node1"]),
        ("me@10.0.0.7:22", ("me", "10.0.0.7", "22"), ["ssh", "-p", "22", "me@10.0.0.7"]),
        ("a@b@node1", ("a@b", "node1", ""), ["ssh", "a@b@node1"]),
        ("::1", ("", "::1", ""), ["ssh", "::1"]),
        ("me@fd00::7", ("me", "fd00::7", ""), ["ssh", "me@fd00::7"]),
        ("fe80::1%eth0", ("", "fe80::1%eth0", ""), ["ssh", "fe80::1%eth0"]),
        ("fd00::7:2222", ("", "fd00::7:2222", ""), ["ssh", "fd00::7:2222"]),  # an address, as it stands
        ("[fd00::7]", ("", "fd00::7", ""), ["ssh", "fd00::7"]),
        ("me@[fd00::7]:2222", ("me", "fd00::7", "2222"), ["ssh", "-p", "2222", "me@fd00::7"]),
        ("[fd00::7", ("", "[fd00::7", ""), ["ssh", "[fd00::7"]),
        ("[fd00::7]x", ("", "[fd00::7]x", ""), ["ssh", "[fd00::7]x"]),
        ("node:", ("", "node:", ""), ["ssh", "node:"]),
    ],
)
def test_a_machine_is_read_in_its_parts(machine: str, parts: tuple[str, str, str], line: list[str]) -> None:
    assert read_machine(machine) == parts
    assert adapter_of("ssh").shell(Running("7", "", {"trainers_0": Agent(machine)}), "trainers_0") == line
