"""Texts of a failure: those that upstream's users match, and the full report."""

import pickle

import pytest

from monarch_nb.supervision import Cause, DeviceMeshError, HealError, MeshFailure, SupervisionError, decode_failure
from monarch_nb.supervision.failure import gathered

pytestmark = pytest.mark.timeout(10)

OOM = Cause(
    kind="signal",
    actor="<root>.<jobs.Trainer trainers{'gpus': 2/4}>",
    host="h1f2e3d",
    pid=4711,
    signal=9,
    oom=True,
    last_lines=("step 11", "step 12\n"),
    at=1_700_000_000.0,
)


def failure(cause: Cause, **changes: object) -> MeshFailure:
    fields = {"mesh_name": "trainers", "extent": (("gpus",), (4,)), "places": (2,), **changes}
    return MeshFailure(cause=cause, **fields)  # type: ignore[arg-type]


def test_the_report_tells_the_whole_story() -> None:
    report = failure(OOM, also=("evaluators",)).report()
    for part in (
        "The actor <root>.<jobs.Trainer trainers{'gpus': 2/4}> and all its descendants have failed:\n  the process",
        "the process this actor was running on failed: Killed(sig=9)",
        "trainers, gpus=2",
        "h1f2e3d, pid 4711",
        "by signal 9 (SIGKILL)",
        "out of memory",
        "    | step 11\n    | step 12",
        "evaluators",
        "heal_mesh(trainers) brings it back",
        "trainers.slice(...) without gpus=2 still works",
    ):
        assert part in report


def test_the_event_reads_as_upstream() -> None:
    text = str(failure(Cause(kind="aborted", actor="A")))
    assert text.startswith(
        "MeshFailure(mesh_name=trainers, crashed_ranks=[2], event=Supervision event: actor A failed:"
    )
    assert "no reason provided" in text
    assert repr(failure(OOM)) == str(failure(OOM))
    assert failure(OOM).mesh is None


def test_a_chain_tells_each_owner_down_to_what_happened_first() -> None:
    middle = Cause(kind="raised", actor="middle", text="KeyError: 'x'", chain=OOM)
    top = failure(Cause(kind="unhandled", actor="top", chain=middle))
    report = top.report()
    parts = (
        "The actor middle and all its descendants have failed:",
        "KeyError: 'x'",
        "This error occurred while handling another failure:",
        "the process this actor was running on failed: Killed(sig=9)",
        "actor top failed because it did not handle a supervision event from its child.",
        "h1f2e3d",
        "| step 12",
    )
    positions = [report.index(part) for part in parts]
    assert positions == sorted(positions)
    assert [cause.kind for cause in top.chain] == ["unhandled", "raised", "signal"]
    assert (top.host, top.at, top.last_lines) == ("h1f2e3d", OOM.at, OOM.last_lines)


def test_a_propagated_failure_names_its_actor_and_then_the_owners() -> None:
    child = Cause(kind="exception", actor="<root>.<Nest nest>.<Inner inner{'x': 1/2}>", traceback="ValueError: no")
    middle = Cause(kind="unhandled", actor="<root>.<Nest nest>", chain=child)
    top = failure(Cause(kind="unhandled", actor="<root>", chain=middle))
    assert top.report().splitlines()[:4] == [
        f"The actor {child.actor} and all its descendants have failed:",
        "  ValueError: no",
        "  actor <root>.<Nest nest> failed because it did not handle a supervision event from its child.",
        "  actor <root> failed because it did not handle a supervision event from its child.",
    ]
    event = str(top).partition("event=")[2].splitlines()
    reason = "failed because it did not handle a supervision event from its child. The child's event was:"
    assert event == [
        f"Supervision event: actor <root> {reason}",
        f"  Supervision event: actor <root>.<Nest nest> {reason}",
        f"    Supervision event: actor {child.actor} failed:",
        "      ValueError: no)",
    ]


@pytest.mark.parametrize(
    ("cause", "part"),
    [
        (Cause(kind="exit", exitcode=3), "the process this actor was running on exited with non-zero code 3"),
        (Cause(kind="signal", signal=200), "Killed(sig=200)"),
        (Cause(kind="init", text="ValueError: no"), "its __init__ raised:"),
        (Cause(kind="host", host="h1", text="no answer"), "the host h1 was lost: no answer"),
        (Cause(kind="spawn", text="no room"), "could not be started again: no room"),
        (Cause(kind="exception", traceback="Traceback ...\nValueError: no\n"), "ValueError: no"),
        (Cause(kind="stopped", text="it was stopped"), "has status: stopped"),
        (Cause(kind="owner", text="gone"), "spawn a new one"),
        (Cause(kind="unhandled", actor="A"), "not known"),
    ],
)
def test_every_kind_of_cause_has_its_words(cause: Cause, part: str) -> None:
    assert part in failure(cause).report()


