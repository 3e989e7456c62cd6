"""Real Prometheus scrapes a worker and a producer under load; its rules, and the dashboard."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kombu import Exchange
from prometheus_client import CollectorRegistry, start_http_server

from celery_rabbitdelay import PublishError, Row
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

#: Tasks of each kind that are sent.
ONE_BY_ONE, ROWS, OF_CHILDREN, CANCELLED, KEYED, LOST, BROKEN = 50, 400, 20, 20, 10, 10, 5

#: The counters of what becomes of a task that was sent.
ENDS = ("lateness_seconds_count", "cancelled_total", "superseded_total", "undeliverable_total")


@pytest.fixture
def settings(configuration: dict[str, Any], redis_url: str) -> dict[str, Any]:
    return {
        **configuration,
        "rabbitdelay_registry_url": redis_url,
        # What cannot be delivered is undeliverable at once.
        "rabbitdelay_retry_for": 0,
    }


@pytest.fixture
def shop(make_shop: Any, settings: dict[str, Any]) -> Any:
    return make_shop(**settings)


@pytest.fixture
def producers_port(shop: Any) -> Iterator[int]:
    """The port on which this process shows what it counts."""
    registry, port = CollectorRegistry(), free_port()
    registry.register(shop.rabbitdelay.metrics)
    server, thread = start_http_server(port, "127.0.0.1", registry)
    yield port
    server.shutdown()
    server.server_close()
    thread.join()


def test_prometheus_has_the_counts_of_the_ledger_exactly(
    shop: Any, settings: dict[str, Any], noted: Notes, producers_port: int
) -> None:
    port = free_port()
    with (
        Worker({**settings, "rabbitdelay_metrics_port": port}, None, "-c", "3"),
        PrometheusServer([port, producers_port], ALERTS) as prometheus,
    ):
        send_all(shop, noted)
        ends = [f"sum({PREFIX}{name})" for name in ENDS]
        confirmed = ONE_BY_ONE + ROWS + OF_CHILDREN + CANCELLED + KEYED + LOST

        def ended() -> float:
            return sum(max(prometheus.value(query), 0) for query in ends)

        wait_for(lambda: ended() >= confirmed, f"{confirmed} ends, not {ended()}", 120, 0.5)
        # Nothing more comes with the next scrapes.
        scrapes = f"sum(count_over_time({PREFIX}jobs_expired_total[1h]))"
        before = prometheus.value(scrapes)
        wait_for(lambda: prometheus.value(scrapes) >= before + 6, "three more scrapes of both")
        ran = Counter(map(str, noted()))
        ledger = {
            "sent_total": confirmed + BROKEN,
            "confirmed_total": confirmed,
            "refused_total": BROKEN,
            "lateness_seconds_count": ran.total(),
            "cancelled_total": CANCELLED - ran["cancelled"],
            "superseded_total": KEYED - ran["keyed"],
            "undeliverable_total": LOST,
            "expired_total": -1,  # there is no such series
            "duplicates_total": -1,
            "early_total": -1,
        }
        assert {name: prometheus.value(f"sum({PREFIX}{name})") for name in ledger} == ledger
        del ran["cancelled"], ran["keyed"]
        assert ran == Counter(map(str, range(ONE_BY_ONE + ROWS + OF_CHILDREN)))
        assert prometheus.value(f"max({PREFIX}backlog{{queue=~'.+[.]undeliverable'}})") == LOST
        wait_for(
            lambda: prometheus.value(f"sum(max by (level) ({PREFIX}pending))") == 0, "empty levels"
        )
        assert prometheus.value(f"max({PREFIX}missing_queues)") == 0
        assert prometheus.value(f"sum({PREFIX}registry_seconds_count)") > 0
        wait_for(
            lambda: "RabbitDelayTasksRefused" in firing(prometheus),
            "the alert about the broken tasks",
        )
        assert_that_the_dashboards_queries_work(prometheus)


def send_all(shop: Any, noted: Notes) -> None:
    """Send tasks in every way, with numbers from 0 for those that run."""
    note, delays, kwargs = shop.tasks["note"], shop.rabbitdelay, {"key": noted.key}
    numbers = iter(range(ONE_BY_ONE + ROWS + OF_CHILDREN))
    for result in [note.apply_async(["cancelled"], kwargs, delay=3) for _ in range(CANCELLED)]:
        delays.cancel(result)
    for _ in range(KEYED):
        note.apply_async(["keyed"], kwargs, delay=3, key=noted.key)
    # One that does not exist would close the module's channel: then what is in flight comes again.
    nowhere = Exchange(f"{delays.topology.prefix}.nowhere")
    with shop.connection_for_write() as connection:
        nowhere(connection.default_channel).declare()
    for _ in range(LOST):
        note.apply_async(["lost"], kwargs, delay=0.5, exchange=nowhere, routing_key="none")
    for _ in range(BROKEN):
        with pytest.raises(PublishError):
            note.apply_async(["lost"], kwargs, delay=0.5, headers={"x-broken": object()})
    for _ in range(OF_CHILDREN):
        options = {"args": [next(numbers)], "kwargs": kwargs, "delay": 0.5}
        shop.tasks["send"].delay("note", options)
    for _ in range(ONE_BY_ONE):
        note.apply_async([next(numbers)], kwargs, delay=0.5)
    half = ROWS // 2
    for envelopes in (True, False):
        rows = (Row([next(numbers)], kwargs, delay=1 + at / ROWS) for at in range(half))
        delays.send_many(note, rows, envelopes=envelopes)


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
    for name in ("confirmed", "lateness_seconds_count", "pending", "registry_seconds_bucket"):
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
