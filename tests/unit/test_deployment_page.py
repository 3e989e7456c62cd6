"""The examples of the page on containers are YAML, and ask for what a worker serves."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from celery_rabbitdelay.app.settings import Settings

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "how-to" / "deployment.md").read_text()


@pytest.fixture(scope="module")
def examples() -> list[Any]:
    return [yaml.safe_load(each) for each in re.findall(r"^```yaml\n(.*?)^```", PAGE, re.M | re.S)]


@pytest.fixture(scope="module")
def port() -> int:
    [given] = re.findall(r'rabbitdelay_metrics_port = "(.+)"', PAGE)
    assert Settings(metrics_port=given).metrics_port == given
    return int(given.partition(":")[2])


def test_the_compose_file_connects_a_worker_with_its_servers(
    examples: list[Any], port: int
) -> None:
    services = examples[0]["services"]
    broker, redis, worker = (services[name] for name in ("rabbitmq", "redis", "worker"))
    assert broker["image"].startswith("rabbitmq:")
    assert redis["image"].startswith("redis:")
    assert set(worker["depends_on"]) == {"rabbitmq", "redis"}
    for each in (broker, redis):
        [(volume, _)] = [mount.split(":") for mount in each["volumes"]]
        assert volume in examples[0]["volumes"]
        assert each["healthcheck"]["test"][0] == "CMD"
    given = broker["environment"]
    user, password = (given[f"RABBITMQ_DEFAULT_{name}"] for name in ("USER", "PASS"))
    assert worker["environment"]["CELERY_BROKER_URL"] == f"amqp://{user}:{password}@rabbitmq//"
    assert worker["environment"]["SHOP_REGISTRY_URL"].startswith("redis://redis:")
    *_, probe = worker["healthcheck"]["test"]
    compile(probe, "probe", "exec")
    assert f"http://127.0.0.1:{port}/readyz" in probe


def test_the_deployment_s_probes_ask_the_port_of_the_metrics(
    examples: list[Any], port: int
) -> None:
    spec = examples[1]["spec"]
    assert examples[1]["kind"] == "Deployment"
    assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
    [container] = spec["template"]["spec"]["containers"]
    assert container["ports"] == [{"name": "metrics", "containerPort": port}]
    asked = {name: probe["httpGet"] for name, probe in container.items() if name.endswith("Probe")}
    assert asked == {
        "startupProbe": {"path": "/healthz", "port": "metrics"},
        "livenessProbe": {"path": "/healthz", "port": "metrics"},
        "readinessProbe": {"path": "/readyz", "port": "metrics"},
    }
    assert container["command"][:4] == ["celery", "-A", "shop", "worker"]
