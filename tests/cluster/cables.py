"""Network namespaces that a test makes itself, joined by a cable that it can pull."""

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator

import pytest


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
