"""Endpoints in spans, where a process records any."""

import contextlib
from typing import Any

import pytest

from monarch_nb.actor import Actor, ProcMesh, endpoint, span

pytest.importorskip("opentelemetry.sdk.trace")
pytestmark = pytest.mark.timeout(60)
_exporter: Any = None


def record() -> None:
    """Sets tracing up in the process that this is called in."""
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
            (each.name, each.attributes["monarch.actor"], each.status.is_ok) for each in _exporter.get_finished_spans()
        ]


class Waiting(Actor):
    @endpoint
    async def work(self) -> None:
        pass

    @endpoint(instrument=False)
    async def spans(self) -> list[str]:
        return [each.name for each in _exporter.get_finished_spans()]


def test_endpoints_run_in_spans_named_after_them(own_procs: ProcMesh) -> None:
    watched: Any = own_procs.slice(gpus=0).spawn("watched", Watched)
    watched.work.call_one().get(20)  # nothing is recorded yet
    watched.begin.call_one().get(20)
    watched.work.call_one().get(20)
    watched.quiet.call_one().get(20)
    with contextlib.suppress(Exception):
        watched.fail.call_one().get(20)
    who = f"<root>.<{Watched.__module__}.Watched watched>"
    assert watched.spans.call_one().get(20) == [("inside", who, True), ("work", who, True), ("fail", who, False)]
    waiting: Any = own_procs.slice(gpus=0).spawn("waiting", Waiting)
    waiting.work.call_one().get(20)
    assert waiting.spans.call_one().get(20)[-1] == "work"
