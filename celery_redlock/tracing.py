"""OpenTelemetry: a span for each call for a lock, an event for each lost lease, and metrics.

    from celery_redlock.tracing import instrument
    instrument()

A span is named `redlock acquire`. It lasts from the call to its end, waiting included. It is a
child of the span that is current in the calling thread: in a task, that is the span of
`opentelemetry-instrumentation-celery`, which is current before a task is called. When a lease is
lost, the span in which it was acquired gets an event `redlock lost`, if it has not ended.

Names of resources may be personal data (`order:1234`), so they are left out by default.

The metrics are those of `metrics.py`, with the same labels and units. An exporter to Prometheus
gives them the same names, too: `celery_redlock.acquire` becomes `celery_redlock_acquire_total`, and
`celery_redlock.hold`, whose unit is `s`, becomes `celery_redlock_hold_seconds`.

`opentelemetry-instrument` instruments the package by its entry point, `RedlockInstrumentor`.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Any

try:
    from opentelemetry import metrics, trace
except ImportError as error:
    raise ImportError(
        'celery_redlock.tracing needs OpenTelemetry: pip install "celery-redlock[otel]"'
    ) from error

from . import __version__
from .events import Ask, Listener, subscribe, unsubscribe
from .measures import BUCKETS, COUNTERS, HISTOGRAMS, Measures
from .messages.signals import MAX_LEASES, is_tick, task_of, total_wait
from .protocol.errors import LeaseLost, QuorumUnavailable, ResourceHeld
from .protocol.lease import Lease
from .protocol.texts import printable

__all__ = ["RedlockInstrumentor", "instrument", "uninstrument"]

ACQUIRE, LOST = "redlock acquire", "redlock lost"
ATTRIBUTE = "celery_redlock."
"""The prefix of the names of all attributes."""


def instrument(
    tracer_provider: trace.TracerProvider | None = None,
    *,
    meter_provider: metrics.MeterProvider | None = None,
    with_resource: bool = False,
) -> None:
    """Trace and measure locks from now on, in this process and in processes forked from it.

    Args:
        tracer_provider: The provider of the tracer; None for the global one.
        meter_provider: The provider of the meter; None for the global one.
        with_resource: True to put the resource into spans; metrics never contain it.
    """
    global _tracing, _measures
    uninstrument()
    scope = ("celery_redlock", __version__)
    _tracing = _Tracing(trace.get_tracer(*scope, tracer_provider=tracer_provider), with_resource)
    subscribe(_tracing)
    _measures = _Measures(metrics.get_meter(*scope, meter_provider=meter_provider))


def uninstrument() -> None:
    """Stop tracing and measuring."""
    global _tracing, _measures
    if _tracing is not None and _measures is not None:
        unsubscribe(_tracing)
        _measures.close()
        _tracing = _measures = None


class RedlockInstrumentor:
    """The entry point for `opentelemetry-instrument`, with the methods of its `BaseInstrumentor`.

    It is not a subclass, so that the extra `otel` needs the API of OpenTelemetry alone.
    """

    def instrument(
        self,
        *,
        tracer_provider: trace.TracerProvider | None = None,
        meter_provider: metrics.MeterProvider | None = None,
        **_of_others: Any,
    ) -> None:
        """Call `instrument`; arguments for other instrumentors are ignored."""
        instrument(tracer_provider, meter_provider=meter_provider)

    def uninstrument(self, **_of_others: Any) -> None:
        """Call `uninstrument`."""
        uninstrument()


class _Tracing(Listener):
    def __init__(self, tracer: trace.Tracer, with_resource: bool) -> None:
        self._tracer = tracer
        self._with_resource = with_resource
        self._spans: OrderedDict[str, trace.Span] = OrderedDict()

    def acquire_finished(self, ask: Ask) -> None:
        if is_tick(ask.resource, ask.owner):
            return
        end = time.time_ns()
        task = task_of(ask.owner)
        waited, attempts = total_wait(task, ask)
        told: dict[str, Any] = {
            "task": task.name if task is not None else ask.owner.task,
            "waited": waited,
            "attempts": attempts,
            "nodes": ask.nodes,
            "quorum": ask.quorum,
        }
        if ask.lease is not None:
            told["outcome"] = "acquired"
            self._remember(ask.lease.token)
        elif isinstance(ask.refusal, ResourceHeld):
            told["outcome"] = "held"
            holder = ask.refusal.holder
            if holder is not None and holder.owner is not None:
                told["holder.task"] = printable(holder.owner.task)
                told["holder.task_id"] = printable(holder.owner.task_id)
        else:
            told["outcome"] = "unavailable"
        span = self._tracer.start_span(
            ACQUIRE,
            attributes=self._attributes(ask.resource, told),
            start_time=end - int(ask.waited * 1e9),
        )
        if isinstance(ask.refusal, QuorumUnavailable):
            # Leave out the error's message, because it contains the resource.
            span.set_status(trace.Status(trace.StatusCode.ERROR, "no quorum"))
        span.end(end)

    def lost(self, loss: LeaseLost) -> None:
        span = self._spans.pop(loss.lease.token, None) if loss.lease is not None else None
        if span is not None and span.is_recording():
            told = {"task": loss.task, "reason": loss.reason, "held_for": loss.held_for}
            span.add_event(LOST, self._attributes(str(loss.resource), told))

    def released(self, lease: Lease, held: bool) -> None:
        self._spans.pop(lease.token, None)

    def _attributes(self, resource: str, told: dict[str, Any]) -> dict[str, Any]:
        if self._with_resource:
            told["resource"] = printable(resource)
        return {ATTRIBUTE + name: value for name, value in told.items() if value != ""}

    def _remember(self, token: str) -> None:
        """Remember the span of a lease, because the thread that notices a loss has no span."""
        span = trace.get_current_span()
        if not span.is_recording():
            return
        self._spans[token] = span
        if len(self._spans) > MAX_LEASES:
            self._spans.popitem(last=False)


class _Measures(Measures):
    def __init__(self, meter: metrics.Meter) -> None:
        self._counters = {
            name: (meter.create_counter(ATTRIBUTE + name, description=about), labels)
            for name, (about, labels) in COUNTERS.items()
        }
        self._histograms = {
            name: (self._histogram(meter, name, about), label)
            for name, (about, label) in HISTOGRAMS.items()
        }
        super().__init__()

    @staticmethod
    def _histogram(meter: metrics.Meter, name: str, about: str) -> metrics.Histogram:
        # OpenTelemetry's default bounds are made for milliseconds.
        return meter.create_histogram(
            *(ATTRIBUTE + name, "s", about),
            explicit_bucket_boundaries_advisory=BUCKETS[name],
        )

    def add(self, counter: str, amount: int, *labels: str) -> None:
        instrument, names = self._counters[counter]
        instrument.add(amount, dict(zip(names, labels, strict=True)))

    def record(self, histogram: str, seconds: float, label: str) -> None:
        instrument, name = self._histograms[histogram]
        instrument.record(seconds, {name: label})


_tracing: _Tracing | None = None
_measures: _Measures | None = None
