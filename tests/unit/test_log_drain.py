"""Output to be shown before a reply: how long it is awaited, and to which call it belongs."""

import random
import threading
from typing import Any

import pytest
from msgspec import Struct

from monarch_nb.logs.lines import Written
from monarch_nb.logs.mesh_logs import only_call
from monarch_nb.logs.receiver import ACKNOWLEDGED, FORMER, INCARNATIONS, Drain, LogReceiver, ProcessLog
from monarch_nb.logs.verbs import TAIL, Follow, LogBlock, LogChunk, Took
from monarch_nb.runtime.actors.hosting import LogPositions
from monarch_nb.wire import Verb

pytestmark = pytest.mark.timeout(30)


def chunk(address: str, data: bytes, offset: int, *, ended: bool = False) -> LogChunk:
    block = LogBlock(1, 0, 1.0, "c:1", data)
    return LogChunk(address, offset, offset + len(data), (block,) if data else (), ended=ended)


def log(address: str = "h/p.0.0") -> ProcessLog:
    return ProcessLog(address, 100, lambda _: "")


def test_a_drain_lasts_while_something_comes_and_gives_up_in_silence() -> None:
    arriving = log()
    drain = Drain({"h/p.0.0": 100}, 0.0, silence=1.0, limit=10.0)
    assert drain.patience({"h/p.0.0": arriving}, 0.0) == 1.0
    arriving.feed(chunk("h/p.0.0", b"x" * 50, 0), 0.0)
    assert drain.patience({"h/p.0.0": arriving}, 0.9) == pytest.approx(1.0), "half of the output has come"
    assert drain.patience({"h/p.0.0": arriving}, 1.4) == pytest.approx(0.5)
    arriving.feed(chunk("h/p.0.0", b"x" * 50, 50), 0.0)
    assert drain.patience({"h/p.0.0": arriving}, 1.5) is None
    silent = Drain({"h/p.0.0": 200}, 0.0, silence=1.0, limit=10.0)
    assert [silent.patience({"h/p.0.0": arriving}, now) for now in (0.0, 1.0)] == [1.0, 0.0]


def test_a_drain_ends_though_output_never_does() -> None:
    arriving = log()
    drain = Drain({"h/p.0.0": 1 << 40}, 0.0, silence=1.0, limit=10.0)
    for tenth in range(99):
        arriving.feed(chunk("h/p.0.0", b"x", tenth), 0.0)
        assert drain.patience({"h/p.0.0": arriving}, tenth / 10)
    arriving.feed(chunk("h/p.0.0", b"x", 99), 0.0)
    assert drain.patience({"h/p.0.0": arriving}, 10.0) == 0.0


def test_a_drain_waits_neither_for_dead_nor_for_unfollowed_processes() -> None:
    dead, busy, silent = log(), log("h/p.1.0"), log("h/p.2.0")
    dead.feed(chunk("h/p.0.0", b"last\n", 0, ended=True), 0.0)
    assert (
        Drain({"h/p.0.0": 1 << 62, "h/q.0.0": 5}, 0.0, silence=1.0, limit=9.0).patience({"h/p.0.0": dead}, 0.0) is None
    )
    drain = Drain({"h/p.2.0": 5}, 0.0, silence=1.0, limit=9.0)
    logs = {"h/p.1.0": busy, "h/p.2.0": silent}
    assert drain.patience(logs, 0.0) == 1.0
    busy.feed(chunk("h/p.1.0", b"much\n", 0), 0.0)
    assert drain.patience(logs, 1.0) == 0.0


@pytest.mark.parametrize("seed", range(20))
def test_after_a_drain_every_line_before_the_replies_was_shown(seed: int) -> None:
    """Chunks of several processes in any mixture; a drain ends only after the listeners."""
    chance = random.Random(seed)
    messages: list[tuple[str, Verb[Any, Any], Struct]] = []
    receiver = LogReceiver(lambda *message: messages.append(message), lambda _: "")
    addresses = [f"h/p.{rank}.0" for rank in range(4)]
    texts = {address: b"".join(b"%d\n" % number for number in range(chance.randrange(1, 300))) for address in addresses}
    shown: list[Written] = []
    receiver.listen(lambda _, lines: shown.extend(lines))
    for address in addresses:
        receiver.follow(address)
    assert messages == [("h/agent", TAIL, Follow((address,))) for address in addresses]
    positions = {address: chance.randrange(1, len(text) + 1) for address, text in texts.items()}

    def arrive() -> None:
        offsets = dict.fromkeys(addresses, 0)
        while pending := [address for address in addresses if offsets[address] < len(texts[address])]:
            address = chance.choice(pending)
            data = texts[address][offsets[address] : offsets[address] + chance.randrange(1, 60)]
            receiver.take([chunk(address, data, offsets[address])], "h/agent")
            offsets[address] += len(data)

    arriving = threading.Thread(target=arrive)
    arriving.start()
    assert receiver.drain(positions, silence=10.0, limit=20.0)
    before = {address: "".join(lines.text for lines in shown if lines.address == address) for address in addresses}
    arriving.join()
    for address, text in texts.items():
        prefix = text[: positions[address]].rpartition(b"\n")[0]
        assert before[address].encode().startswith(prefix)
        assert "".join(lines.text for lines in shown if lines.address == address) == text.decode()


