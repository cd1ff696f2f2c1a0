"""Engine messages: each is declared once, with its schema; whatever else arrives is refused, and ends nothing."""

import ast
import contextlib
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch_nb._parsing import parsed
from monarch_nb.engine.verbs import ALL, verbs_of
from monarch_nb.wire import (
    Asker,
    Done,
    Handlers,
    Header,
    Kind,
    Lane,
    MalformedMessageError,
    Refused,
    Status,
    Verb,
    VerbTakenError,
    encode_body,
)
from tests.effort import tries

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(tries(60))
VERBS = st.sampled_from(list(ALL.values()))


def sample(kind: Any) -> Any:
    """Some value of a type, as plain as can be."""
    match kind:
        case msgspec.inspect.StructType():
            return kind.cls(**{field.name: sample(field.type) for field in kind.fields})
        case msgspec.inspect.VarTupleType():
            return (sample(kind.item_type),)
        case msgspec.inspect.TupleType():
            return tuple(sample(item) for item in kind.item_types)
        case msgspec.inspect.ListType():
            return [sample(kind.item_type)]
        case msgspec.inspect.DictType():
            return {sample(kind.key_type): sample(kind.value_type)}
        case msgspec.inspect.UnionType():
            return sample(min(kind.types, key=lambda option: isinstance(option, msgspec.inspect.StructType)))
        case msgspec.inspect.LiteralType():
            return kind.values[0]
        case msgspec.inspect.StrType():
            return "text"
        case msgspec.inspect.BytesType():
            return b"bytes"
        case msgspec.inspect.FloatType():
            return 0.5
        case msgspec.inspect.BoolType():
            return True
        case msgspec.inspect.IntType():
            return 3
        case msgspec.inspect.NoneType():
            return None
    raise AssertionError(f"{kind}: a message is made of plain data only")


def message(verb: Verb[Any, Any]) -> msgspec.Struct:
    body: msgspec.Struct = sample(msgspec.inspect.type_info(verb.request))
    return body


class Process:
    """A process that takes verbs, and what it has answered."""

    def __init__(self) -> None:
        self.answers: list[tuple[Status, Any]] = []
        self.lanes: list[Lane] = []
        self.handlers = Handlers("processes", self.answer)

    def answer(self, header: Header, status: Status, body: Any, lane: Lane) -> None:
        self.answers.append((status, body))
        self.lanes.append(lane)

    def take(self, verb: str, body: bytes, port: int = 7) -> None:
        self.handlers.take(Header(Kind.CONTROL, "h/p.0.0", "h/c", method=verb, port=port), body)


class Ask(msgspec.Struct, frozen=True):
    number: int


class Reply(msgspec.Struct, frozen=True):
    text: str


DOUBLE = Verb("test.double", Ask, Reply, doc="what a number is twice")


BULK = Verb("test.bulk", Ask, Reply, doc="many bytes", lane=Lane.DATA)


def test_a_reply_takes_the_lane_of_its_verb() -> None:
    process = Process()
    for verb in (DOUBLE, BULK):
        process.handlers.handle(verb, lambda ask, asker: Reply(str(ask.number)))
        process.take(verb.name, encode_body(Ask(1)))
    assert process.lanes == [Lane.URGENT, Lane.DATA]


def test_a_handler_gets_the_request_and_returns_the_reply() -> None:
    process = Process()
    process.handlers.handle(DOUBLE, lambda ask, asker: Reply(str(2 * ask.number)))
    process.take("test.double", encode_body(Ask(4)))
    assert process.answers == [(Status.VALUE, Reply("8"))]


def test_requests_are_answered_later_or_never_without_a_port() -> None:
    process, askers = Process(), []

    def keep_asker(ask: Ask, asker: Asker[Reply]) -> None:
        askers.append(asker)

    process.handlers.handle(DOUBLE, keep_asker)
    process.take("test.double", encode_body(Ask(4)))
    process.take("test.double", encode_body(Ask(5)), port=0)
    assert [asker.src for asker in askers] == ["h/c", "h/c"]
    assert process.answers == []
    for asker in askers:
        asker.reply(Reply("now"))
    askers[0].refuse("or not")
    assert process.answers == [(Status.VALUE, Reply("now")), (Status.EXCEPTION, Refused("or not"))]


