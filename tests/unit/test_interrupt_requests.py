"""Interrupts as a process handles them."""

from typing import Any
from unittest.mock import Mock

from monarch_nb.runtime.actors.interrupts import Interrupts
from monarch_nb.runtime.verbs import Interrupt


def test_an_interrupt_that_comes_twice_strikes_once() -> None:
    calls: list[dict[str, object]] = [{"c1": object()}]
    cell: Any = Mock(on_interrupt=None, running=("c1", "step", 0.0), running_now=lambda: calls[-1])
    cell.executor.thread.ident = 0
    clock, askers = Mock(), [Mock() for _ in range(4)]
    interrupts = Interrupts({("m", 3): cell}, Mock(), clock, Mock())
    for asker in askers[:2]:
        interrupts.interrupt(Interrupt("m", "one"), asker)
        assert not asker.reply.called
    (_, look), _ = clock.every.call_args
    calls.append({"c2": object()})  # the next call, which is not the target
    assert look() is False
    interrupts.interrupt(Interrupt("m", "one"), askers[2])
    assert cell.interrupt.call_count == clock.every.call_count == 1
    for asker in askers[:3]:
        (((reply,), _),) = asker.reply.call_args_list
        assert (reply.endpoint, reply.ended) == ("step", True)
    interrupts.interrupt(Interrupt("m", "two"), askers[3])
    assert cell.interrupt.call_count == 2
