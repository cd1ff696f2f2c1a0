"""Texts of objects whose own code misbehaves, and texts that would command a terminal."""

import time

import msgspec
import pytest

from monarch_nb.debug import records, verbs
from monarch_nb.debug.session.values import value_of
from monarch_nb.mesh.cells import reason_of
from monarch_nb.mesh.value import describe
from monarch_nb.supervision import Cause, MeshFailure, SupervisionError
from monarch_nb.wire import (
    ActorError,
    PickleFailure,
    decode_exception,
    encode_exception,
    error_line,
    explain_unpicklable,
    first_line,
    format_exception,
    harmless,
    name_text,
    pickle_failure,
    repr_of,
    text_of,
    type_name,
)

OUTCOMES = [ValueError("no"), SystemExit(3), KeyboardInterrupt(), GeneratorExit(), RecursionError(), "no text"]


def hostile(outcome, base=Exception):
    def give(self, *_):
        if isinstance(outcome, BaseException):
            raise outcome
        return 7

    class Hostile(base):
        __str__ = __repr__ = __format__ = __dir__ = give
        __notes__ = property(give)

    return Hostile("x")


def caught(error):
    try:
        raise error
    except BaseException as raised:
        return raised


@pytest.mark.parametrize("outcome", OUTCOMES, ids=repr)
@pytest.mark.parametrize("base", [Exception, SystemExit, KeyboardInterrupt])
def test_an_exception_whose_own_code_raises_is_told_all_the_same(outcome, base):
    error = caught(hostile(outcome, base))
    assert "Hostile: its str raised" in text_of(error)
    assert "Hostile: its repr raised" in repr_of(error)
    assert error_line(error).startswith("Hostile: <")
    text = "".join(format_exception(error))
    assert "in caught" in text
    assert "Hostile" in text
    copy = decode_exception([bytes(frame) for frame in encode_exception(error)])
    assert "Hostile" in repr_of(copy) + text_of(copy)
    assert "Hostile" in repr(ActorError(error))
    assert "Hostile" in str(ActorError(error))


class RaisesOnLoad(Exception):
    def __init__(self, outcome):
        self.outcome = outcome

    def __reduce__(self):
        return _raise, (type(self.outcome), self.outcome.args)


def _raise(kind, args):
    raise kind(*args)


@pytest.mark.parametrize("way", [ValueError("no"), SystemExit(3), GeneratorExit()])
def test_an_exception_that_raises_when_it_is_unpickled_is_stood_for(way):
    copy = decode_exception([bytes(frame) for frame in encode_exception(caught(RaisesOnLoad(way)))])
    assert "could not be unpickled" in copy.reason
    assert type(way).__name__ in copy.reason


def test_attributes_and_chains_that_raise_do_not_hide_the_origin():
    class Shut(Exception):
        def __getattribute__(self, name):
            raise SystemExit(name)

    text = "".join(format_exception(caught(Shut())))
    assert "in caught" in text
    assert "Shut" in text
    cause = caught(hostile(SystemExit(1)))
    outer = caught(RuntimeError("outer"))
    outer.__cause__ = cause
    assert "RuntimeError: outer" in "".join(format_exception(outer))


def test_names_of_types_are_their_own_whatever_their_metaclass_says():
    class Meta(type):
        @property
        def __name__(cls):
            raise SystemExit("name")

    class Odd(metaclass=Meta):
        __module__ = 3

    assert type_name(Odd()).endswith("Odd")
    assert error_line(Odd()).startswith("Odd: ")
    assert text_of(caught(ValueError("\ud800")))  # what cannot be sent is escaped
    assert text_of("a\udcffb") == "a\\udcffb"


def test_unsendable_values_are_explained_though_their_error_has_no_text():
    class Refuses:
        def __reduce__(self):
            raise caught(hostile(ValueError("no"), TypeError))

    assert "Hostile" in explain_unpicklable(Refuses(), "the `result`")
    assert isinstance(pickle_failure(hostile(SystemExit(3), TypeError), Refuses(), "the `result`"), PickleFailure)


