"""Real Prometheus scrapes a worker and a producer under load; its rules, and the dashboard."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, start_http_server

from celery_rabbitdelay import PublishError
from celery_rabbitdelay.app.instruments import INSTRUMENTS
from celery_rabbitdelay.testing import wait_for
from celery_rabbitdelay.testing.servers import free_port
from tests.integration.metrics import PREFIX
from tests.integration.notes import Notes
from tests.integration.worker import Worker
from tests.prometheus import PrometheusServer, promtool

MONITORING = Path(__file__).resolve().parents[2] / "docs" / "monitoring"
ALERTS = MONITORING / "alerts.yml"

#: The names of all series that a worker serves.
SERIES = {
    name
    for instrument in INSTRUMENTS
    for name in (
        [f"{instrument.metric}_{part}" for part in ("bucket", "count", "sum")]
        if instrument.buckets
        else [instrument.metric]
    )
}


def test_prometheus_has_the_counts_the_alert_and_the_figures_of_the_dashboard(
    shop: Any, configuration: dict[str, Any], noted: Notes
) -> None:
    registry, producer, port = CollectorRegistry(), free_port(), free_port()
    registry.register(shop.rabbitdelay.metrics)
    server, thread = start_http_server(producer, "127.0.0.1", registry)
    with (
        Worker({**configuration, "rabbitdelay_metrics_port": port}, None, "-c", "3"),
        PrometheusServer([port, producer], ALERTS) as prometheus,
    ):
        rows = [noted.row(number, delay=0.5 + number / 200) for number in range(200)]
        for envelopes in (True, False):
            shop.rabbitdelay.send_many("note", rows, envelopes=envelopes)
        for _ in range(5):
            with pytest.raises(PublishError):
                noted.send("broken", delay=0.5, headers={"x-broken": object()})

        def value(query: str) -> float:
            return prometheus.value(f"sum({PREFIX}{query})")

        wait_for(lambda: value("lateness_seconds_count") == 400, "all runs", 120, 0.5)
        assert (value("confirmed_total"), value("refused_total")) == (400, 5)
        wait_for(lambda: value("pending") == 0, "empty levels")
        wait_for(
            lambda: "RabbitDelayTasksRefused" in firing(prometheus),
            "the alert about the broken tasks",
        )
        assert_that_the_dashboards_queries_work(prometheus)
    assert len(noted()) == 400
    server.shutdown()
    server.server_close()
    thread.join()


def firing(prometheus: PrometheusServer) -> set[str]:
    return {alert["labels"]["alertname"] for alert in prometheus.ask("alerts")["alerts"]}


def queries_of_the_dashboard() -> list[str]:
    panels = json.loads((MONITORING / "dashboard.json").read_text())["panels"]
    found = [target["expr"] for panel in panels for target in panel["targets"]]
    assert len(found) > 20
    return [
        query.replace("$__rate_interval", "5m").replace("$task", ".*").replace("$queue", ".*")
        for query in found
    ]


def assert_that_the_dashboards_queries_work(prometheus: PrometheusServer) -> None:
    for query in queries_of_the_dashboard():
        assert prometheus.ask("query", query=query)["resultType"] == "vector", query
    for name in ("confirmed", "lateness_seconds_count", "pending"):
        (query, *_) = [each for each in queries_of_the_dashboard() if f"{PREFIX}{name}" in each]
        assert prometheus.ask("query", query=query)["result"], query


def test_dashboard_and_alerts_name_only_metrics_that_exist() -> None:
    for text in (*queries_of_the_dashboard(), ALERTS.read_text()):
        used = set(re.findall(rf"{PREFIX}\w+", text))
        assert used <= SERIES, used - SERIES


def test_promtool_accepts_the_alerts_and_their_unit_tests() -> None:
    for command in (["check", "rules", "alerts.yml"], ["test", "rules", "alerts_test.yml"]):
        run = promtool(*command, folder=MONITORING)
        assert run.returncode == 0, run.stdout + run.stderr


def test_each_alert_has_a_unit_test_that_fires_and_one_that_does_not() -> None:
    names = re.findall(r"alert: (\w+)", ALERTS.read_text())
    tests = (MONITORING / "alerts_test.yml").read_text()
    silent, loud = tests.split("each trouble raises its alert")
    assert names == re.findall(r"alertname: (\w+)", silent)
    assert names == re.findall(r"alertname: (\w+)", loud)
