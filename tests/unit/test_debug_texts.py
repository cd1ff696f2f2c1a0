"""The debugger's texts: groups, merged answers, outliers, sparklines, trees; all of it without a process."""

import json
import math
import types
import warnings

import pytest
from msgspec.structs import replace

from monarch_nb.debug.control import StoppedThreads
from monarch_nb.debug.prompt.conversation import quit_question
from monarch_nb.debug.prompt.prompt import DebugPrompt
from monarch_nb.debug.records import DebugError, Frame, Stopped, Value, Variable
from monarch_nb.debug.render.groups import Missing, grouped, named, pick, table_text, tree, tree_text
from monarch_nb.debug.render.merge import Pair, diff_text, merged_text, outliers, sparkline, watch_text
from monarch_nb.debug.render.picture import picture_of, values_by_rank, variables_by_rank
from monarch_nb.debug.session.commands import Variables
from monarch_nb.debug.session.values import shorten, value_of
from monarch_nb.debug.verbs import CommandAnswer
from monarch_nb.shape import Extent
from monarch_nb.telemetry.points import log

TRAIN = Frame("/home/me/train.py", 42, "Trainer.step", "loss.backward()")
LOSS = Frame("/home/me/loss.py", 9, "nll", "return x")


def stop(rank: int, *stack: Frame, name: str = "trainers", number: int = 1, size: int = 8) -> Stopped:
    return Stopped(
        session=f"{name}#{rank}",
        number=number,
        address=f"h/p.{rank}.0",
        host="h",
        pid=1,
        mesh=f"uid-{name}",
        name=name,
        rank=rank,
        incarnation=0,
        labels=("gpus",),
        point=(rank,),
        reason="breakpoint()",
        stack=stack or (TRAIN,),
        current=len(stack or (TRAIN,)) - 1,
        source=("a = 1", "loss.backward()", "b = 2"),
        first=41,
    )


def answers(*values: float | str) -> list[tuple[Stopped, CommandAnswer]]:
    pairs = []
    for rank, value in enumerate(values):
        number = value if isinstance(value, float) else None
        pairs.append((stop(rank), CommandAnswer(session="s", value=Value(str(value), "float", number))))
    return pairs


def test_ranks_at_one_line_are_one_row_and_others_another() -> None:
    records = [*(stop(rank) for rank in (0, 1, 2, 4, 5, 6, 7)), stop(3, TRAIN, LOSS)]
    text = table_text(records, sizes={"uid-trainers": 8})
    assert "8 ranks stopped" in text
    assert "7 of 8  at train.py:42 in Trainer.step  trainers gpus=0-2,4-7  breakpoint()" in text
    assert "1 of 8  at loss.py:9 in nll" in text
    assert "→ 42  loss.backward()" in text


def test_the_table_says_who_is_not_stopped_and_what_those_do() -> None:
    missing = Missing("trainers", Extent(["gpus"], [8]), {(5,): "runs step, at model.py:88 in forward", (6,): "idle"})
    text = table_text([stop(0)], missing=[missing])
    assert "not stopped: trainers gpus=5: runs step, at model.py:88 in forward" in text
    assert "not stopped: trainers gpus=6: idle" in text


def test_stops_at_one_line_are_one_group_whoever_the_caller() -> None:
    caller = Frame("/home/me/train.py", 7, "Trainer.warm", "self.step()")
    records = [stop(3, caller, TRAIN), stop(1), replace(stop(0), thread="pt_autograd_0"), stop(2, TRAIN, LOSS)]
    first, second = grouped(records)
    assert (first.first.rank, first.where, first.thread) == (0, "trainers gpus=0-1,3", "pt_autograd_0")
    assert second.where == "trainers gpus=2"
    twice = [stop(0), replace(stop(0), session="another", thread="Thread-1")]
    (group,) = grouped(twice)
    assert group.ranks == 1
    assert "■ 1 rank stopped\n  1 of 8  at train.py:42" in table_text(twice, sizes={"uid-trainers": 8})


