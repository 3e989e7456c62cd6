# ruff: noqa: T201  # a program tells its test what it has measured
"""A producer and a worker in one process in which OpenTelemetry's SDK is set up.

``python -m tests.integration.measured_shop``, with the application's settings in the environment
variable ``SHOP``, prints what a reader of the SDK finds once three tasks have run.
"""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime, timedelta
from typing import Any

from celery.contrib.testing.worker import start_worker
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from celery_rabbitdelay import Row
from celery_rabbitdelay.testing import wait_for
from tests.integration.shop import PATIENCE, make_app


def found(reader: InMemoryMetricReader) -> dict[str, dict[str, float]]:
    """Return the values by metric and labels; the count of a histogram."""
    values: dict[str, dict[str, float]] = {}
    read: Any = reader.get_metrics_data()
    for resource in read.resource_metrics if read else ():
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                for point in metric.data.data_points:
                    labels = json.dumps(dict(sorted(point.attributes.items())))
                    value = point.count if hasattr(point, "count") else point.value
                    values.setdefault(metric.name, {})[labels] = value
    return values


def main() -> None:
    """Send three tasks, two of them in an envelope."""
    reader = InMemoryMetricReader()
    metrics.set_meter_provider(MeterProvider([reader]))
    app: Any = make_app(json.loads(os.environ["SHOP"]))
    with start_worker(app, perform_ping_check=False, shutdown_timeout=30):
        app.tasks["look"].apply_async(delay=0.3)
        eta = datetime.now(UTC) + timedelta(seconds=5)
        app.rabbitdelay.send_many("look", [Row(eta=eta)] * 2)

        def total(name: str) -> float:
            return sum(found(reader).get(f"celery_rabbitdelay.{name}", {}).values())

        # A module counts what it has published once that is confirmed.
        for name, expected in (("lateness", 3), ("module_published", 2)):
            wait_for(lambda: total(name) == expected, name, PATIENCE, interval=0.1)  # noqa: B023
        print(json.dumps(found(reader)))


if __name__ == "__main__":
    main()
