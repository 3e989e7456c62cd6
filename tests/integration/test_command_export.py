"""The exported definitions, imported into a virtual host that is empty."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kombu import Connection

from celery_rabbitdelay.kombu import (
    Layout,
    Topology,
    binary,
    bind_destination,
    clock,
    custom,
    declare,
    geometric,
    missing,
)
from celery_rabbitdelay.operations.export.definitions import as_definitions
from celery_rabbitdelay.publishing.declaration import check_complete, is_declared
from celery_rabbitdelay.testing import RabbitMQServer
from tests.integration.conftest import LEVELS
from tests.integration.shop import PATIENCE
from tests.integration.trouble import virtual_host
from tests.integration.waited import assert_waited
from tests.integration.worker import run_command
from tests.node_control import bindings, listed

LAYOUTS = {
    "clock-bind": lambda: clock(),
    "binary-skip": lambda: binary(levels=12, zeros="skip"),
    "geometric-queue": lambda: geometric(levels=4, zeros="queue"),
    "custom-skip": lambda: custom(LEVELS, "skip"),
}


@pytest.fixture
def empty(private_rabbitmq: RabbitMQServer, prefix: str) -> Iterator[str]:
    """The URL of an empty virtual host."""
    with virtual_host(private_rabbitmq, prefix) as url:
        yield url


@pytest.fixture
def import_text(private_rabbitmq: RabbitMQServer) -> Iterator[Callable[[str], None]]:
    """Imports definitions by ``rabbitmqctl``."""
    path = private_rabbitmq.folder / "exported.json"

    def do(text: str) -> None:
        path.write_text(text)
        private_rabbitmq.ctl("import_definitions", f"{private_rabbitmq._home}/{path.name}")

    yield do
    path.unlink(missing_ok=True)


def _bindings(server: RabbitMQServer, vhost: str) -> set[str]:
    # The broker itself binds each queue to the default exchange.
    return {each for each in listed(server, bindings(vhost)) if "{source_name,<<>>}" not in each}


@pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS)
def test_imported_definitions_are_what_declare_makes(
    make: Callable[[], Layout],
    empty: str,
    prefix: str,
    import_text: Callable[[str], None],
    private_rabbitmq: RabbitMQServer,
) -> None:
    topology = Topology("shop.delay", make(), shards=2 if make().name == "geometric" else 1)
    with Connection(empty) as connection:
        assert missing(connection, topology)

        import_text(as_definitions(topology, prefix))

        assert missing(connection, topology) == ()
        assert is_declared(connection, topology)
        check_complete(connection, topology)
        imported = _bindings(private_rabbitmq, prefix)
        assert len(imported) == len(topology.bindings) + 1  # that of the probe's queue
        # RabbitMQ refuses to declare anything that has other arguments.
        declare(connection, topology)
        assert _bindings(private_rabbitmq, prefix) == imported


@pytest.mark.parametrize("declaring", ["never", "auto"])
def test_delayed_tasks_run_on_imported_definitions(
    declaring: str,
    empty: str,
    configuration: dict[str, Any],
    make_shop: Callable[..., Any],
    serve: Callable[..., Any],
    import_text: Callable[[str], None],
    tmp_path: Path,
) -> None:
    settings: dict[str, Any] = {
        "broker_url": empty,
        "rabbitdelay_declare": declaring,
        # Without distribution, a task reaches its queue by its binding alone.
        "rabbitdelay_modules": [],
    }
    path, own = tmp_path / "definitions.json", {**configuration, **settings}
    told = run_command(own, f"export --format definitions --output {path}")
    assert told.returncode == 0, told.stderr
    import_text(path.read_text())
    if declaring == "never":
        shop = make_shop(**settings)
        with Connection(empty) as connection:
            for queue in shop.amqp.queues.values():
                queue(connection.default_channel).declare()
                bind_destination(connection, shop.rabbitdelay.topology, queue.name)

    shop, since = serve(**settings), time.time()
    sent = [(shop.tasks["look"].apply_async(delay=delay), delay) for delay in (0.3, 1.4)]
    for result, delay in sent:
        assert_waited(result.get(timeout=PATIENCE), since, delay)
