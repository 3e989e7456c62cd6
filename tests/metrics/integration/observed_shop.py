# ruff: noqa: T201  # a program tells its test what was observed
"""A producer and a worker in one process that Sentry and OpenTelemetry's SDK observe.

``python -m tests.metrics.integration.observed_shop``, with the application's settings in the
environment variable ``SHOP``, sends a task that retries once, and two more in an envelope; it
prints what they saw, and the runs that both tracers saw.
"""

import json
import os
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import sentry_sdk
from opentelemetry import trace
from opentelemetry.instrumentation.celery import CeleryInstrumentor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from sentry_sdk.envelope import Envelope
from sentry_sdk.integrations.celery import CeleryIntegration
from sentry_sdk.transport import Transport

from celery_rabbitdelay import Row
from celery_rabbitdelay.testing import wait_for
from tests.kernel.integration.shop import PATIENCE, make_app

SPANS: Final = InMemorySpanExporter()
TRANSACTIONS: Final[list[Any]] = []

#: How many milliseconds after its time a message was received, as Sentry has it.
LATENCY: Final = "messaging.message.receive.latency"


class Transactions(Transport):
    """Keeps what Sentry would be sent."""

    def capture_envelope(self, envelope: Envelope) -> None:
        if (event := envelope.get_transaction_event()) is not None:
            TRANSACTIONS.append(event)


def observe() -> None:
    """Set all observers up."""
    sentry_sdk.init(
        transport=Transactions(),
        traces_sample_rate=1.0,
        default_integrations=False,
        auto_enabling_integrations=False,
        integrations=[CeleryIntegration()],
    )
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(SPANS))
    trace.set_tracer_provider(provider)
    CeleryInstrumentor().instrument()  # type: ignore[no-untyped-call]


def runs() -> dict[str, list[tuple[Any, str, Any]]]:
    """Return each run as each tracer has seen it: its task's id, its trace, and its latency."""
    sentry = [
        (span["data"]["messaging.message.id"], span["trace_id"], span["data"].get(LATENCY))
        for event in TRANSACTIONS
        for span in (event["contexts"]["trace"], *event["spans"])
        if span["op"] == "queue.process"
    ]
    opentelemetry = [
        (span.attributes["messaging.message.id"], f"{span.context.trace_id:032x}", None)
        for span in SPANS.get_finished_spans()
        if span.kind is trace.SpanKind.CONSUMER and span.attributes and span.context
    ]
    return {"sentry": sentry, "opentelemetry": opentelemetry}


def main() -> None:
    """Send the tasks, and wait until all observers have seen them."""
    observe()
    # Only here: Sentry patches what a worker imports.
    from celery.contrib.testing.worker import start_worker

    app: Any = make_app(json.loads(os.environ["SHOP"]))
    # OpenTelemetry looks its tasks up in the current application.
    app.set_current()
    with start_worker(app, perform_ping_check=False, shutdown_timeout=30):
        with (
            sentry_sdk.start_transaction(op="checkout", name="checkout") as transaction,
            trace.get_tracer("shop").start_as_current_span("checkout") as span,
        ):
            traces = {
                "sentry": transaction.trace_id,
                "opentelemetry": f"{span.get_span_context().trace_id:032x}",
            }
            sent = app.tasks["retry"].apply_async(([], 1, {"countdown": 0.4}), delay=0.5)
        eta = datetime.now(UTC) + timedelta(seconds=5)
        app.rabbitdelay.send_many("look", [Row(eta=eta)] * 2)

        seen = sent.get(timeout=PATIENCE)
        wait_for(lambda: len(runs()["opentelemetry"]) == 4, "all runs", PATIENCE, interval=0.1)
    found = {"id": sent.id, "traces": traces, "seen": seen, "runs": runs()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
