"""Spans of locks: over fake nodes, and OpenTelemetry's exporter into memory."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from celery.signals import task_postrun, task_prerun
from opentelemetry import trace
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry, Metric

from celery_redlock import QuorumUnavailable, ResourceHeld, SingletonTask, events
from celery_redlock.locking.acquisition import Acquisition
from celery_redlock.messages.headers import ATTEMPTS
from celery_redlock.metrics import install
from celery_redlock.protocol.values import Owner
from celery_redlock.tracing import RedlockInstrumentor, instrument, uninstrument
from tests.support.delivering import deliver, rob
from tests.support.fake_lock import FakeRedlock

OTHER = Owner("there", 1, task_id="other-id", task="other")
SECOND = 1_000_000_000


class Traces:
    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = self.provider.get_tracer("test")

    @property
    def spans(self) -> list[ReadableSpan]:
        return list(self._exporter.get_finished_spans())

    def one(self, name: str = "redlock acquire") -> ReadableSpan:
        (span,) = [span for span in self.spans if span.name == name]
        return span

    def told(self) -> dict[str, Any]:
        """Return the attributes of the span of the one acquire."""
        return {
            name.removeprefix("celery_redlock."): value
            for name, value in (self.one().attributes or {}).items()
        }

    def clear(self) -> None:
        self._exporter.clear()


@pytest.fixture
def traces() -> Iterator[Traces]:
    traces = Traces()
    instrument(traces.provider)
    yield traces
    uninstrument()
    assert not events.has_listeners()
    traces.provider.shutdown()


def test_span_has_outcome_wait_attempts_and_nodes_of_an_acquire(
    redlock: FakeRedlock, traces: Traces
) -> None:
    with redlock.lock("order:1234"):
        pass
    assert traces.told() == {
        **{"outcome": "acquired", "waited": 0.0, "attempts": 1, "nodes": 5, "quorum": 3}
    }
    assert "1234" not in traces.one().to_json()
    assert traces.one().status.status_code is trace.StatusCode.UNSET


def test_span_names_the_resource_only_with_resource_true(
    redlock: FakeRedlock, traces: Traces
) -> None:
    instrument(traces.provider, with_resource=True)
    with redlock.lock("order:1234"):
        pass
    assert traces.told()["resource"] == "order:1234"


def test_span_lasts_as_long_as_the_acquire_waited(
    redlock: FakeRedlock, traces: Traces, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = Acquisition._attempt

    def slow(*args: Any, **how: Any) -> Any:
        redlock.clock.advance(2.5)
        return attempt(*args, **how)

    monkeypatch.setattr(Acquisition, "_attempt", slow)
    with redlock.lock("r"):
        ended = time.time_ns()
    span = traces.one()
    assert span.start_time is not None and span.end_time is not None
    assert span.end_time - span.start_time == pytest.approx(2.5 * SECOND)
    assert abs(ended - span.end_time) < 60 * SECOND
    assert traces.told()["waited"] == 2.5


def test_span_of_a_held_lock_is_no_error_and_names_the_holder(
    redlock: FakeRedlock, traces: Traces
) -> None:
    redlock.acquire("r", owner=OTHER)
    traces.clear()
    with pytest.raises(ResourceHeld):
        redlock.acquire("r")
    told = traces.told()
    assert told["outcome"] == "held"
    assert (told["holder.task"], told["holder.task_id"]) == ("other", "other-id")
    assert traces.one().status.status_code is trace.StatusCode.UNSET


def test_span_without_a_quorum_is_an_error(redlock: FakeRedlock, traces: Traces) -> None:
    redlock.driver.dead = {0, 1, 2}
    with pytest.raises(QuorumUnavailable):
        redlock.acquire("order:zoe")
    assert traces.told()["outcome"] == "unavailable"
    assert traces.one().status.status_code is trace.StatusCode.ERROR
    assert "zoe" not in traces.one().to_json()


def test_span_in_a_task_is_a_child_of_the_span_of_the_task(
    redlock: FakeRedlock, app: Any, traces: Traces
) -> None:
    """The parent is opentelemetry-instrumentation-celery's; these signals start and end it."""

    @app.task(base=SingletonTask, name="charge", lock_key="k")
    def charge() -> None:
        rob(redlock, "k")
        redlock.clock.advance(4.0)
        redlock.watchdog.tend()

    active: list[Any] = []

    def begin(**_signal: Any) -> None:
        span = traces.tracer.start_span("run/charge")
        active.append(trace.use_span(span, end_on_exit=True))
        active[0].__enter__()

    def end(**_signal: Any) -> None:
        active[0].__exit__(None, None, None)

    task_prerun.connect(begin)
    task_postrun.connect(end)
    try:
        deliver(charge, **{ATTEMPTS: {"since": time.time() - 100.0, "held": 3}})
    finally:
        task_prerun.disconnect(begin)
        task_postrun.disconnect(end)
    span, of_task = traces.one(), traces.one("run/charge")
    assert span.parent is not None and of_task.context is not None
    assert span.parent.span_id == of_task.context.span_id
    assert traces.told()["task"] == "charge"
    assert traces.told()["attempts"] == 4
    assert traces.told()["waited"] >= 100.0  # in all; the span lasts as long as this call
    (lost,) = of_task.events
    assert lost.name == "redlock lost"
    assert lost.attributes == {
        **{"celery_redlock.task": "charge", "celery_redlock.reason": "refused"},
        "celery_redlock.held_for": 4.0,
    }


