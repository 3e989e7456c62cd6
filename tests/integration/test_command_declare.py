"""``celery rabbitdelay declare`` and ``delete``, run as operators do."""

from __future__ import annotations

import os
import pty
import time
from collections.abc import Callable
from typing import Any

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

#: A level that none of these tests waits for.
HOURS = [("hours", 6, 3600), ("tenths", 10, 360)]


def test_declare_says_what_was_missing_and_declares_it(
    configuration: dict[str, Any], shop: Any, connection: Connection
) -> None:
    topology = shop.rabbitdelay.topology
    everything = missing(connection, topology)

    dry = answer(configuration, "declare --dry-run", "declare", 1)
    assert dry["missing"] == list(everything)
    assert missing(connection, topology) == everything

    told = run_command(configuration, "declare")
    assert told.returncode == 0, told.stderr
    total = len(topology.exchanges) + 2 + len(topology.queues)
    assert len(everything) == total
    assert f"{total} of {total} exchanges and queues of {topology.prefix} were" in told.stdout
    assert missing(connection, topology) == ()
    assert is_declared(connection, topology)

    found = answer(configuration, "declare", "declare")
    assert found["missing"] == []
    assert found["fingerprint"] == topology.identity.fingerprint


def test_declare_makes_what_was_deleted_and_a_binding_that_nobody_can_ask_for(
    configuration: dict[str, Any],
    make_shop: Callable[..., Any],
    connection: Connection,
    channel: Any,
) -> None:
    # The worker declares nothing, and delivers nothing by other means.
    settings: dict[str, Any] = {"rabbitdelay_declare": "never", "rabbitdelay_modules": []}
    shop = make_shop(**settings)
    topology = shop.rabbitdelay.topology
    declare(connection, topology)
    queue = topology.level_queues["ms.x100"][4]
    queue(channel).delete()
    (binding,) = [each for each in topology.bindings if each.pattern == "*.3.#"]
    channel.queue_unbind(binding.target, binding.source, binding.pattern)

    own = {**configuration, **settings}
    found = answer(own, "declare --queues", "declare")

    assert found["missing"] == [queue.name]
    with Worker(own):
        sent = [shop.tasks["look"].apply_async(delay=delay) for delay in (0.3, 0.5)]
        assert [each.get(timeout=PATIENCE)["given"] for each in sent] == [[], []]


def test_declare_with_queues_is_all_that_declare_never_needs(
    configuration: dict[str, Any], make_shop: Callable[..., Any], connection: Connection
) -> None:
    # Without distribution, a task reaches its queue by its binding alone.
    settings: dict[str, Any] = {"rabbitdelay_declare": "never", "rabbitdelay_modules": []}
    never, shop = {**configuration, **settings}, make_shop(**settings)

    dry = run_command(never, "declare --queues --dry-run")
    found = answer(never, "declare --queues", "declare")

    names = [queue.name for queue in shop.amqp.queues.values()]
    assert dry.returncode == 1
    assert f"{len(names)} queues of tasks are missing: " in dry.stdout
    assert found["missing_queues"] == found["bound"] == names
    with Worker(never):
        since = time.time()
        sent = shop.tasks["look"].apply_async(delay=0.5, queue=named(shop, "second"))
        assert_waited(sent.get(timeout=PATIENCE), since, 0.5)


def test_another_layout_under_the_prefix_is_neither_declared_nor_deleted(
    configuration: dict[str, Any], shop: Any, connection: Connection
) -> None:
    topology = shop.rabbitdelay.topology
    declare(connection, topology)
    other = {**configuration, "rabbitdelay_layout": HOURS}

    for command in ("declare", "declare --dry-run", "delete --yes --force", "delete --dry-run"):
        told = run_command(other, command)
        assert told.returncode == 1, command
        (line,) = told.stderr.splitlines()
        assert "other levels under the prefix" in line
        assert f"Error: {answer(other, command, 'error', 1)['error']}" == line

    assert missing(connection, topology) == ()