def test_ranks_joining_the_focused_line_get_commands_unless_one_was_chosen() -> None:
    records = [stop(1)]
    prompt = DebugPrompt(None, lambda: list(records))  # type: ignore[arg-type]
    assert [record.rank for record in prompt.fix()] == [1]
    records += [stop(0), stop(2, TRAIN, LOSS)]
    assert prompt.question == "mdb trainers[gpus=1]> ", "commands go to the ranks that the prompt names"
    prompt.gather()
    assert prompt.question == "mdb trainers[gpus=0-1]> "
    prompt.focus_on([stop(1)])
    prompt.gather()
    assert prompt.question == "mdb trainers[gpus=1]> "


def test_equal_stacks_of_different_meshes_are_not_one_group() -> None:
    assert len(grouped([stop(0), stop(0, name="critics")])) == 2
    assert named([stop(0), stop(1), stop(0, name="critics")]) == "trainers gpus=0-1; critics gpus=0"


def test_equal_answers_are_shown_once_and_differing_ones_side_by_side() -> None:
    assert merged_text(answers(1.0, 1.0, 1.0)) == "1.0  (all 3)"
    assert merged_text(answers(1.0, 2.0, 1.0)).splitlines() == ["1.0  gpus=0,2", "2.0  gpus=1"]
    assert merged_text(answers(1.0)) == "1.0"


def test_answers_of_several_lines_stand_below_each_other_with_their_ranks() -> None:
    pairs = [(stop(0), CommandAnswer(session="s", text="a\nb\n")), (stop(1), CommandAnswer(session="s", text="c\n"))]
    assert merged_text(pairs) == "── gpus=0\na\nb\n── gpus=1\nc"


def test_diff_shows_nan_first_and_then_the_outlier() -> None:
    rows = outliers(answers(0.5, 0.51, math.nan, 0.5, 9.0, 0.49))
    assert [value.text for value, _ in rows][:2] == ["nan", "9.0"]
    text = diff_text("loss", answers(0.5, 0.51, math.nan, 0.5, 9.0, 0.49)).splitlines()
    assert text[1].split() == ["!", "nan", "gpus=2"]


def test_diff_of_texts_shows_the_rarest_first() -> None:
    assert [value.text for value, _ in outliers(answers("a", "a", "b", "a"))] == ["b", "a"]
    assert diff_text("x", answers("a", "a")) == "x: equal on all 2: a"


def test_objects_that_differ_in_nothing_but_their_address_are_equal() -> None:
    a, b = "<Trainer object at 0x7f2434487a50>", "<Trainer object at 0x7f2434487bd0>"
    assert diff_text("self", answers(a, b)) == "self: equal on all 2: <Trainer object at 0x…>"
    assert diff_text("self", answers(a, a)).endswith("0x7f2434487a50>"), "an address that all share is shown"
    assert merged_text(answers(a, b, "None")) == "<Trainer object at 0x…>  gpus=0-1\nNone" + " " * 21 + "gpus=2"
    assert len(outliers(answers("[<A at 0x7f2434487a50>, 1]", "[<A at 0x7f2434487bd0>, 2]"))) == 2


def test_numbers_and_tensors_precede_objects_and_differing_precede_equal_values() -> None:
    def local(rank: int, **values: object) -> Pair:
        variables = tuple(Variable(name, value_of(value)) for name, value in values.items())
        return stop(rank), CommandAnswer(session=f"trainers#{rank}", variables=variables)

    objects = [Quiet() for _ in range(3)]
    rows = variables_by_rank(
        [local(rank, self=objects[rank], text="a", json=math, x=1, loss=rank / 2) for rank in range(3)]
    )
    assert [row["name"] for row in rows] == ["loss", "x", "text", "self", "json"]
    assert [value["where"] for value in rows[0]["values"]] == ["gpus=0", "gpus=1", "gpus=2"]
    assert [value["text"] for value in rows[3]["values"]] == ["<tests.unit.test_debug_texts.Quiet object at 0x…>"]


class Quiet:
    pass


def test_a_sparkline_spans_min_to_max_and_marks_nan() -> None:
    assert sparkline([0.0, 1.0, math.nan, None]) == "▁█×·"
    assert watch_text("loss", answers(0.0, 1.0, math.nan)) == "loss  ▁█×  0 … 1  × gpus=2"


