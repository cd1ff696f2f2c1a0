"""`enable_transport`: once, before all other calls."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.timeout(120)

TRANSPORTS = """
import logging, sys
from monarch.actor import ChannelTransport, enable_transport, context
from monarch.config import get_global_config
enable_transport(sys.argv[1])
enable_transport(sys.argv[1])
print(get_global_config()["default_transport"])
try:
    enable_transport("tcp://127.0.0.1:1")
except RuntimeError as error:
    print(error)
context()
enable_transport(sys.argv[1])
try:
    enable_transport(ChannelTransport.Local)
except RuntimeError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("requested", "transport", "warning"),
    [
        ("ipc", "ChannelTransport.Unix", ""),
        ("tcp", "ChannelTransport.TcpWithHostname", ""),
        ("tls", "ChannelTransport.Tls", "hosts are connected by TCP"),
        ("metatls", "ChannelTransport.MetaTlsWithIpV6", "hosts are connected by TCP"),
        ("metatls-hostname", "ChannelTransport.MetaTlsWithHostname", "hosts are connected by TCP"),
        ("tcp://127.0.0.1:8080", "tcp://127.0.0.1:8080", ""),
    ],
)
def test_a_transport_is_enabled_once(requested: str, transport: str, warning: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", TRANSPORTS, requested], check=True, capture_output=True, text=True, timeout=50
    )
    first, second, third = done.stdout.splitlines()
    assert first == transport
    assert "only one transport" in second
    assert "must come before any other call" in third
    assert warning in done.stderr
