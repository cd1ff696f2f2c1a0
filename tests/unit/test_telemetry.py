"""Spans and measurements, with OpenTelemetry and without."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from monarch_nb import config
from monarch_nb.runtime.recorder import instrumented
from monarch_nb.telemetry import get_meter, span, traced

pytestmark = pytest.mark.timeout(60)


class Recorded:
    """Spans that the program's tracer provider received."""

    def __init__(self, exporter: Any) -> None:
        self._exporter = exporter

    @property
    def names(self) -> list[str]:
        return [item.name for item in self._exporter.get_finished_spans()]

    @property
    def spans(self) -> list[Any]:
        return list(self._exporter.get_finished_spans())


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorded]:
    trace = pytest.importorskip("opentelemetry.trace")
    pytest.importorskip("opentelemetry.sdk.trace")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    yield Recorded(exporter)
    provider.shutdown()


def test_a_span_is_recorded_with_its_attributes(recorded: Recorded) -> None:
    with span("work", {"size": 3}) as work:
        work.set_attribute("more", True)
        work.add_event("halfway")
    (record,) = recorded.spans
    assert record.name == "work"
    assert dict(record.attributes) == {"size": 3, "more": True}
    assert [event.name for event in record.events] == ["halfway"]


def test_spans_nest(recorded: Recorded) -> None:
    with span("outer"), span("inner"):
        pass
    inner, outer = recorded.spans
    assert inner.parent.span_id == outer.context.span_id


def test_an_error_is_recorded_and_goes_on(recorded: Recorded) -> None:
    with pytest.raises(LookupError), span("work"):
        raise LookupError("gone")
    (record,) = recorded.spans
    assert not record.status.is_ok
    assert [event.name for event in record.events] == ["exception"]


def test_traced_functions_run_in_spans_of_their_name_or_another(recorded: Recorded) -> None:
    @traced
    def plain(value: int) -> int:
        """Says what it does."""
        return value + 1

    @traced(name="other")
    async def waiting(value: int) -> int:
        await asyncio.sleep(0)
        return value + 2

    assert plain(1) == 2
    assert asyncio.run(waiting(1)) == 3
    assert recorded.names == ["plain", "other"]
    assert plain.__doc__ == "Says what it does."
    assert asyncio.iscoroutinefunction(waiting)


def test_tracing_can_be_switched_off(recorded: Recorded) -> None:
    with config.configured(enable_otel_tracing=False), span("work"):
        pass
    assert recorded.names == []


def test_an_endpoint_that_nobody_traces_runs_as_it_is() -> None:
    def method() -> None: ...

    assert instrumented(method, "method") is method


def test_an_endpoint_runs_in_a_span_where_any_are_recorded(recorded: Recorded) -> None:
    assert instrumented(lambda: 5, "method")() == 5
    assert recorded.names == ["method"]


def test_without_a_provider_a_span_passes_its_bodys_error_on() -> None:
    def body() -> None:
        with span("work") as work:
            work.set_attribute("key", 1)
            work.add_event("event")
            raise LookupError("gone")

    with pytest.raises(LookupError, match="gone"):
        body()


def test_a_meter_measures_with_every_kind_of_instrument(monkeypatch: pytest.MonkeyPatch) -> None:
    sdk = pytest.importorskip("opentelemetry.sdk.metrics")
    from opentelemetry import metrics
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader = InMemoryMetricReader()
    provider = sdk.MeterProvider([reader])
    monkeypatch.setattr(metrics, "get_meter", provider.get_meter)
    meter: Any = get_meter()
    meter.create_counter("calls", unit="1", description="how many").add(1, {"kind": "x"})
    meter.create_up_down_counter("open").add(-1)
    meter.create_histogram("seconds").record(0.5)
    meter.create_gauge("heat").set(36.6)
    for kind in ("counter", "gauge", "up_down_counter"):
        getattr(meter, f"create_observable_{kind}")(f"seen_{kind}", [lambda _: [metrics.Observation(2)]])
    [resource] = reader.get_metrics_data().resource_metrics
    measured = {metric.name for scope in resource.scope_metrics for metric in scope.metrics}
    provider.shutdown()
    assert {"calls", "open", "seconds", "heat"} <= measured
    assert {"seen_counter", "seen_gauge", "seen_up_down_counter"} <= measured


WITHOUT = """
import sys
sys.modules["opentelemetry"] = None  # as if it were not installed
from monarch_nb.telemetry import get_meter, span, traced
meter = get_meter()
for make in ("counter", "up_down_counter", "observable_counter"):
    getattr(meter, f"create_{make}")("name", unit="s").add(1, attributes={"a": 1})
meter.create_histogram("name").record(1)
meter.create_gauge("name").set(1)
with span("work") as work:
    work.set_attribute("a", 1)
assert traced(lambda: 3)() == 3
"""


def test_without_opentelemetry_all_names_work_and_keep_nothing() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT], check=True, timeout=50)


def test_opentelemetry_is_not_imported_by_us() -> None:
    code = "import monarch_nb.actor, sys; assert not [m for m in sys.modules if m.startswith('opentelemetry')]"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=50)
