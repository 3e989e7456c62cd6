"""The exported definitions, imported into a virtual host that is empty."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kombu import Connection

from celery_rabbitdelay.kombu import declare, missing
from celery_rabbitdelay.publishing.declaration import check_complete, is_declared
from celery_rabbitdelay.testing import RabbitMQServer
from tests.integration.trouble import virtual_host
from tests.integration.worker import run_command
from tests.node_control import bindings, listed


@pytest.fixture
def empty(private_rabbitmq: RabbitMQServer, prefix: str) -> Iterator[str]:
    """The URL of an empty virtual host."""
    with virtual_host(private_rabbitmq, prefix) as url:
        yield url


def _bindings(server: RabbitMQServer, vhost: str) -> set[str]:
    # The broker itself binds each queue to the default exchange.
    return {each for each in listed(server, bindings(vhost)) if "{source_name,<<>>}" not in each}


@pytest.mark.parametrize(
    "settings",
    [
        {"rabbitdelay_layout": {"name": "geometric", "levels": 4, "zeros": "queue"}},
        {"rabbitdelay_layout": {"name": "binary", "levels": 9, "zeros": "skip"}},
        {"rabbitdelay_shards": 2},
    ],
    ids=["queue", "skip", "shards"],
)
def test_imported_definitions_are_what_declare_makes(
    settings: dict[str, Any],
    empty: str,
    prefix: str,
    configuration: dict[str, Any],
    make_shop: Callable[..., Any],
    private_rabbitmq: RabbitMQServer,
) -> None:
    settings = {**settings, "broker_url": empty}
    topology = make_shop(**settings).rabbitdelay.topology
    path = Path(private_rabbitmq.folder, "exported.json")
    command = f"export --format definitions --output {path}"
    told = run_command({**configuration, **settings}, command)
    assert told.returncode == 0, told.stderr
    with Connection(empty) as connection:
        assert missing(connection, topology)

        private_rabbitmq.ctl("import_definitions", f"{private_rabbitmq._home}/{path.name}")

        assert is_declared(connection, topology)
        check_complete(connection, topology)
        imported = _bindings(private_rabbitmq, prefix)
        assert len(imported) == len(topology.bindings) + 1  # that of the probe's queue
        # RabbitMQ refuses to declare anything that has other arguments.
        declare(connection, topology)
        assert _bindings(private_rabbitmq, prefix) == imported
    path.unlink()
