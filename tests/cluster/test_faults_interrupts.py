"""Ctrl-C at any moment: between messages only, and everything can be used afterwards."""

import pytest

from tests.cluster.fault_tools import Program

pytestmark = pytest.mark.timeout(60)


def test_a_thousand_interrupts_during_sends() -> None:
    with Program("sends", 1000) as program:
        sent, cuts, calls, took = program.line("done").split()
        assert int(sent) == 1000
        assert int(cuts) > 900
        assert int(calls) > 1000
        assert float(took) < 5  # no gap in the numbers holds up what comes after
        assert program.end() == 0


def test_interrupts_during_spawn_heal_and_stop() -> None:
    with Program("cycles", 20) as program:
        cuts, left = program.line("done").split(maxsplit=1)
        assert int(cuts) > 5
        assert left == "[]"
        assert program.end() == 0
