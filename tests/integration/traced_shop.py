"""The shop of the integration tests under a tracer: in a worker, and in a producer's process.

The environment variable ``TRACER`` says which tracer, ``TRACES`` the file that gets each span as
a line of JSON (see :class:`Span`). As a program it sends tasks: its argument is a JSON list of
name, arguments and options; it prints a JSON list of task ids and of the traces they belong to.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypedDict

import sentry_sdk
from opentelemetry import trace
from opentelemetry.instrumentation.celery import CeleryInstrumentor
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from sentry_sdk.envelope import Envelope
from sentry_sdk.integrations.celery import CeleryIntegration
from sentry_sdk.transport import Transport

from tests.integration.shop import app

TRACES = Path(os.environ["TRACES"])


class Span(TypedDict):
    """A span as either tracer has seen it."""

    trace: str
    id: str
    parent: str | None
    what: str
    data: dict[str, Any]


def _write(spans: Sequence[Span]) -> None:
    lines = "".join(json.dumps(span, default=str) + "\n" for span in spans)
    with TRACES.open("a") as file:
        file.write(lines)


class SentryFile(Transport):
    """Writes down what Sentry would be sent."""

    def capture_envelope(self, envelope: Envelope) -> None:
        event: Any = envelope.get_transaction_event()
        if event is None:
            return
        _write(
            [
                Span(
                    trace=span["trace_id"],
                    id=span["span_id"],
                    parent=span.get("parent_span_id"),
                    what=span["op"],
                    data=span.get("data") or {},
                )
                for span in (event["contexts"]["trace"], *event["spans"])
            ]
        )


class OpenTelemetryFile(SpanExporter):
    """Writes down what an exporter of OpenTelemetry would send."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        _write([_as_span(span) for span in spans])
        return SpanExportResult.SUCCESS


def _as_span(span: ReadableSpan) -> Span:
    assert span.context is not None
    return Span(
        trace=f"{span.context.trace_id:032x}",
        id=f"{span.context.span_id:016x}",
        parent=f"{span.parent.span_id:016x}" if span.parent else None,
        what=span.kind.name,
        data=dict(span.attributes or {}),
    )


def _trace_with_sentry() -> None:
    sentry_sdk.init(
        transport=SentryFile(),
        traces_sample_rate=1.0,
        default_integrations=False,
        auto_enabling_integrations=False,
        integrations=[CeleryIntegration()],
    )


def _trace_with_opentelemetry() -> None:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(OpenTelemetryFile()))
    trace.set_tracer_provider(provider)
    CeleryInstrumentor().instrument()  # type: ignore[no-untyped-call]


@contextmanager
def _sentry_checkout() -> Iterator[str]:
    with sentry_sdk.start_transaction(op="checkout", name="checkout") as transaction:
        yield transaction.trace_id


@contextmanager
def _opentelemetry_checkout() -> Iterator[str]:
    with trace.get_tracer("shop").start_as_current_span("checkout") as span:
        yield f"{span.get_span_context().trace_id:032x}"


START: dict[str, Callable[[], None]] = {
    "sentry": _trace_with_sentry,
    "opentelemetry": _trace_with_opentelemetry,
}
CHECKOUT = {"sentry": _sentry_checkout, "opentelemetry": _opentelemetry_checkout}

START[os.environ["TRACER"]]()
# OpenTelemetry looks its tasks up in the current application.
app.set_current()


def main() -> None:
    """Send the tasks of the argument, each in a trace of its own."""
    sent = []
    for name, args, options in json.loads(sys.argv[1]):
        with CHECKOUT[os.environ["TRACER"]]() as trace_id:
            sent.append((app.tasks[name].apply_async(args, **options).id, trace_id))
    print(json.dumps(sent))  # noqa: T201


if __name__ == "__main__":
    main()
