"""An agent's part in casts that go wrong: reports to callers, and stand-ins for lost messages."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from monarch_nb.host.casting import Caster
from monarch_nb.host.protocol import AskCasts, CastState, CastStates
from monarch_nb.host.sender import AgentSender
from monarch_nb.host.verbs import CASTS
from monarch_nb.routing import plan_cast
from monarch_nb.transport import Parcel, UnreachableError
from monarch_nb.wire import (
    REPLY,
    Asker,
    Folded,
    Header,
    Kind,
    Layout,
    Run,
    Status,
    agent_of,
    encode_body,
    fold,
    unfold_each,
)
from monarch_nb.wire.header import SKIP

HEAD = "h0/agent"


class Wire:
    def __init__(self) -> None:
        self.sent: list[Header] = []
        self.folded: list[list[int]] = []  # the indices in each folded answer
        self.broken: set[str] = set()
        self.unknown: set[str] = set()  # addresses that cannot be reached yet
        self.tried: Counter[str] = Counter()  # attempts by address
        self.due: list[Callable[[], None]] = []  # deferred calls
        self.now = 100.0

    def send(self, header: Header, parcel: Parcel, *, lane: int = 0) -> None:
        if header.dst in self.broken:
            raise OSError("cut")
        if header.dst in self.unknown:
            self.tried[header.dst] += 1
            raise UnreachableError("its agent was restarted")
        self.sent.append(header)
        if header.kind == Kind.FOLDED:
            self.folded.append([part.index for part, _ in unfold_each(header, parcel.bodies)])

    def call_later(self, seconds: float, call: Callable[[], None]) -> None:
        due = self.now + seconds

        def run() -> None:
            self.now = max(self.now, due)
            call()

        self.due.append(run)

    def select(self, kind: Kind, method: str = "") -> list[Header]:
        return [header for header in self.sent if header.kind == kind and method in ("", header.method)]


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
def caster(wire: Wire) -> Caster:
    return Caster(wire, AgentSender(wire, HEAD), wire.call_later, lambda: wire.now)


def cast(caster: Caster, hosts: int, *, per_host: int = 1, fanout: int = 1, port: int = 7) -> Header:
    """A cast to every rank, headed by this agent."""
    layout = Layout("p", tuple(f"h{n}" for n in range(hosts)), per_host)
    [(dst, plan)] = plan_cast(layout, [Run(0, hosts * per_host, seq=4)], fanout=fanout)
    assert dst == HEAD
    header = Header(Kind.CAST, dst, "c/c.0", mesh="a", sender="root", method="step", port=port, call="c:1", plan=plan)
    caster.cast(header, Parcel([b"body"]))
    return header


def reasons(wire: Wire) -> dict[int, int]:
    """The rank, by index, of each message returned to the caller."""
    return {reply.index: reply.rank for reply in wire.select(Kind.RETURNED) if reply.dst == "c/c.0" and reply.port == 7}


def return_of(header: Header, by: str) -> Header:
    return msgspec.structs.replace(header, kind=int(Kind.RETURNED), dst=header.src, src=by, status=int(header.kind))


def test_returned_messages_are_reported_without_delaying_the_next(caster: Caster, wire: Wire) -> None:
    cast(caster, 1, per_host=3)
    call = wire.select(Kind.CALL)[1]
    caster.reply(return_of(call, call.dst), Parcel([msgspec.msgpack.encode(["no room"])]))
    assert reasons(wire) == {1: 1}
    [skip] = wire.select(Kind.CALL, SKIP)
    assert (skip.dst, skip.mesh, skip.rank, skip.sender, skip.seq, skip.port) == ("h0/p.1.0", "a", 1, "root", 4, 0)


def test_a_cast_to_an_ended_process_first_skips_it_then_returns(caster: Caster, wire: Wire) -> None:
    caster.proc_gone("h0/p.1.0", "Killed(sig=9)")
    cast(caster, 1, per_host=3)
    caster.lost(wire.select(Kind.CALL)[1], "it has ended")
    assert reasons(wire) == {}
    assert [header.rank for header in wire.select(Kind.CALL, SKIP)] == [1]
    for call in wire.due:
        call()
    assert reasons(wire) == {1: 1}


def test_a_stand_in_that_comes_back_is_not_sent_again(caster: Caster, wire: Wire) -> None:
    cast(caster, 1)
    [call] = wire.select(Kind.CALL)
    caster.lost(call, "cut")
    [skip] = wire.select(Kind.CALL, SKIP)
    caster.reply(return_of(skip, skip.dst), Parcel([msgspec.msgpack.encode(["gone"])]))
    caster.lost(skip, "cut")
    assert wire.select(Kind.CALL, SKIP) == [skip]


def test_a_host_lost_after_taking_a_cast_leaves_nobody_waiting(caster: Caster, wire: Wire) -> None:
    cast(caster, 4, fanout=1)  # h0 -> h1 -> h2 -> h3
    [branch] = [header for header in wire.select(Kind.CAST) if header.method == "step"]
    assert branch.dst == "h1/agent"
    caster.host_lost("h1", "its agent has ended")
    assert reasons(wire) == {1: 1, 2: 2, 3: 3}
    skips = wire.select(Kind.CAST, SKIP)
    assert [header.dst for header in skips] == ["h1/agent", "h2/agent"]  # h2 passes it on to h3
    assert all(header.sender == "root" and header.plan is not None and header.port == 0 for header in skips)
    assert [run.seq for run in skips[1].plan.runs] == [4]  # type: ignore[union-attr]
    assert not caster._casts[branch.port].fold.complete  # its own proc has still to answer


def test_overdue_answers_are_passed_on_with_the_last_folded_ones(caster: Caster, wire: Wire) -> None:
    cast(caster, 4, fanout=1)
    [branch] = [header for header in wire.select(Kind.CAST) if header.method == "step"]

    def reply_folded(*ranks: int) -> None:
        replies = [Folded.of(Header(Kind.REPLY, HEAD, "h1/p", port=branch.port, index=n), [b"%d" % n]) for n in ranks]
        caster.reply(Header(Kind.FOLDED, HEAD, "h1/agent", port=branch.port), Parcel(fold(replies)))

    [own] = wire.select(Kind.CALL)
    caster.reply(Header(Kind.REPLY, HEAD, own.dst, port=own.port, index=0), Parcel([b"0"]))
    wire.now += 60.0  # a busy agent that has not checked the time
    reply_folded(1, 2, 3)
    assert [rank for parcel in wire.folded for rank in parcel] == [0, 1, 2, 3]
    assert caster._casts == {}


def test_answered_ranks_below_a_lost_host_are_not_reported(caster: Caster, wire: Wire) -> None:
    cast(caster, 3, fanout=1)
    [branch] = wire.select(Kind.CAST)
    answer = Header(Kind.REPLY, HEAD, "h2/p.2.0", port=branch.port, index=2)
    caster.reply(answer, Parcel([b"done"]))
    caster.host_lost("h1", "its agent has ended")
    assert reasons(wire) == {1: 1}


def test_a_lost_host_elsewhere_in_the_tree_changes_nothing(caster: Caster, wire: Wire) -> None:
    cast(caster, 3, fanout=1)
    before = list(wire.sent)
    caster.host_lost("h2", "its agent has ended")  # h1 sends to it, and reports
    caster.host_lost("h9", "its agent has ended")
    assert wire.sent == before


def test_unsendable_parts_of_a_cast_skip_the_lost_host(caster: Caster, wire: Wire) -> None:
    wire.broken = {"h1/agent"}
    cast(caster, 3, fanout=1)
    [call] = wire.due
    call()
    assert reasons(wire) == {1: 1, 2: 2}
    assert [header.dst for header in wire.select(Kind.CAST, SKIP)] == ["h2/agent"]


def test_stand_ins_and_answers_reach_destinations_that_become_known_later(caster: Caster, wire: Wire) -> None:
    wire.unknown = {"h1/agent", "c/c.0"}
    cast(caster, 2)
    for _ in range(3):
        due, wire.due = wire.due, []
        for call in due:
            call()
    assert wire.sent == [header for header in wire.sent if header.dst.startswith("h0/")]
    wire.unknown = set()
    for call in wire.due:
        call()
    assert [header.dst for header in wire.select(Kind.CAST, SKIP)] == ["h1/agent"]
    assert reasons(wire) == {1: 1}


def test_nobody_is_waited_for_without_end(caster: Caster, wire: Wire) -> None:
    wire.unknown = {"h1/agent", "c/c.0"}
    cast(caster, 2)
    for _ in range(100):
        due, wire.due = wire.due, []
        for call in due:
            call()
    assert 5 < wire.tried["h1/agent"] < 20
    assert 5 < wire.tried["c/c.0"] < 20


def test_a_broadcast_is_answered_for_by_nobody_here(caster: Caster, wire: Wire) -> None:
    cast(caster, 2, port=0)
    caster.host_lost("h1", "its agent has ended")
    assert wire.select(Kind.RETURNED) == []


def test_skips_reach_the_procs_of_a_host_as_calls(caster: Caster, wire: Wire) -> None:
    layout = Layout("p", ("h0",), 2)
    [(dst, plan)] = plan_cast(layout, [Run(0, 2, seq=9)])
    caster.cast(Header(Kind.CAST, dst, "c/c.0", mesh="a", sender="root", method=SKIP, plan=plan), Parcel([b""]))
    skips: list[Any] = [(header.dst, header.seq, header.method) for header in wire.select(Kind.CALL)]
    assert skips == [("h0/p.0.0", 9, SKIP), ("h0/p.1.0", 9, SKIP)]


# -- a relay is lost ---------------------------------------------------------------------------------------------------


def ask(caster: Caster, *ports: int, src: str = "c/c.0", final: bool = False) -> list[CastState]:
    asker: Asker[CastStates] = Asker(Header(Kind.CONTROL, HEAD, src), lambda *_: None)
    return list(caster.states(AskCasts(ports, final), asker).states)


def test_an_agent_knows_which_casts_came_and_who_has_answered(caster: Caster, wire: Wire) -> None:
    cast(caster, 1, per_host=3)
    port = wire.select(Kind.CALL)[0].port
    assert ask(caster, 7, 8) == [CastState(True, (0, 1, 2)), CastState(False)]
    assert ask(caster, 7, src="d/c.0") == [CastState(False)]
    caster.reply(Header(Kind.REPLY, HEAD, "h0/p.0.0", port=port, index=1), Parcel([b"1"]))
    assert ask(caster, 7) == [CastState(True, (0, 2))]
    wire.unknown.add("c/c.0")
    for index in (0, 2):
        caster.reply(Header(Kind.REPLY, HEAD, f"h0/p.{index}.0", port=port, index=index), Parcel([b"1"]))
    assert ask(caster, 7) == [CastState(True, None)]  # all have answered, and the last answers are tried again
    wire.unknown.clear()
    for call in wire.due:
        call()
    assert ask(caster, 7) == [CastState(True)]


def test_a_cast_that_was_declared_lost_is_not_carried_out(caster: Caster, wire: Wire) -> None:
    assert ask(caster, 7) == [CastState(False)]
    cast(caster, 1)
    assert len(wire.select(Kind.CALL)) == 1
    assert ask(caster, 9, final=True) == [CastState(False)]
    cast(caster, 1, port=9)
    assert len(wire.select(Kind.CALL)) == 1


@pytest.mark.parametrize(
    ("state", "text"),
    [(CastState(False), "it has not run"), (CastState(True), "it has run"), (CastState(True, (1,)), "")],
)
def test_replies_that_a_relay_took_along_are_lost(wire: Wire, state: CastState, text: str) -> None:
    sender = AgentSender(wire, HEAD)
    caster = Caster(wire, sender, wire.call_later, lambda: wire.now)
    cast(caster, 2)
    caster.relay_changed("k/c.0")
    for final in (False, True):
        [question] = [header for header in wire.sent if header.method == CASTS.name]
        assert (question.dst, reasons(wire)) == (agent_of("h1"), {})
        wire.sent.remove(question)
        reply = Header(Kind.CONTROL, HEAD, question.dst, method=REPLY, port=question.port, status=Status.VALUE)
        sender.replied(reply, encode_body(CastStates((state,))))
        due, wire.due = wire.due, []
        if not final:
            for call in due:
                call()
        if not text:
            assert not due
            break
    assert reasons(wire) == ({1: 1} if text else {})
    assert bool(wire.select(Kind.CAST, SKIP)) == (text == "it has not run")
