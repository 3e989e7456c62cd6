"""Sentry and OpenTelemetry see a delayed task as they see any other."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from celery_rabbitdelay.levels import headers
from celery_rabbitdelay.testing import wait_for
from tests.integration.shop import PATIENCE, named
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
    shop: Any, configuration: dict[str, Any], tracer: str
) -> None:
    to = {"queue": named(shop, "mirror"), "headers": {"x-tenant": "shop"}}
    with TracedWorker(configuration, tracer) as worker:
        sent = worker.send(
            ("look", [], {"delay": 0.5, **to}),
            ("retry", [[], 2, {"countdown": 0.4}], {"delay": 0.5, **to}),
        )
        (look, look_trace), (retry, retry_trace) = sent
        seen = [
            shop.AsyncResult(look).get(timeout=PATIENCE),
            *shop.AsyncResult(retry).get(timeout=PATIENCE),
        ]
        expected = Counter([(look, look_trace), *[(retry, retry_trace)] * 3])
        runs = worker.runs(expected.total())
        assert expected == Counter(
            (run["data"]["messaging.message.id"], run["trace"]) for run in runs
        )
        assert "guest:guest" not in str(worker.spans())
        senders = {span["id"] for span in worker.spans(SEND[tracer])}
        assert {span["parent"] for span in worker.spans(CONTINUES[tracer])} <= senders
    for task, trace in zip(seen, [look_trace, *[retry_trace] * 3], strict=True):
        assert trace in task["headers"][TRACE_HEADERS[tracer]]
        assert task["headers"]["x-tenant"] == "shop"
        assert task["headers"][headers.DUE] <= task["at"] * 1000
    # Each attempt has its own due time, not that of the attempt before.
    for before, after in pairwise(seen[1:]):
        assert after["headers"][headers.DUE] > before["at"] * 1000
    if tracer == "sentry":
        # It reports the lateness and not the delay; a task sees its own, a little later.
        late = sorted(task["at"] * 1000 - task["headers"][headers.DUE] for task in seen)
        reported = sorted(run["data"][LATENCY] for run in runs)
        for each, own in zip(reported, late, strict=True):
            assert 0 <= each <= own + 1
