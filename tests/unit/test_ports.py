"""What tests are given for themselves: two suites at a time have other ports and addresses."""

import subprocess
import sys

import pytest

from scripts.kernels import ROOT
from tests import ports

pytestmark = pytest.mark.timeout(60)
OTHER = """
import sys
from tests.ports import free_ports, own_address
print(*[own_address() for _ in range(254)], *free_ports(500), flush=True)
sys.stdin.read()
"""


def other() -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", OTHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )


def test_simultaneous_suites_get_different_ports_and_later_ones_reuse_them() -> None:
    mine = {ports.own_address(), *map(str, ports.free_ports(2))}
    with other() as first, other() as second:
        assert first.stdout is not None
        assert second.stdout is not None
        given = [set(each.stdout.readline().split()) for each in (first, second) if each.stdout is not None]
        assert all(len(each) > 254 for each in given)
        assert not given[0] & given[1]
        assert not mine & (given[0] | given[1])
        first.kill()  # it cannot say that it is done
        first.wait()
        with other() as third:
            assert third.stdout is not None
            assert set(third.stdout.readline().split()) & given[0]