def test_stacks_become_one_tree_with_counts() -> None:
    nodes = tree([("0", [TRAIN]), ("1", [TRAIN]), ("2", [TRAIN, LOSS])])
    lines = tree_text(nodes, lambda ranks: ",".join(ranks))
    assert lines[0].startswith("3  Trainer.step  train.py:42")
    assert any(line.strip().startswith("1  nll  loss.py:9") for line in lines)


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("3", [3]),
        ("0,2", [0, 2]),
        ("0:4", [0, 1, 2, 3]),
        ("0:8:3", [0, 3, 6]),
        ("0-2", [0, 1, 2]),
        ("-1", [7]),
        ("gpus=2:4", [2, 3]),
        ("trainers[gpus=5]", [5]),
        ("trainers gpus=5", [5]),
        ("all", list(range(8))),
    ],
)
def test_ranks_are_picked_as_people_write_them(text: str, ranks: list[int]) -> None:
    assert [record.rank for record in pick([stop(rank) for rank in range(8)], text)] == ranks


@pytest.mark.parametrize("text", ["9", "hosts=0", "critics", "gpus=x"])
def test_a_pick_of_nothing_says_what_there_is(text: str) -> None:
    with pytest.raises(DebugError):
        pick([stop(rank) for rank in range(8)], text)


def test_the_book_keeps_what_is_stopped_and_forgets_what_is_lost() -> None:
    stopped, events = StoppedThreads(), []
    stopped.listen(lambda kind, record: events.append((kind, record.rank)))
    stopped.add(stop(0))
    stopped.add(stop(1))
    stopped.resume("trainers#0")
    assert [record.rank for record in stopped.records()] == [1]
    stopped.lose("h/p.1.0", "killed")
    assert not stopped.any
    assert events == [("stopped", 0), ("stopped", 1), ("resumed", 0), ("lost", 1)]
    assert stopped.end_reason("trainers#1") == "killed"


def test_an_answer_about_one_stop_does_not_remove_the_next() -> None:
    stopped = StoppedThreads()
    stopped.add(stop(0, number=2))
    assert not stopped.resume("trainers#0", 1)
    assert [record.number for record in stopped.records()] == [2]
    assert stopped.resume("trainers#0", 2)
    assert not stopped.any


def test_ranks_are_held_up_by_stops_but_not_by_inspected_frames() -> None:
    stopped = StoppedThreads()
    actor = stop(0).place
    assert stopped.holding(*actor) is None
    stopped.add(replace(stop(0), session="looked at", post_mortem=True))
    assert stopped.holding(*actor) is None
    stopped.add(stop(0, number=2))
    stopped.add(stop(1))
    holder = stopped.holding(*actor)
    assert holder is not None
    assert holder.number == 2
    stopped.resume("trainers#0")
    assert stopped.holding(*actor) is None


def test_a_step_is_over_when_its_rank_stops_or_never_will() -> None:
    stopped = StoppedThreads()
    stopped.add(stop(0, number=2))
    stopped.end("trainers#1", "the endpoint has ended")
    stopped.wait_steps([("trainers#0", 1), ("trainers#1", 4)], 0.0)
    assert not stopped.wait(0.0, lambda: False)


# -- values ------------------------------------------------------------------------------------------------------------


class Loud:
    def __repr__(self) -> str:
        raise ValueError("no")


def test_a_repr_that_raises_is_told_and_harms_nobody() -> None:
    assert "its repr raised ValueError: no" in value_of(Loud()).text
    assert "its repr raised" in value_of([Loud()]).text


def test_gigantic_values_are_cut_before_they_are_written_out() -> None:
    assert len(shorten(list(range(1_000_000)))) < 500
    assert len(shorten("x" * 5_000_000)) < 5000
    assert len(value_of(dict.fromkeys(range(1000), "y" * 10_000)).text) < 60_000
    assert value_of(10**30).number == 1e30


def test_containers_of_long_texts_are_cut_as_a_whole() -> None:
    nested = [[["x" * 2000] * 20] * 20] * 4
    for much in (False, True):
        value = value_of({"key": nested}, much=much)
        assert len(value.text) < 40_000
        assert value.text.startswith("{'key': [[['xxx")
    assert shorten("x" * 1500) == repr("x" * 1500), "a text that is not in a container is shown at length"


