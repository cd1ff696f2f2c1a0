"""Network namespaces that a test makes itself, joined by a cable that it can pull."""

import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

from monarch_nb.transport import Keys
from tests.cluster.hosts_tools import HostProcess

Expect = Callable[..., None]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def cable() -> Iterator[tuple[str, str]]:
    """Names of two namespaces with 10.213.77.1 and .2; the ends of the cable have the same names."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("NOT TESTED HERE: a real cut between hosts needs root and `ip` (iproute2) for network namespaces")
    names = tuple(f"mnb{secrets.token_hex(3)}{end}" for end in "ab")
    try:
        ip("netns", "add", names[0])
    except subprocess.CalledProcessError as error:
        pytest.skip(f"NOT TESTED HERE: this system lets nobody make network namespaces ({error.stderr.strip()})")
    try:
        ip("netns", "add", names[1])
        ip("link", "add", names[0], "netns", names[0], "type", "veth", "peer", "name", names[1], "netns", names[1])
        for number, name in enumerate(names, 1):
            ip("-n", name, "address", "add", f"10.213.77.{number}/24", "dev", name)
            ip("-n", name, "link", "set", name, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names[0], names[1]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


@contextmanager
def bridged(count: int) -> Iterator[list[str]]:
    """Names of `count` connected namespaces, 10.213.91.1 and on; this one is 10.213.91.254."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("NOT TESTED HERE: hosts with networks of their own need root and `ip` (iproute2)")
    bridge = f"mnb{secrets.token_hex(3)}"
    names = [f"{bridge}{number}" for number in range(1, count + 1)]
    try:
        ip("link", "add", bridge, "type", "bridge")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"NOT TESTED HERE: this system lets nobody make bridges ({error.stderr.strip()})")
    try:
        ip("address", "add", "10.213.91.254/24", "dev", bridge)
        ip("link", "set", bridge, "up")
        for number, name in enumerate(names, 1):
            ip("netns", "add", name)
            ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", name, "master", bridge, "up")
            ip("-n", name, "address", "add", f"10.213.91.{number}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)
        subprocess.run(["ip", "link", "delete", bridge], check=False, capture_output=True)


@contextmanager
def bridged_hosts(folder: Path, count: int) -> Iterator[tuple[Path, list[str]]]:
    """A host in each of `count` namespaces: the key, and the endpoints, which this namespace reaches."""
    key = folder / "job.key"
    Keys.load_or_create(key)
    with bridged(count) as names:
        agents: list[HostProcess] = []
        try:
            for number, name in enumerate(names, 1):
                prefix = ("ip", "netns", "exec", name)
                agents.append(HostProcess(folder, key=key, tcp=f"tcp://10.213.91.{number}:0", before=prefix))
            yield key, [agent.endpoint for agent in agents]
        finally:
            for agent in agents:
                agent.close()


@contextmanager
def controller_of_both(
    cable: tuple[str, str], folder: Path, program: str, **environment: str
) -> Iterator[tuple[Callable[[str], None], Expect]]:
    """A controller at one end of the cable, with the key and both hosts' endpoints as arguments.

    Yields a function that sends it a word, and one that expects one of some words; it must exit with 0.
    """
    key = folder / "job.key"
    Keys.load_or_create(key)
    agents: list[HostProcess] = []
    controller = None
    try:
        for number, name in enumerate(cable, 1):
            prefix = ("ip", "netns", "exec", name)
            agents.append(HostProcess(folder, key=key, tcp=f"tcp://10.213.77.{number}:0", before=prefix))
        with open(folder / "controller.log", "wb") as errors:
            controller = subprocess.Popen(
                ["ip", "netns", "exec", cable[0], sys.executable, "-c", program, str(key),
                 *(agent.endpoint for agent in agents)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
                env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])},
            )  # fmt: skip
        assert controller.stdin is not None
        assert controller.stdout is not None
        with controller.stdin as stdin, controller.stdout as stdout:
            yield lambda word: _write(stdin, word), lambda *words: _expect(stdout, words, folder)
        assert controller.wait(20) == 0
    finally:
        if controller is not None:
            controller.kill()
            controller.wait()
        for agent in agents:
            agent.close()


def _write(stdin: IO[str], word: str) -> None:
    stdin.write(f"{word}\n")
    stdin.flush()


def _expect(stdout: IO[str], words: tuple[str, ...], folder: Path) -> None:
    assert stdout.readline() in [f"{word}\n" for word in words], (folder / "controller.log").read_text()