def take(receiver: LogReceiver, arrived: LogChunk) -> None:
    receiver.take([arrived], "h/agent")


def test_an_agent_is_told_what_came_once_it_is_much() -> None:
    bodies: list[Struct] = []
    receiver = LogReceiver(lambda agent, verb, body: bodies.append(body), lambda _: "")
    for number in range(10):
        take(receiver, chunk("h/p.0.0", b"x" * 49_999 + b"\n", number * 50_000))
    counts = [body.bytes["h/p.0.0"] for body in bodies if isinstance(body, Took)]
    assert counts == [150_000, 300_000, 450_000]
    assert all(after - before >= ACKNOWLEDGED for before, after in zip([0, *counts], counts, strict=False))


def test_a_listener_that_fails_keeps_nobody_from_hearing() -> None:
    receiver = LogReceiver(lambda *_: None, lambda _: "")
    texts: list[str] = []
    receiver.listen(lambda *_: 1 / 0)  # type: ignore[arg-type, return-value]
    stop = receiver.listen(lambda _, lines: texts.extend(block.text for block in lines))
    take(receiver, chunk("h/p.0.0", b"one\n", 0))
    stop()
    take(receiver, chunk("h/p.0.0", b"two\n", 4))
    assert texts == ["one\n"]


def test_stale_unended_lines_are_cut_and_bars_only_at_the_end() -> None:
    receiver = LogReceiver(lambda *_: None, lambda _: "")
    texts: list[str] = []
    receiver.listen(lambda _, lines: texts.extend(block.text for block in lines))
    take(receiver, chunk("h/p.0.0", b"no end", 0))
    take(receiver, chunk("h/p.1.0", b"\r10%\r20%", 0))
    receiver.cut_stale(3600.0)
    assert texts == []
    receiver.cut_stale(0.0)
    assert texts == ["no end\n"]
    receiver.cut_stale(0.0, progress=True)
    assert texts == ["no end\n", "20%\n"]


def test_only_the_latest_of_ended_meshes_and_healed_ranks_are_kept() -> None:
    receiver = LogReceiver(lambda *_: None, lambda _: "")
    for mesh in range(FORMER + 3):
        take(receiver, chunk(f"h/m{mesh}.0.0", b"x\n", 0))
        receiver.forget(f"m{mesh}")
    meshes = [mesh for mesh in range(FORMER + 3) if receiver.addresses(f"m{mesh}")]
    assert meshes == list(range(3, FORMER + 3))
    for incarnation in range(10):
        receiver.follow(f"h/p.0.{incarnation}", f"/logs/{incarnation}")
    assert receiver.addresses("p") == [f"h/p.0.{number}" for number in range(10 - INCARNATIONS, 10)]
    assert receiver.file("h/p.0.9") == "/logs/9"


def test_positions_are_taken_once_and_a_later_one_is_not_lost() -> None:
    positions = LogPositions()
    positions["h/p.0.0"] = 5
    positions["h/p.0.0"] = 7
    positions.ended("h/p.1.0")
    assert positions.take() == {"h/p.0.0": 7, "h/p.1.0": 1 << 62}
    assert positions.take() == {}
    positions["h/p.0.1"] = positions["h/q.0.0"] = 1
    positions.forget("p")
    assert positions.take() == {"h/q.0.0": 1}


class Call:
    """A call that waits for ranks of a mesh of processes."""

    def __init__(self, call: str, mesh: str, *missing: int) -> None:
        self.call, self.mesh, self._missing = call, mesh, missing

    def missing_ranks(self) -> tuple[int, ...]:
        return self._missing


def test_output_of_c_code_belongs_to_the_only_waiting_call() -> None:
    calls = [Call("c:1", "p", 0, 1), Call("c:2", "p", 1), Call("c:3", "q", 0)]
    assert [only_call(f"h/{proc}.0", calls, {}) for proc in ("p.0", "p.1", "p.2", "q.0")] == ["c:1", "", "", "c:3"]