def test_numbers_keep_their_number_and_the_rest_does_not() -> None:
    assert value_of(3).number == 3.0
    assert value_of("3").number is None
    assert value_of([1, 2]).length == 2


def test_arrays_are_described_by_shape_type_extremes_and_nan() -> None:
    np = pytest.importorskip("numpy")
    array = np.arange(100, dtype="float32").reshape(10, 10)
    array[0, 0] = np.nan
    value = value_of(array)
    assert value.tensor is not None
    assert (value.tensor.shape, value.tensor.dtype, value.tensor.nan) == ((10, 10), "float32", 1)
    assert (value.tensor.least, value.tensor.most) == (1.0, 99.0)
    assert value.text == "float32[10×10]  min 1  max 99  mean 50  1 NaN"
    assert value_of(np.float32(2.5)).number == 2.5
    assert value_of(np.array(["a"])).tensor is not None


def test_looking_at_tensors_with_gradients_gives_no_warnings() -> None:
    torch = pytest.importorskip("torch")
    weight = torch.ones(3, requires_grad=True)
    loss = (weight * 2).sum()
    setting = torch.is_warn_always_enabled()
    torch.set_warn_always(True)  # some are given once in a process
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for value in (loss, weight, weight * 2, torch.ones(1, 1, requires_grad=True)):
                frame = types.SimpleNamespace(locals=lambda index, value=value: {"value": value})
                variables = Variables(frame)  # type: ignore[arg-type]
                (variable,) = variables.locals(0)
                assert len(variables.children(variable.reference)[0]) == variable.named
            assert value_of(loss).number == 6.0
            assert log(loss=loss, weight=torch.ones(1, 1, requires_grad=True)) is None
    finally:
        torch.set_warn_always(setting)


def test_what_is_stopped_as_json_for_views() -> None:
    records = [stop(0), stop(1), stop(2, TRAIN, LOSS)]
    missing = [Missing("trainers", Extent(["gpus"], [8]), {(3,): "idle", (4,): "idle"})]
    picture = json.loads(json.dumps(picture_of(records, sizes={"uid-trainers": 5}, missing=missing), allow_nan=False))
    assert [(group["where"], group["line"], group["of"]) for group in picture["groups"]] == [
        ("gpus=0-1", 42, 5),
        ("gpus=2", 9, 5),
    ]
    assert picture["tree"][0]["count"] == 3
    assert picture["tree"][0]["below"][0]["where"] == "trainers gpus=2"
    assert picture["missing"] == [{"name": "trainers", "where": "gpus=3-4", "what": "idle"}]


def test_usual_values_come_in_rank_order_after_outliers() -> None:
    assert [value["number"] for value in values_by_rank("x", answers(0.7, 0.9, 0.5, 0.8))["values"]] == [
        0.7,
        0.9,
        0.5,
        0.8,
    ]
    assert [value["number"] for value in values_by_rank("x", answers(1.0, 2.0, 99.0, 3.0, 2.0))["values"]] == [
        99,
        1,
        2,
        3,
    ]


def test_values_by_rank_as_json_have_the_odd_one_first() -> None:
    pairs = answers(1.0, 1.0, math.nan, math.inf)
    table = json.loads(json.dumps(values_by_rank("loss", pairs), allow_nan=False))
    assert [(row["text"], row["odd"], row["number"]) for row in table["values"]] == [
        ("nan", "NaN", None),
        ("inf", "infinite", None),
        ("1.0", "", 1.0),
    ]
    assert table["spark"] == "▅▅××"
    same = Variable("same", Value("3", "int", 3.0))
    with_locals = [
        (stop, CommandAnswer(session="s", variables=(same, Variable("loss", value))))
        for stop, answer in pairs
        if (value := answer.value) is not None
    ]
    assert [row["name"] for row in variables_by_rank(with_locals)] == ["loss", "same"]


def test_the_question_before_quit_names_threads_that_endpoints_started() -> None:
    loader = replace(stop(1), thread="loader")
    assert quit_question([stop(0)]) == "end the endpoints of trainers gpus=0, so that their calls fail? [y/N] "
    assert quit_question([loader]) == "end thread loader of trainers gpus=1, while its endpoint goes on? [y/N] "
    assert "calls fail; and thread loader" in quit_question([stop(0), loader])