def test_a_text_keeps_colours_and_loses_other_terminal_commands():
    assert harmless("\x1b[1;31mred\x1b[0m \x1b[38:5:9mx\t|\r\n\b") == "\x1b[1;31mred\x1b[0m \x1b[38:5:9mx\t|\r\n\b"
    commands = [
        "\x1b[2J",
        "\x1b[10;10H",
        "\x1b[?25l",
        "\x1b[>4;2m",
        "\x9b31;1H",
        "\x1b]0;title\x07",
        "\x1b]52;c;Y2F0\x1b\\",
        "\x1b]8;;http://x\x07",
        "\x9d0;t\x9c",
        "\x1bP+q544e\x1b\\",
        "\x1b(0",
        "\x1b_G payload\x1b\\",
    ]
    for command in commands:
        assert harmless(f"a{command}b") == "ab"
    # Incomplete ones, which would take in what follows, and single controls are made visible.
    assert harmless("a\x1b]0;never ends") == "a\\x1b]0;never ends"
    assert harmless("a\x1b[") == "a\\x1b["
    assert harmless("bell\x07 \x0e \x85 \x7f") == "bell\\x07 \\x0e \\x85 \\x7f"
    for text in ("\x1b]" * 50_000, "\x1b[" + "1;" * 100_000, "\x1bP" + "x" * 200_000):
        begun = time.monotonic()
        assert "\x1b" not in harmless(text)
        assert time.monotonic() - begun < 2


def test_names_of_all_scripts_and_emoji_stay():
    for name in ("👨\u200d👩\u200d👧", "می\u200cخواهم", "学習\u3000一", "🏴\U000e0067\U000e007f", "e\u0301"):
        assert name_text(name) == name


def test_names_lose_what_breaks_a_display():
    assert name_text("a\nb\x1b\x85\x9b") == "a\\nb\\x1b\\x85\\x9b"
    assert name_text("a\u2028b\u202ec\u2066d\ud800") == "a\\u2028b\\u202ec\\u2066d\\ud800"


def test_no_text_of_any_kind_of_exception_commands_a_terminal():
    error = caught(ValueError("\x1b]52;c;cm0=\x07\x1b[2J\x9b2Jx"))
    copy = decode_exception([bytes(frame) for frame in encode_exception(error)])
    for text in (*format_exception(copy), *format_exception(error), str(ActorError(copy)), text_of(copy)):
        assert not {"\x1b", "\x9b", "\x07"} & set(text), text


COMMAND = "\x1b]0;title\x07\x1b[2J\x9b1JQ"


def test_records_of_other_processes_hold_no_commands():
    for record in (
        Cause(kind="exception", text=COMMAND, traceback=COMMAND, host=COMMAND, actor=COMMAND, last_lines=(COMMAND,)),
        MeshFailure(mesh_name=COMMAND, cause=Cause(kind="exit", last_lines=(COMMAND,)), mesh_uid="m", also=(COMMAND,)),
        records.Frame(COMMAND, 3, COMMAND, COMMAND),
        records.Value(COMMAND, COMMAND),
        verbs.CommandOutcome(COMMAND, COMMAND),
    ):
        assert not {"\x1b", "\x9b", "\x07"} & set(str(record)), record
        encoded = msgspec.msgpack.encode(record, enc_hook=str)
        decoded = msgspec.msgpack.decode(encoded.replace(b"Q", b"\x1b"), type=type(record))
        assert "\x1b" not in str(decoded)


def test_the_reason_of_a_dead_rank_follows_its_first_line():
    failure = MeshFailure(mesh_name="trainers", cause=Cause(kind="exit", signal=9), mesh_uid="m", places=(1,))
    error = SupervisionError(endpoint="trainers[cell]()", failure=failure)
    assert reason_of(error).endswith("have failed: the process this actor was running on failed: Killed(sig=9)")
    assert [first_line(text) for text in ("a\nb", "a:\n  b\nc", "a:", "")] == ["a", "a: b", "a:", ""]


def test_values_that_resist_inspection_are_shown_anyway():
    class Shut(dict):
        def give(self, *_):
            raise SystemExit(3)

        __repr__ = __len__ = __iter__ = items = __float__ = give

    class Number(float):
        __repr__ = __float__ = Shut.give

    class Loud:
        def __repr__(self):
            return COMMAND

    for value, name in ((Shut(), "Shut"), (Number(2), "Number"), ([Shut()], "Shut")):
        assert name in value_of(value).text
        assert "its repr raised SystemExit" in "".join(describe(2, lambda _, value=value: value, str))
    assert "\x1b" not in value_of(Loud()).text + value_of([Loud()]).text + repr_of(Loud())
    assert "\x1b" not in "".join(describe(2, lambda _: Loud(), str))
