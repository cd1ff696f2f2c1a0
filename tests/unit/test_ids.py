"""Ids as torchmonarch writes them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_nb.runtime.ids import ProcId, Uid
from tests.effort import tries

pytestmark = pytest.mark.timeout(tries(60))


@pytest.mark.parametrize(
    ("text", "label", "value"),
    [
        ("service", "service", None),
        ("lab<6>", "lab", 5),
        ("x<1>", "x", 0),
        ("svc<2k>", "svc", 77),
        ("<2MuAHeDjLCE>", None, 768711257704633598),
        ("<JPwcyDCgEup>", None, 2**64 - 1),
    ],
)
def test_texts_are_read_and_written_the_same(text: str, label: str | None, value: int | None) -> None:
    uid = Uid.from_string(text)
    assert (str(uid), uid.label, uid.instance_value) == (text, label, value)
    assert uid.is_instance is not uid.is_singleton is (value is None)
    assert ProcId.from_string(text) == ProcId(uid)
    assert (str(ProcId(uid)), ProcId(uid).label, ProcId(uid).uid) == (text, label, uid)


@pytest.mark.parametrize(
    "text", ["", "<", "a b", "x<>", "x<zz!>", "5", "X", "a@b", "x<l>", "é", "x<ZZZZZZZZZZZ>", "a-"]
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="invalid uid"):
        Uid.from_string(text)


def test_an_instance_is_its_number_whatever_it_is_called() -> None:
    assert Uid.instance_from_value(5, "a") == Uid.instance_from_value(5, "b")
    assert hash(Uid.instance_from_value(5, "a")) == hash(Uid.instance_from_value(5))
    assert Uid.instance("a") != Uid.instance("a")
    assert Uid.anonymous().label is None
    assert Uid.from_string("a") != Uid.instance_from_value(5, "a")


def test_numbers_have_sixty_four_bits() -> None:
    for value in (-1, 2**64):
        with pytest.raises(OverflowError):
            Uid.instance_from_value(value)


def test_ids_are_not_made_by_hand() -> None:
    with pytest.raises(TypeError):
        Uid()
    with pytest.raises(TypeError):
        ProcId("x")  # type: ignore[arg-type]


@given(st.integers(0, 2**64 - 1), st.none() | st.from_regex(r"[a-z]([a-z0-9_-]{0,20}[a-z0-9])?", fullmatch=True))
def test_every_id_reads_back(value: int, label: str | None) -> None:
    uid = Uid.instance_from_value(value, label)
    assert Uid.from_string(str(uid)) == uid
    assert Uid.from_string(str(uid)).label == label


@pytest.mark.fuzz
@given(st.text(max_size=30))
def test_any_text_is_an_id_or_refused(text: str) -> None:
    try:
        uid = Uid.from_string(text)
    except ValueError:
        return
    assert Uid.from_string(str(uid)) == uid