def test_a_verb_has_one_handler_until_it_is_released() -> None:
    process = Process()
    process.handlers.handle(DOUBLE, lambda ask, asker: Reply("first"))
    with pytest.raises(VerbTakenError, match=r"test\.double has a handler already"):
        process.handlers.handle(DOUBLE, lambda ask, asker: Reply("second"))
    process.handlers.release(DOUBLE)
    process.handlers.handle(DOUBLE, lambda ask, asker: Reply("second"))
    process.take("test.double", encode_body(Ask(1)))
    assert process.answers == [(Status.VALUE, Reply("second"))]


def test_unknown_verbs_and_raising_handlers_are_refused_by_name() -> None:
    process = Process()

    def fails(ask: Ask, asker: Asker[Reply]) -> Reply:
        raise LookupError("there is no such number")

    process.handlers.handle(DOUBLE, fails)
    process.take("test.triple", b"")
    process.take("test.double", encode_body(Ask(1)))
    process.take("test.double", b"\xc1")
    statuses, reasons = zip(*process.answers, strict=True)
    assert set(statuses) == {Status.EXCEPTION}
    assert reasons[0] == Refused("processes know no 'test.triple'")
    assert reasons[1] == Refused("LookupError: there is no such number")
    assert reasons[2].error.startswith("MalformedMessageError: this is no Ask of test.double: ")


def test_two_verbs_of_one_name_are_a_mistake() -> None:
    module = ModuleType("somewhere")
    vars(module).update(ONE=DOUBLE, OTHER=Verb("test.double", Done, doc=""))
    with pytest.raises(VerbTakenError, match=r"test\.double; one is declared in somewhere"):
        verbs_of([module])


@pytest.mark.sources
def test_every_module_of_verbs_is_on_the_list() -> None:
    packages = {path.parent.name for path in (ROOT / "monarch_nb").glob("*/verbs.py")} - {"engine"}
    listed = {
        alias.name.split(".")[1]
        for node in ast.walk(parsed((ROOT / "monarch_nb/engine/verbs.py").read_text()))
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    assert packages == listed


@pytest.mark.parametrize("verb", ALL.values(), ids=str)
def test_a_message_of_every_verb_survives_the_trip(verb: Verb[Any, Any]) -> None:
    body = message(verb)
    assert verb.decode(encode_body(body)) == body
    if verb.reply is not None:
        reply = sample(msgspec.inspect.type_info(verb.reply))
        assert verb.decode_reply(encode_body(reply)) == reply


@pytest.mark.fuzz
@given(VERBS, st.binary(max_size=200))
@settings(max_examples=tries(300))
def test_random_bytes_are_refused_by_name_whatever_the_verb(verb: Verb[Any, Any], data: bytes) -> None:
    decodes_or_refuses(verb, data)


@pytest.mark.fuzz
@given(VERBS, st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), max_size=8), st.integers(0, 10_000))
@settings(max_examples=tries(300))
def test_damaged_messages_are_refused_by_name(verb: Verb[Any, Any], changes: list[tuple[int, int]], cut: int) -> None:
    data = bytearray(encode_body(message(verb)))
    for index, value in changes:
        data[index % len(data)] = value
    decodes_or_refuses(verb, bytes(data))
    decodes_or_refuses(verb, bytes(data[: cut % (len(data) + 1)]))


def decodes_or_refuses(verb: Verb[Any, Any], data: bytes) -> None:
    with contextlib.suppress(MalformedMessageError):
        assert isinstance(verb.decode(data), verb.request)


def table() -> str:
    """The engine messages as docs/protocol.md has them."""
    lines = ["| verb | request | reply | meaning |", "|---|---|---|---|"]
    for verb in ALL.values():
        reply = "" if verb.reply is None else f"`{verb.reply.__name__}`"
        lane = ", not urgent" if verb.lane == Lane.DATA else ""
        lines.append(f"| `{verb.name}` | `{verb.request.__name__}` | {reply} | {verb.doc}{lane} |")
    return "\n".join(lines)


def test_the_manual_lists_the_engine_messages_as_they_are() -> None:
    assert table() in (ROOT / "docs/protocol.md").read_text(encoding="utf-8"), table()


@pytest.mark.sources
def test_each_declared_message_is_among_those_that_are_checked() -> None:
    declared = re.compile(r'= Verb\(\s*"([\w.]+)"')
    names = {name for file in (ROOT / "monarch_nb").rglob("*.py") for name in declared.findall(file.read_text("utf-8"))}
    assert names
    assert names <= {verb.name for verb in ALL.values()}
