"""Resources of a test suite: two suites at a time have different ports and addresses."""

import subprocess
import sys

import pytest

from scripts.kernels import ROOT
from tests import ports

pytestmark = pytest.mark.timeout(60)
OTHER_SUITE = """
import sys
from tests.ports import free_ports, own_address
print(*[own_address() for _ in range(254)], *free_ports(500), flush=True)
sys.stdin.read()
"""


def other_suite() -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", OTHER_SUITE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )


def test_simultaneous_suites_get_different_ports_and_later_ones_reuse_them() -> None:
    own_ports = {ports.own_address(), *map(str, ports.free_ports(2))}
    with other_suite() as first, other_suite() as second:
        assert first.stdout is not None
        assert second.stdout is not None
        shares = [set(suite.stdout.readline().split()) for suite in (first, second) if suite.stdout is not None]
        assert all(len(share) > 254 for share in shares)
        assert not shares[0] & shares[1]
        assert not own_ports & (shares[0] | shares[1])
        first.kill()  # it cannot say that it is done
        first.wait()
        with other_suite() as third:
            assert third.stdout is not None
            assert set(third.stdout.readline().split()) & shares[0]