def test_loss_after_the_span_has_ended_raises_nothing(
    redlock: FakeRedlock, traces: Traces, caplog: pytest.LogCaptureFixture
) -> None:
    with traces.tracer.start_as_current_span("work") as span:
        held = redlock.lock("r")
        held.acquire()
        assert not span.events
    rob(redlock, "r")
    redlock.clock.advance(4.0)
    redlock.watchdog.tend()
    held.release()
    assert {record.name for record in caplog.records} == {"celery_redlock"}  # the loss alone


def samples(families: Iterable[Metric]) -> dict[tuple[str, tuple[str, ...]], float]:
    """Return the samples of this library, without their times of creation."""
    return {
        (sample.name, tuple(v for k, v in sorted(sample.labels.items()) if "otel_" not in k)): (
            sample.value
        )
        for family in families
        for sample in family.samples
        if sample.name.startswith("celery_redlock") and not sample.name.endswith("_created")
    }


def test_opentelemetry_metrics_equal_the_prometheus_metrics(redlock: FakeRedlock) -> None:
    """The same names, labels, bounds and values: one dashboard shows either."""
    ours, reader = install(CollectorRegistry()), PrometheusMetricReader()
    provider = MeterProvider([reader], shutdown_on_exit=False)
    instrument(meter_provider=provider)
    try:
        with redlock.lock("r"), pytest.raises(ResourceHeld):
            redlock.acquire("r", wait=0)
        events.emit_node("node_answered", "a:1", 0.0003)
        events.emit_node("node_failed", "a:1", "timeout")
        theirs = samples(reader._collector.collect())
        assert theirs == samples(ours.registry.collect())
        assert theirs[("celery_redlock_acquire_total", ("held", ""))] == 1
        assert theirs[("celery_redlock_node_rtt_seconds_bucket", ("0.0005", "a:1"))] == 1
        uninstrument()
        with redlock.lock("r"):
            pass
        assert samples(reader._collector.collect()) == theirs
    finally:
        uninstrument()
        provider.shutdown()
        ours.close()


def test_instrumentor_is_called_as_opentelemetry_calls_its_entry_points(
    redlock: FakeRedlock,
) -> None:
    traces = Traces()
    RedlockInstrumentor().instrument(skip_dep_check=True, tracer_provider=traces.provider)
    with redlock.lock("r"):
        pass
    RedlockInstrumentor().uninstrument()
    assert traces.one() and not events.has_listeners()
    traces.provider.shutdown()


def test_tracing_without_opentelemetry_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['opentelemetry'] = None\n"
        "try:\n    import celery_redlock.tracing\n"
        "except ImportError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert 'pip install "celery-redlock[otel]"' in done.stdout, done.stderr
