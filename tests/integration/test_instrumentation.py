"""Sentry and OpenTelemetry see a delayed task as they see any other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from celery_rabbitdelay.levels import headers
from tests.integration.shop import named
from tests.integration.worker import Worker

#: How each tracer calls the span of a run, the one that continues the trace in the worker, and the
#: one that sends a task; and the header in which it passes its trace on.
TRACERS = {
    "sentry": ("queue.process", "queue.task.celery", "queue.submit.celery", "sentry-trace"),
    "opentelemetry": ("CONSUMER", "CONSUMER", "PRODUCER", "traceparent"),
}

LATENCY = "messaging.message.receive.latency"


def test_a_delayed_task_and_its_retry_belong_to_the_trace_of_their_producer_and_are_counted(
    shop: Any, configuration: dict[str, Any]
) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.integration.observed_shop"],
        env={**os.environ, **Worker.environment(configuration)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert "guest:guest" not in run.stdout
    first, second = found["seen"]
    for tracer, (ran, continues, sends, header) in TRACERS.items():
        spans, own = found["spans"][tracer], found["traces"][tracer]
        runs = [each for each in spans if each["what"] == ran and each["trace"] == own]
        assert [each["data"]["messaging.message.id"] for each in runs] == [found["id"]] * 2
        senders = {each["id"] for each in spans if each["what"] == sends}
        parents = {each["parent"] for each in spans if each["what"] == continues}
        assert parents - {None} <= senders, tracer
        assert all(own in each["headers"][header] for each in (first, second))
        if tracer == "sentry":
            # It reports the lateness and not the delay; a task sees its own, a little later.
            late = [each["at"] * 1000 - each["headers"][headers.DUE] for each in found["seen"]]
            reported = [each["data"][LATENCY] for each in runs]
            for each, own_late in zip(reported, late, strict=True):
                assert 0 <= each <= own_late + 1
    # Each attempt has its own due time, not that of the attempt before.
    assert second["headers"][headers.DUE] > first["at"] * 1000

    counted = found["measured"]
    queue = named(shop, "default")
    both = {json.dumps({"queue": queue, "task": task}): 2 for task in ("look", "retry")}
    for name in ("sent", "confirmed", "lateness"):
        assert counted[f"celery_rabbitdelay.{name}"] == both
    assert counted["celery_rabbitdelay.missing_queues"] == {"{}": 0}
    assert set(counted["celery_rabbitdelay.pending"]) == {
        json.dumps({"level": level}) for level in shop.rabbitdelay.topology.level_queues
    }
    distribution = json.dumps({"queue": f"{configuration['prefix']}.distribution"})
    assert counted["celery_rabbitdelay.module_published"][distribution] == 2
