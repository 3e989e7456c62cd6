"""Sentry and OpenTelemetry see a delayed task as they see any other."""

import json
import os
import subprocess
import sys
from typing import Any

from celery_rabbitdelay.levels import headers
from tests.kernel.integration.worker import Worker


def test_a_delayed_task_and_its_retry_belong_to_the_trace_of_their_producer(
    shop: Any, configuration: dict[str, Any]
) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.metrics.integration.observed_shop"],
        env={**os.environ, **Worker.environment(configuration)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    first, second = found["seen"]
    for tracer, trace in found["traces"].items():
        runs = [each for each in found["runs"][tracer] if each[1] == trace]
        assert [task_id for task_id, *_ in runs] == [found["id"]] * 2
        for task, (*_, latency) in zip((first, second), runs, strict=True):
            # Sentry reports the lateness and not the delay; a task sees its own, a little later.
            late = task["at"] * 1000 - task["headers"][headers.DUE]
            assert tracer != "sentry" or 0 <= latency <= late + 1
    # Each attempt has its own due time, not that of the attempt before.
    assert second["headers"][headers.DUE] > first["at"] * 1000
