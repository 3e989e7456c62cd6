"""``celery rabbitdelay verify``, run as a user does."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest
from celery.platforms import EX_UNAVAILABLE

from celery_rabbitdelay.publishing.declaration import declare_destination
from tests.integration.conftest import LEVELS
from tests.integration.management import Place, node, place
from tests.integration.shop import make_app
from tests.integration.worker import run_celery
from tests.json_schemas import checked

__all__ = ["node", "place"]

NOWHERE = "http://guest:very-secret@127.0.0.1:1"


@pytest.fixture
def settings(place: Place) -> dict[str, Any]:
    """The configuration of a shop whose levels and queues are declared there."""
    settings = {
        "prefix": "shop",
        "broker_url": place.url,
        "rabbitdelay_prefix": "shop",
        "rabbitdelay_layout": LEVELS,
    }
    app = make_app(settings)
    for queue in app.amqp.queues.values():
        declare_destination(place.connection, app.rabbitdelay.topology, queue)
    app.close()
    return settings


def test_a_sound_broker_exits_with_0(place: Place, settings: dict[str, Any]) -> None:
    url = place.node.management_url

    told = run_celery(settings, f"rabbitdelay verify --strict --management {url}")
    asked = run_celery(settings, f"rabbitdelay verify --json --management {url}")
    answer = checked("verify", asked.stdout)

    assert told.returncode == 0, told.stdout + told.stderr
    assert told.stdout.endswith(", shop: 0 danger, 0 warning, 0 note\n")
    assert answer["findings"] == []


def test_a_danger_exits_with_1_and_says_the_way_out(place: Place, settings: dict[str, Any]) -> None:
    place.policy(r"^shop\.(ms|seconds)", expires=3_600_000)
    url = place.node.management_url

    with mock.patch.dict(os.environ, {"RABBITDELAY_MANAGEMENT_URL": url}):
        told = run_celery(settings, "rabbitdelay verify")
        asked = run_celery(settings, "rabbitdelay verify -j")

    assert told.returncode == asked.returncode == 1
    assert "danger  policy-expires: queue shop.seconds.1, " in told.stdout
    assert "and 11 more\n" in told.stdout
    assert f"  way out: rabbitmqctl set_policy -p {place.name} " in told.stdout
    answer = checked("verify", asked.stdout)
    assert answer["danger"] == 1
    assert len(answer["findings"][0]["subjects"]) == 14
    assert not told.stderr


def test_a_warning_exits_with_1_only_if_asked_to(place: Place, settings: dict[str, Any]) -> None:
    place.policy(r"^shop\.second$", max_length=10)
    command = f"rabbitdelay verify --management {place.node.management_url}"

    assert run_celery(settings, command).returncode == 0
    assert run_celery(settings, f"{command} --strict").returncode == 1


def test_without_the_management_api_the_error_says_how_to_name_it(settings: dict[str, Any]) -> None:
    told = run_celery(settings, f"rabbitdelay verify --management {NOWHERE}")
    # Its default port is not the one of this node.
    asked = run_celery(settings, "rabbitdelay verify -j")

    assert told.returncode == asked.returncode == EX_UNAVAILABLE
    (line,) = told.stderr.splitlines()
    assert line.startswith("Error: the management API http://127.0.0.1:1 cannot be used: ")
    assert "rabbitmq-plugins enable rabbitmq_management" in line
    assert "RABBITDELAY_MANAGEMENT_URL" in line
    assert "very-secret" not in told.stdout + told.stderr
    assert "http://127.0.0.1:15672" in checked("error", asked.stdout)["error"]


@pytest.mark.parametrize("url", ["amqp://guest:very-secret@host", "very-secret@host:x", "http://"])
def test_a_malformed_url_exits_with_2(settings: dict[str, Any], url: str) -> None:
    told = run_celery(settings, f"rabbitdelay verify --management {url}")

    assert told.returncode == 2
    assert "is not a URL such as http://host:15672" in told.stderr
    assert "very-secret" not in told.stderr


def test_a_broker_that_is_down_is_one_line() -> None:
    down = {"prefix": "shop", "broker_url": "amqp://guest:very-secret@127.0.0.1:1//"}

    told = run_celery(down, "rabbitdelay verify")
    asked = run_celery(down, "rabbitdelay verify --json")

    assert told.returncode == asked.returncode == EX_UNAVAILABLE
    (line,) = told.stderr.splitlines()
    assert line.startswith("Error: cannot ask the broker amqp://guest")
    assert "very-secret" not in line
    assert not told.stdout
    assert checked("error", asked.stdout) == {"error": line.removeprefix("Error: ")}


def test_help_needs_no_broker() -> None:
    down = {"prefix": "shop", "broker_url": "amqp://127.0.0.1:1//"}
    told = run_celery(down, "rabbitdelay verify --help")
    assert told.returncode == 0
    assert "--management URL" in told.stdout
