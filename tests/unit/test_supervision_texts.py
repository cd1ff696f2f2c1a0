"""The words of a failure: what upstream's users match on, and the whole story."""

import pickle

import pytest

from monarch_nb.supervision import Cause, DeviceMeshError, HealError, MeshFailure, SupervisionError, decode_failure

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
    places = [report.index(part) for part in parts]
    assert places == sorted(places)
    assert [cause.kind for cause in top.chain] == ["unhandled", "raised", "signal"]
    assert (top.host, top.at, top.last_lines) == ("h1f2e3d", OOM.at, OOM.last_lines)


def test_a_failure_that_owners_passed_on_names_the_actor_it_began_with_and_then_them() -> None:
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
    told = "failed because it did not handle a supervision event from its child. The child's event was:"
    assert event == [
        f"Supervision event: actor <root> {told}",
        f"  Supervision event: actor <root>.<Nest nest> {told}",
        f"    Supervision event: actor {child.actor} failed:",
        "      ValueError: no)",
    ]


@pytest.mark.parametrize(
    ("cause", "part"),
    [
        (Cause(kind="exit", exitcode=3), "Exited(code=3)"),
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
    again = pickle.loads(pickle.dumps(HealError("no", () if broken is None else (broken,))))
    assert (str(again), len(again.failures)) == ("no", broken is not None)