def test_delete_deletes_the_levels_and_leaves_the_queues_of_tasks(
    configuration: dict[str, Any], shop: Any, connection: Connection, target: Any
) -> None:
    topology = shop.rabbitdelay.topology
    declare(connection, topology)
    bind_destination(connection, topology, target.name)

    found = answer(configuration, "delete --dry-run", "delete")
    assert (found["dry_run"], found["deleted"]) == (True, False)
    assert found["exchanges"] == len(topology.exchanges) + 2
    assert found["queues"] == len(topology.queues)
    assert missing(connection, topology) == ()

    told = run_command(configuration, "delete --yes")
    assert told.returncode == 0, told.stderr
    assert told.stdout.splitlines()[-1] == "Deleted"
    assert len(missing(connection, topology)) == found["exchanges"] + found["queues"]
    assert count(connection, target.name) == 0

    assert answer(configuration, "delete --yes", "delete")["deleted"] is False


def test_delete_finishes_what_an_interrupted_one_has_begun(
    configuration: dict[str, Any], shop: Any, connection: Connection, channel: Any
) -> None:
    topology = shop.rabbitdelay.topology
    declare(connection, topology)
    for part in (topology.identity.marker, topology.queues[3], topology.exchanges[2]):
        part(channel).delete()

    found = answer(configuration, "delete --yes", "delete")

    assert found["exchanges"] == len(topology.exchanges)
    assert found["queues"] == len(topology.queues) - 1
    assert len(missing(connection, topology)) == len(topology.exchanges) + 2 + len(topology.queues)


def test_delete_refuses_while_messages_wait_unless_forced(
    configuration: dict[str, Any], make_shop: Callable[..., Any], connection: Connection
) -> None:
    hours = {**configuration, "rabbitdelay_layout": HOURS}
    shop = make_shop(rabbitdelay_layout=HOURS)
    topology = shop.rabbitdelay.topology
    for delay in (3600, 3600, 7200):
        shop.tasks["look"].apply_async(delay=delay)

    for command in ("delete --yes", "delete --dry-run"):
        error = answer(hours, command, "error", 1)["error"]
        assert "3 messages still wait in 2 queues under the prefix" in error
        assert "--force" in error
    assert missing(connection, topology) == ()

    found = answer(hours, "delete --yes --force", "delete")
    prefix = topology.prefix
    assert found["waiting"] == {f"{prefix}.hours.1": 2, f"{prefix}.hours.2": 1}
    assert found["deleted"] is True


def test_delete_asks_before_it_deletes(
    configuration: dict[str, Any], shop: Any, connection: Connection
) -> None:
    topology = shop.rabbitdelay.topology
    declare(connection, topology)

    told = run_command(configuration, "delete", "y\n")
    assert told.returncode == 2
    assert "give --yes" in told.stderr
    assert run_command(configuration, "delete --json").returncode == 2
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
    configuration: dict[str, Any], shop: Any, worker: Worker, connection: Connection
) -> None:
    wait_until_served(worker)
    queues = shop.rabbitdelay.topology.queues

    def consumed() -> int:
        counts = queue_counts(connection, queues).values()
        return sum(each.consumers for each in counts if each is not None)

    wait_for(lambda: consumed() == 2, "the consumers of the modules")
    for command in ("delete --yes", "delete --dry-run"):
        error = answer(configuration, command, "error", 1)["error"]
        assert "2 consumers still take messages from" in error
        assert "--rabbitdelay-modules=" in error
    assert missing(connection, shop.rabbitdelay.topology) == ()
    told = run_command(configuration, "delete --dry-run --force")
    assert told.returncode == 0, told.stderr
    assert "2 consumers: workers run" in told.stdout


def test_options_describe_another_topology(
    configuration: dict[str, Any], make_topology: Callable[..., Topology], connection: Connection
) -> None:
    topology = make_topology(queue_type="classic", shards=2)
    options = "--queue-type classic --shards 2"
    assert run_command(configuration, f"declare {options}").returncode == 0
    assert missing(connection, topology) == ()
    assert run_command(configuration, f"delete --yes {options}").returncode == 0
    assert missing(connection, topology)


def test_queues_that_each_worker_has_for_itself_are_not_declared(
    configuration: dict[str, Any], make_shop: Callable[..., Any], connection: Connection
) -> None:
    own = {"exclusive_queue": True, "broadcast_queue": True}
    queues = make_shop(**own).amqp.queues.values()
    alone = [each for each in queues if each.exclusive or isinstance(each, Broadcast)]
    assert len(alone) == 2

    found = answer({**configuration, **own}, "declare --queues", "declare")

    names = [each.name for each in queues if each not in alone]
    assert found["bound"] == found["missing_queues"] == names
    assert set(queue_counts(connection, alone).values()) == {None}
