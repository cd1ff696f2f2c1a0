"""Endpoints run in spans, if a process records them."""

import contextlib
from typing import Any

import pytest

from monarch_nb.actor import Actor, ProcMesh, endpoint, span

pytest.importorskip("opentelemetry.sdk.trace")
pytestmark = pytest.mark.timeout(120)
_exporter: Any = None


def record() -> None:
    """Sets tracing up in the calling process."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    global _exporter
    _exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(_exporter))
    trace.set_tracer_provider(provider)


class Watched(Actor):
    @endpoint
    def begin(self) -> None:
        record()

    @endpoint
    def work(self) -> None:
        with span("inside"):
            pass

    @endpoint(instrument=False)
    def quiet(self) -> None:
        pass

    @endpoint
    def fail(self) -> None:
        raise ValueError("no")

    @endpoint(instrument=False)
    def spans(self) -> list[tuple[str, str, bool]]:
        return [
            (item.name, item.attributes["monarch.actor"], item.status.is_ok) for item in _exporter.get_finished_spans()
        ]


Ids = tuple[str, str, str]  # name, trace, parent


def ids(exporter: Any) -> list[Ids]:
    return [
        (entry.name, f"{entry.context.trace_id:032x}", "" if entry.parent is None else f"{entry.parent.span_id:016x}")
        for entry in exporter.get_finished_spans()
    ]


class Middle(Actor):
    """Records nothing itself, and calls an actor that does."""

    @endpoint
    def ask(self, target: Any) -> list[Ids]:
        target.work.call_one().get(20)
        return list(target.ids.call_one().get(20))


class Far(Actor):
    @endpoint
    async def begin(self) -> None:
        record()

    @endpoint
    async def work(self) -> None:
        with span("deep"):
            pass

    @endpoint(instrument=False)
    async def ids(self) -> list[Ids]:
        return ids(_exporter)


class Waiting(Actor):
    @endpoint
    async def work(self) -> None:
        pass

    @endpoint(instrument=False)
    async def spans(self) -> list[str]:
        return [entry.name for entry in _exporter.get_finished_spans()]


def test_endpoints_run_in_spans_named_after_them(own_procs: ProcMesh) -> None:
    watched: Any = own_procs.slice(gpus=0).spawn("watched", Watched)
    watched.work.call_one().get(20)  # nothing is recorded yet
    watched.begin.call_one().get(20)
    watched.work.call_one().get(20)
    watched.quiet.call_one().get(20)
    with contextlib.suppress(Exception):
        watched.fail.call_one().get(20)
    actor = f"<root>.<{Watched.__module__}.Watched watched>"
    assert watched.spans.call_one().get(20) == [("inside", actor, True), ("work", actor, True), ("fail", actor, False)]
    waiting: Any = own_procs.slice(gpus=0).spawn("waiting", Waiting)
    waiting.work.call_one().get(20)
    assert waiting.spans.call_one().get(20)[-1] == "work"


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes this process record too, until the end of the test."""
    from opentelemetry import trace

    monkeypatch.setattr(trace, "_TRACER_PROVIDER", None)
    monkeypatch.setattr(trace, "_TRACER_PROVIDER_SET_ONCE", Once())
    record()
    return _exporter


class Once:
    def do_once(self, function: Any) -> bool:
        function()
        return True


def test_spans_of_other_processes_are_children_of_the_callers(own_procs: ProcMesh, recording: Any) -> None:
    far: Any = own_procs.slice(gpus=0).spawn("far", Far)
    middle: Any = own_procs.slice(gpus=1).spawn("middle", Middle)
    far.begin.call_one().get(20)
    with span("outer"):
        spans = middle.ask.call_one(far).get(20)
    [outer] = recording.get_finished_spans()
    trace_id, span_id = f"{outer.context.trace_id:032x}", f"{outer.context.span_id:016x}"
    by_name = {name: (trace, parent) for name, trace, parent in spans}
    assert by_name["work"] == (trace_id, span_id)  # passed on by the middle actor
    assert by_name["deep"][0] == trace_id
    assert by_name["deep"][1] not in ("", span_id)  # it is a child of "work"


def test_without_any_recording_nothing_travels(own_procs: ProcMesh) -> None:
    from monarch_nb.runtime.recorder import continued, traceparent

    assert traceparent() == ""
    continued("no traceparent")()
    continued("00-x-y-z")()
