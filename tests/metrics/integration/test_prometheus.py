"""Real Prometheus scrapes a worker and a producer under load; its rules, and the dashboard."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry, start_http_server

from celery_rabbitdelay import PublishError
from celery_rabbitdelay.metrics.instruments import INSTRUMENTS
from celery_rabbitdelay.testing import Server, wait_for
from celery_rabbitdelay.testing.servers import PATIENCE, free_port
from tests import CACHE
from tests.kernel.integration.notes import Notes
from tests.kernel.integration.worker import Worker, answers
from tests.metrics.integration.metrics import PREFIX

MONITORING = Path(__file__).resolve().parents[3] / "docs" / "monitoring"
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


def program(name: str) -> str:
    """Return the path of ``prometheus`` or ``promtool``; ``set_up.sh`` unpacks them."""
    unpacked = CACHE / "prometheus" / "usr" / "bin" / name
    return str(unpacked) if unpacked.exists() else shutil.which(name) or name


class PrometheusServer(Server):
    """A Prometheus of our own, with the alerts of the documentation.

    Args:
        ports: The ports of this machine that it scrapes, every three seconds.
    """

    package = "prometheus"

    def __init__(self, *ports: int) -> None:
        super().__init__()
        targets = {"targets": [f"127.0.0.1:{port}" for port in ports]}
        self._configuration = {
            # A scrape may take no longer than the interval.
            "global": {"scrape_interval": "3s", "evaluation_interval": "1s"},
            "rule_files": [str(ALERTS)],
            "scrape_configs": [{"job_name": "celery", "static_configs": [targets]}],
        }

    def ask(self, path: str, **parameters: str) -> Any:
        """Return what its API answers."""
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}"
        return httpx.get(url, params=parameters, timeout=PATIENCE).json()["data"]

    def value(self, query: str) -> float:
        """Return the value of a query that has one result; -1 if it has none."""
        result = self.ask("query", query=query)["result"]
        return float(result[0]["value"][1]) if result else -1.0

    def _command(self) -> list[str]:
        # JSON is YAML.
        file = self.folder / "prometheus.yml"
        file.write_text(json.dumps(self._configuration))
        return [
            program("prometheus"),
            f"--config.file={file}",
            f"--storage.tsdb.path={self.folder}/data",
            f"--web.listen-address=127.0.0.1:{self.port}",
            "--log.level=warn",
        ]

    def _ready(self) -> bool:
        return answers(f"http://127.0.0.1:{self.port}/-/ready")


def test_prometheus_has_the_counts_the_alert_and_the_figures_of_the_dashboard(
    shop: Any, configuration: dict[str, Any], noted: Notes
) -> None:
    registry, producer, port = CollectorRegistry(), free_port(), free_port()
    registry.register(shop.rabbitdelay.metrics)
    server, thread = start_http_server(producer, "127.0.0.1", registry)
    with (
        Worker({**configuration, "rabbitdelay_metrics_port": port}, None, "-c", "3"),
        PrometheusServer(port, producer) as prometheus,
    ):
        rows = [noted.row(number, delay=0.5 + number / 200) for number in range(200)]
        for envelopes in (True, False):
            shop.rabbitdelay.send_many("note", rows, envelopes=envelopes)
        for _ in range(5):
            with pytest.raises(PublishError):
                noted.send("broken", delay=0.5, headers={"x-broken": object()})

        def value(query: str) -> float:
            return prometheus.value(f"sum({PREFIX}{query})")

        counts = {"confirmed_total": 400, "refused_total": 5, "lateness_seconds_count": 400}
        for name, expected in {**counts, "pending": 0}.items():
            wait_for(lambda: value(name) == expected, name, 120, 0.5)  # noqa: B023
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
        # A rate needs two scrapes.
        wait_for(lambda: prometheus.ask("query", query=query)["result"], query, 60, 0.5)  # noqa: B023


def test_dashboard_and_alerts_name_only_metrics_that_exist() -> None:
    for text in (*queries_of_the_dashboard(), ALERTS.read_text()):
        used = set(re.findall(rf"{PREFIX}\w+", text))
        assert used <= SERIES, used - SERIES


def test_promtool_accepts_the_alerts_and_their_unit_tests() -> None:
    for command in (["check", "rules", "alerts.yml"], ["test", "rules", "alerts_test.yml"]):
        run = subprocess.run(
            [program("promtool"), *command],
            cwd=MONITORING,
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode == 0, run.stdout + run.stderr


def test_each_alert_has_a_unit_test_that_fires_and_one_that_does_not() -> None:
    names = re.findall(r"alert: (\w+)", ALERTS.read_text())
    tests = (MONITORING / "alerts_test.yml").read_text()
    silent, loud = tests.split("each trouble raises its alert")
    assert names == re.findall(r"alertname: (\w+)", silent)
    assert names == re.findall(r"alertname: (\w+)", loud)
