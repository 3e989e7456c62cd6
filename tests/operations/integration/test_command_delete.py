"""``celery rabbitdelay delete`` and ``export``, run as operators do."""

import os
import pty
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kombu import Connection

from celery_rabbitdelay.kombu import Topology, bind_destination, declare, missing
from celery_rabbitdelay.publishing.declaration import check_complete, is_declared
from celery_rabbitdelay.testing import RabbitMQServer
from tests.kernel.integration.arrivals import count
from tests.kernel.integration.shop import PATIENCE, make_app
from tests.kernel.integration.trouble import virtual_host
from tests.kernel.integration.worker import answer, run_command, start_celery
from tests.node_control import bindings, listed
from tests.rabbitmq_node import RabbitMQNode


def test_delete_deletes_the_levels_and_leaves_the_queues_of_tasks(
    configuration: dict[str, Any], standing: Topology, connection: Connection, target: Any
) -> None:
    bind_destination(connection, standing, target.name)
    other = {**configuration, "rabbitdelay_layout": [("hours", 6, 3600)]}
    refused = answer(other, "delete --yes --force", "error", 1)["error"]
    assert "differ on the broker" in refused
    assert missing(connection, standing) == ()
    # As an interrupted one has begun.
    for part in (standing.identity.marker, standing.queues[3], standing.exchanges[2]):
        part(connection.default_channel).delete()

    found = answer(configuration, "delete --dry-run", "delete")
    assert (found["dry_run"], found["deleted"]) == (True, False)
    assert len(missing(connection, standing)) == 3

    found = answer(configuration, "delete --yes", "delete")
    assert found["exchanges"] == len(standing.exchanges)
    assert found["queues"] == len(standing.queues) - 1
    assert len(missing(connection, standing)) == found["exchanges"] + found["queues"] + 3
    assert count(connection, target.name) == 0
    assert answer(configuration, "delete --yes", "delete")["deleted"] is False


def test_delete_refuses_while_messages_or_consumers_are_there_unless_forced(
    configuration: dict[str, Any],
    make_shop: Callable[..., Any],
    connection: Connection,
    channel: Any,
) -> None:
    layout = {"rabbitdelay_layout": [("hours", 6, 3600), ("tenths", 10, 360)]}
    shop, hours = make_shop(**layout), {**configuration, **layout}
    topology = shop.rabbitdelay.topology
    for delay in (3600, 3600, 7200):
        shop.tasks["look"].apply_async(delay=delay)
    refused = answer(hours, "delete --yes", "error", 1)["error"]
    assert "3 messages still wait in 2 queues under the prefix" in refused
    assert "--force" in refused

    for queue in topology.digit_queues:
        queue(connection.default_channel).purge()
    checkin = topology.module_queues.checkin.name
    channel.basic_consume(checkin, callback=list)
    refused = answer(hours, "delete --dry-run", "error", 1)["error"]
    assert "consumers still take messages from" in refused
    assert "--rabbitdelay-modules=" in refused
    assert missing(connection, topology) == ()

    shop.tasks["look"].apply_async(delay=3600)
    found = answer(hours, "delete --yes --force", "delete")
    waiting = {f"{configuration['rabbitdelay_prefix']}.hours.1": 1}
    assert (found["waiting"], found["consumers"], found["deleted"]) == (waiting, 1, True)


def test_delete_asks_before_it_deletes(
    configuration: dict[str, Any], standing: Topology, connection: Connection
) -> None:
    told = run_command(configuration, "delete", "y\n")
    assert told.returncode == 2
    assert "pass --yes" in told.stderr
    assert missing(connection, standing) == ()

    for given, exit_status in ((b"n\n", 1), (b"y\n", 0)):
        primary, secondary = pty.openpty()
        with start_celery(configuration, "rabbitdelay delete", stdin=secondary) as asking:
            os.write(primary, given)
            assert asking.wait(PATIENCE) == exit_status
        os.close(primary)
        os.close(secondary)
        assert bool(missing(connection, standing)) == (exit_status == 0)


@pytest.mark.parametrize("zeros", ["queue", "skip"])
def test_imported_definitions_are_what_declare_makes(
    configuration: dict[str, Any], session_rabbitmq: RabbitMQNode, prefix: str, zeros: str
) -> None:
    layout = {"name": "geometric", "levels": 4, "zeros": zeros}
    settings = {**configuration, "rabbitdelay_layout": layout, "rabbitdelay_shards": 2}
    path = Path(session_rabbitmq.folder, f"{prefix}.json")
    with virtual_host(session_rabbitmq, prefix) as settings["broker_url"]:
        app: Any = make_app(settings)
        topology = app.rabbitdelay.topology
        app.close()
        told = run_command(settings, "export --format definitions")
        assert told.returncode == 0, told.stderr
        path.write_text(told.stdout)

        session_rabbitmq.ctl("import_definitions", f"{session_rabbitmq._home}/{path.name}")

        with Connection(settings["broker_url"]) as connection:
            assert is_declared(connection, topology)
            check_complete(connection, topology)
            imported = bindings_of(session_rabbitmq, prefix)
            assert len(imported) == len(topology.bindings) + 1  # that of the probe's queue
            # RabbitMQ refuses to declare anything that has other arguments.
            declare(connection, topology)
            assert bindings_of(session_rabbitmq, prefix) == imported
    path.unlink()


def bindings_of(server: RabbitMQServer, vhost: str) -> set[str]:
    # The broker itself binds each queue to the default exchange.
    return {each for each in listed(server, bindings(vhost)) if "{source_name,<<>>}" not in each}
