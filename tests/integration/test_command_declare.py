"""``celery rabbitdelay declare`` and ``delete``, run as operators do."""

from __future__ import annotations

import os
import pty
import time
from collections.abc import Callable
from typing import Any

import pytest
from kombu import Connection
from kombu.common import Broadcast

from celery_rabbitdelay.kombu import Topology, bind_destination, declare, missing
from celery_rabbitdelay.publishing.declaration import is_declared, queue_counts
from celery_rabbitdelay.testing import wait_for
from tests.integration.arrivals import count
from tests.integration.modules import wait_until_served
from tests.integration.shop import PATIENCE, named
from tests.integration.waited import assert_waited
from tests.integration.worker import Worker, answer, run_command, start_celery


@pytest.fixture
def topology(shop: Any, connection: Connection) -> Topology:
    """The application's topology, which is declared."""
    found: Topology = shop.rabbitdelay.topology
    declare(connection, found)
    return found


def test_declare_says_what_was_missing_and_declares_it(
    configuration: dict[str, Any], topology: Topology, connection: Connection, channel: Any
) -> None:
    queue = topology.level_queues["ms.x100"][4]
    for part in (queue, topology.exchanges[2], topology.identity.marker):
        part(channel).delete()
    # Nobody can ask for a binding.
    (binding,) = [each for each in topology.bindings if each.pattern == "*.3.#"]
    channel.queue_unbind(binding.target, binding.source, binding.pattern)
    gone = missing(connection, topology)
    assert len(gone) == 3

    assert answer(configuration, "declare --dry-run", "declare", 1)["missing"] == list(gone)
    assert missing(connection, topology) == gone
    told = run_command(configuration, "declare")

    total = len(topology.exchanges) + 2 + len(topology.queues)
    assert f"3 of {total} exchanges and queues of {topology.prefix} were missing" in told.stdout
    assert is_declared(connection, topology)
    route = topology.route(0.3, "nobody")
    connection.Producer().publish("x", exchange=route.exchange, routing_key=route.routing_key)
    # It passes its level, and not the alternate exchange.
    distribution = topology.module_queues.distribution.name
    wait_for(lambda: count(connection, distribution) == 1, "the message behind the levels")
    found = answer(configuration, "declare", "declare")
    assert (found["missing"], found["fingerprint"]) == ([], topology.identity.fingerprint)


def test_declare_with_queues_is_all_that_declare_never_needs(
    configuration: dict[str, Any], make_shop: Callable[..., Any], connection: Connection
) -> None:
    # Without distribution, a task reaches its queue by its binding alone.
    settings: dict[str, Any] = {"rabbitdelay_declare": "never", "rabbitdelay_modules": []}
    own = {"exclusive_queue": True, "broadcast_queue": True}
    shop = make_shop(**settings, **own)
    queues = shop.amqp.queues.values()
    # Each worker has them for itself.
    alone = [each for each in queues if each.exclusive or isinstance(each, Broadcast)]

    found = answer({**configuration, **settings, **own}, "declare --queues", "declare")

    names = [each.name for each in queues if each not in alone]
    assert found["missing_queues"] == found["bound"] == names
    assert set(queue_counts(connection, alone).values()) == {None}
    with Worker({**configuration, **settings}):
        since = time.time()
        sent = shop.tasks["look"].apply_async(delay=0.5, queue=named(shop, "second"))
        assert_waited(sent.get(timeout=PATIENCE), since, 0.5)


def test_another_layout_under_the_prefix_is_neither_declared_nor_deleted(
    configuration: dict[str, Any], topology: Topology, connection: Connection
) -> None:
    other = {**configuration, "rabbitdelay_layout": [("hours", 6, 3600)]}
    for command in ("declare", "delete --yes --force"):
        error = answer(other, command, "error", 1)["error"]
        assert "other levels under the prefix" in error
    assert missing(connection, topology) == ()


def test_delete_deletes_the_levels_and_leaves_the_queues_of_tasks(
    configuration: dict[str, Any], topology: Topology, connection: Connection, target: Any
) -> None:
    bind_destination(connection, topology, target.name)
    # As an interrupted one has begun.
    for part in (topology.identity.marker, topology.queues[3], topology.exchanges[2]):
        part(connection.default_channel).delete()

    found = answer(configuration, "delete --dry-run", "delete")
    assert (found["dry_run"], found["deleted"]) == (True, False)
    assert len(missing(connection, topology)) == 3

    found = answer(configuration, "delete --yes", "delete")
    assert found["exchanges"] == len(topology.exchanges)
    assert found["queues"] == len(topology.queues) - 1
    assert len(missing(connection, topology)) == found["exchanges"] + found["queues"] + 3
    assert count(connection, target.name) == 0
    assert answer(configuration, "delete --yes", "delete")["deleted"] is False


def test_delete_refuses_while_messages_wait_unless_forced(
    configuration: dict[str, Any], make_shop: Callable[..., Any], connection: Connection
) -> None:
    layout = {"rabbitdelay_layout": [("hours", 6, 3600), ("tenths", 10, 360)]}
    shop, hours = make_shop(**layout), {**configuration, **layout}
    for delay in (3600, 3600, 7200):
        shop.tasks["look"].apply_async(delay=delay)

    for command in ("delete --yes", "delete --dry-run"):
        error = answer(hours, command, "error", 1)["error"]
        assert "3 messages still wait in 2 queues under the prefix" in error
        assert "--force" in error
    assert missing(connection, shop.rabbitdelay.topology) == ()

    found = answer(hours, "delete --yes --force", "delete")
    prefix = configuration["rabbitdelay_prefix"]
    assert found["waiting"] == {f"{prefix}.hours.1": 2, f"{prefix}.hours.2": 1}
    assert found["deleted"] is True


def test_delete_asks_before_it_deletes(
    configuration: dict[str, Any], topology: Topology, connection: Connection
) -> None:
    told = run_command(configuration, "delete", "y\n")
    assert told.returncode == 2
    assert "give --yes" in told.stderr
    assert missing(connection, topology) == ()

    for given, exit_status in ((b"n\n", 1), (b"y\n", 0)):
        primary, secondary = pty.openpty()
        with start_celery(configuration, "rabbitdelay delete", stdin=secondary) as asking:
            os.write(primary, given)
            assert asking.wait(PATIENCE) == exit_status
        os.close(primary)
        os.close(secondary)
        assert bool(missing(connection, topology)) == (exit_status == 0)


def test_delete_refuses_while_workers_may_hold_messages_unless_forced(
    configuration: dict[str, Any], topology: Topology, worker: Worker, connection: Connection
) -> None:
    wait_until_served(worker)
    error = answer(configuration, "delete --yes", "error", 1)["error"]
    assert "consumers still take messages from" in error
    assert "--rabbitdelay-modules=" in error
    assert missing(connection, topology) == ()
    assert answer(configuration, "delete --dry-run --force", "delete")["consumers"] == 2


def test_options_describe_another_topology(
    configuration: dict[str, Any], make_topology: Callable[..., Topology], connection: Connection
) -> None:
    topology = make_topology(queue_type="classic", shards=2)
    options = "--queue-type classic --shards 2"
    assert run_command(configuration, f"declare {options}").returncode == 0
    assert missing(connection, topology) == ()
    assert run_command(configuration, f"delete --yes {options}").returncode == 0
    assert missing(connection, topology)