def test_a_proc_mesh_is_not_called_an_actor() -> None:
    report = failure(Cause(kind="signal", signal=9, actor="procs"), procs=True).report()
    assert report.startswith("The proc procs and all its descendants have failed:\n  its process failed: Killed(sig=9)")


def test_advice_fits_what_is_left() -> None:
    assert "slice" not in failure(OOM, places=(0, 1, 2, 3)).next_step
    assert "brings them back" in failure(OOM, places=(0, 1)).next_step
    assert "re-creates it with its original arguments" in failure(Cause(kind="exception")).next_step
    assert failure(Cause(kind="host", host="h1")).next_step.startswith("once host h1 is back")


def test_advice_names_ranks_as_typed_and_none_if_none_remains() -> None:
    assert "trainers.slice(...) without gpus=0-1 still works" in failure(OOM, places=(0, 1)).next_step
    assert "trainers.slice(...) without gpus=0,2 still works" in failure(OOM, places=(0, 2), left=2).next_step
    assert "slice" not in failure(OOM, places=(2,), left=0).next_step  # the others had failed before
    grid = (("hosts", "gpus"), (1, 4))
    assert failure(OOM, extent=grid, places=(1, 2)).where == "gpus=1-2"
    assert failure(OOM, extent=grid, places=(0, 1, 2, 3)).where == "all 4 ranks"


def test_causes_that_differ_in_numbers_only_are_alike() -> None:
    exits = [Cause(kind="exit", exitcode=7, pid=pid, text=f"process {pid} ended") for pid in (1, 2)]
    assert exits[0].likeness == exits[1].likeness
    assert exits[0].likeness != Cause(kind="exit", exitcode=8).likeness
    texts = ["a.step: ValueError: loss 0.31 at 0x7f", "a.step: ValueError: loss 4 at 0xff", "a.step: KeyError: loss"]
    likes = [Cause(kind="exception", text=text, actor=text).likeness for text in texts]
    assert likes[0] == likes[1] != likes[2]
    assert Cause(kind="host", host="h1").likeness != Cause(kind="host", host="h2").likeness
    chained = [Cause(kind="unhandled", actor=name, chain=exits[0]).likeness for name in "ab"]
    assert chained[0] == chained[1] != exits[0].likeness


def test_failures_of_one_cause_are_gathered_in_rank_order() -> None:
    exits = [Cause(kind="exit", exitcode=7, actor=f"a{rank}", pid=rank) for rank in range(4)]
    failures = [failure(exits[rank], places=(rank,), left=3 - number) for number, rank in enumerate((3, 0, 2))]
    [merged] = gathered(failures)
    assert (merged.crashed_ranks, merged.left, merged.where) == ([0, 2, 3], 1, "gpus=0,2-3")
    assert len(gathered([*failures, failure(OOM, places=(1,))])) == 2
    assert gathered(failures[:1]) == failures[:1]


def test_a_failure_cannot_be_pickled_but_travels_encoded() -> None:
    original = failure(Cause(kind="unhandled", actor="top", chain=OOM))
    with pytest.raises(TypeError, match="report"):
        pickle.dumps(original)
    assert decode_failure(original.encode()) == original


def test_a_supervision_error_names_its_call() -> None:
    error = SupervisionError(failure=failure(OOM))
    assert isinstance(error, DeviceMeshError)
    assert isinstance(error, RuntimeError)
    error.endpoint = "trainers.step()"
    assert str(error).startswith("Endpoint call trainers.step() failed, The actor <root>")


@pytest.mark.parametrize("broken", [None, failure(OOM)])
def test_errors_survive_pickling_with_their_failures(broken: MeshFailure | None) -> None:
    error = pickle.loads(pickle.dumps(SupervisionError("bad", endpoint="a.b()", failure=broken)))
    assert (str(error), error.failure) == ("Endpoint call a.b() failed, bad", broken)
    copy = pickle.loads(pickle.dumps(HealError("no", () if broken is None else (broken,))))
    assert (str(copy), len(copy.failures)) == ("no", broken is not None)
