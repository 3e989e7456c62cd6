"""Sentry and OpenTelemetry see a delayed task as they see any other."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from celery_rabbitdelay.levels import headers
from celery_rabbitdelay.testing import wait_for
from tests.integration.shop import PATIENCE
from tests.integration.worker import Worker

#: The header in which each tracer passes its trace on.
TRACE_HEADERS = {"sentry": "sentry-trace", "opentelemetry": "traceparent"}

#: How each tracer calls the span that is a run of a task, and the one that sends it.
RUN = {"sentry": "queue.process", "opentelemetry": "CONSUMER"}
SEND = {"sentry": "queue.submit.celery", "opentelemetry": "PRODUCER"}

#: The span that the trace is continued with in the worker.
CONTINUES = {"sentry": "queue.task.celery", "opentelemetry": "CONSUMER"}

LATENCY = "messaging.message.receive.latency"


class TracedWorker(Worker):
    """A worker of the shop under a tracer, and producers under the same.

    Args:
        configuration: As for :class:`Worker`.
        tracer: The tracer's name.
    """

    def __init__(self, configuration: dict[str, Any], tracer: str) -> None:
        super().__init__(configuration, None, "--without-mingle")
        self.tracer = tracer

    def _command(self) -> list[str]:
        return [word.replace(".shop", ".traced_shop") for word in super()._command()]

    def _environment(self) -> dict[str, str]:
        return {**super()._environment(), "TRACER": self.tracer, "TRACES": str(self._traces)}

    @property
    def _traces(self) -> Path:
        return self.folder / "traces"

    def send(self, *tasks: tuple[str, list[Any], dict[str, Any]]) -> list[tuple[str, str]]:
        """Send tasks from a process of their own; return their ids and the ids of their traces."""
        command = [sys.executable, "-m", "tests.integration.traced_shop", json.dumps(tasks)]
        printed = subprocess.run(
            command, env=self._environment(), stdout=subprocess.PIPE, text=True, check=True
        ).stdout
        return [(task_id, trace_id) for task_id, trace_id in json.loads(printed)]

    def spans(self, what: str | None = None) -> list[Any]:
        """Return the spans so far: all, or those of one sort."""
        spans = [json.loads(line) for line in self._traces.read_text().splitlines()]
        return [span for span in spans if what in (None, span["what"])]

    def runs(self, number: int) -> list[Any]:
        """Wait until so many runs have been traced, and return them in the order of their ends."""
        what = RUN[self.tracer]
        wait_for(lambda: len(self.spans(what)) >= number, f"{number} spans of runs")
        return self.spans(what)


@pytest.mark.parametrize("tracer", ["sentry", "opentelemetry"])
def test_a_delayed_task_and_its_retry_belong_to_the_trace_of_their_producer(
    shop: Any, configuration: dict[str, Any], prefix: str, tracer: str
) -> None:
    mirror = {"queue": f"{prefix}.mirror", "headers": {"x-tenant": "shop"}}
    before_all = time.time()
    with TracedWorker(configuration, tracer) as worker:
        sent = worker.send(
            ("look", [], {"delay": 0.5, **mirror}),
            ("retry", [[], 2, {"countdown": 0.4}], {"delay": 0.5, **mirror}),
            ("retry", [[], 1, {"countdown": 0.4}], mirror),
        )
        (look, look_trace), (retry, retry_trace), (undelayed, undelayed_trace) = sent
        seen = [
            shop.AsyncResult(look).get(timeout=PATIENCE),
            *shop.AsyncResult(retry).get(timeout=PATIENCE),
            *shop.AsyncResult(undelayed).get(timeout=PATIENCE),
        ]
        expected = Counter(
            [(look, look_trace), *[(retry, retry_trace)] * 3, *[(undelayed, undelayed_trace)] * 2]
        )
        runs = worker.runs(expected.total())
        assert Counter((run["data"]["messaging.message.id"], run["trace"]) for run in runs) == (
            expected
        )
        senders = {span["id"] for span in worker.spans(SEND[tracer])}
        assert {span["parent"] for span in worker.spans(CONTINUES[tracer])} <= senders

    if tracer == "sentry":
        ids = [look, *[retry] * 3, *[undelayed] * 2]
        assert_sentry_reports_the_lateness_and_not_the_delay(runs, ids, seen, before_all)
    traces = [look_trace, *[retry_trace] * 3, *[undelayed_trace] * 2]
    for task, trace in zip(seen, traces, strict=True):
        assert trace in task["headers"][TRACE_HEADERS[tracer]]
        assert task["headers"]["x-tenant"] == "shop"
    assert headers.DUE not in seen[4]["headers"]
    delayed = [*seen[:4], seen[5]]
    for task in delayed:
        assert task["headers"][headers.DUE] <= task["at"] * 1000
    # The first attempt goes to a fanout exchange, and a retry back to the one queue it came from.
    for retried in (seen[2], seen[3], seen[5]):
        assert retried["headers"][headers.QUEUE] == f"{prefix}.mirror"
    # Each attempt has its own due time, not that of the attempt before.
    for before, after in ((1, 2), (2, 3), (4, 5)):
        assert seen[after]["headers"][headers.DUE] > seen[before]["at"] * 1000


def assert_sentry_reports_the_lateness_and_not_the_delay(
    runs: list[Any], ids: list[str], seen: list[Any], sent_at: float
) -> None:
    """Assert it of the time that the tasks of these ids were in the queue, in milliseconds."""
    latencies: dict[str, list[float]] = {task_id: [] for task_id in ids}
    for run in runs:
        latencies[run["data"]["messaging.message.id"]].append(run["data"][LATENCY])
    for task_id, task in zip(ids, seen, strict=True):
        # What a task itself sees of its lateness, a little later than the tracer.
        since = task["headers"].get(headers.DUE, sent_at * 1000)
        assert 0 <= latencies[task_id].pop(0) <= task["at"] * 1000 - since + 1
