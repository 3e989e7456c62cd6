"""The examples of the page on containers are YAML, and ask for what a worker serves."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from celery_rabbitdelay.app.settings import Settings

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "how-to" / "deployment.md").read_text()

COMPOSE, DEPLOYMENT = (
    yaml.safe_load(each) for each in re.findall(r"^```yaml\n(.*?)^```", PAGE, re.M | re.S)[:2]
)

[GIVEN] = re.findall(r'rabbitdelay_metrics_port = "(.+)"', PAGE)
PORT = int(Settings(metrics_port=GIVEN).metrics_port.partition(":")[2])  # type: ignore[union-attr]


def test_the_compose_file_connects_a_worker_with_its_servers() -> None:
    services = COMPOSE["services"]
    broker, worker = services["rabbitmq"]["environment"], services["worker"]
    assert set(worker["depends_on"]) == {"rabbitmq", "redis"} <= services.keys()
    user, password = (broker[f"RABBITMQ_DEFAULT_{name}"] for name in ("USER", "PASS"))
    assert worker["environment"]["CELERY_BROKER_URL"] == f"amqp://{user}:{password}@rabbitmq//"
    *_, probe = worker["healthcheck"]["test"]
    compile(probe, "probe", "exec")
    assert f"http://127.0.0.1:{PORT}/readyz" in probe


def test_the_deployment_s_probes_ask_the_port_of_the_metrics() -> None:
    spec = DEPLOYMENT["spec"]
    assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
    [container] = spec["template"]["spec"]["containers"]
    assert container["ports"] == [{"name": "metrics", "containerPort": PORT}]
    asked = {name: probe["httpGet"] for name, probe in container.items() if name.endswith("Probe")}
    assert {name: probe["path"] for name, probe in asked.items()} == {
        "startupProbe": "/healthz",
        "livenessProbe": "/healthz",
        "readinessProbe": "/readyz",
    }
