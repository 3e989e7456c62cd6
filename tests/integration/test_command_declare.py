"""``celery rabbitdelay declare`` and ``delete``, run as operators do."""

from __future__ import annotations

import os
import pty
import time
from collections.abc import Callable
from typing import Any

import pytest
from celery.platforms import EX_UNAVAILABLE
from kombu import Connection
from kombu.common import Broadcast

from celery_rabbitdelay.kombu import Topology, bind_destination, declare, missing
from celery_rabbitdelay.publishing.declaration import is_declared, queue_counts
from tests.integration.arrivals import count
from tests.integration.modules import wait_until_served
from tests.integration.shop import PATIENCE, named
from tests.integration.waited import assert_waited
from tests.integration.worker import Worker, run_celery, start_celery
from tests.json_schemas import checked

#: A level that none of these tests waits for.
HOURS = [("hours", 6, 3600), ("tenths", 10, 360)]


def test_declare_says_what_was_missing_and_declares_it(
    configuration: dict[str, Any], shop: Any, connection: Connection
) -> None:
    topology = shop.rabbitdelay.topology
    everything = missing(connection, topology)

    dry = run_celery(configuration, "rabbitdelay declare --dry-run --json")
    assert dry.returncode == 1, dry.stderr
    assert checked("declare", dry.stdout)["missing"] == list(everything)
    assert missing(connection, topology) == everything

    told = run_celery(configuration, "rabbitdelay declare")
    assert told.returncode == 0, told.stderr
    total = len(topology.exchanges) + 2 + len(topology.queues)
    assert len(everything) == total
    assert f"{total} of {total} exchanges and queues of {topology.prefix} were" in told.stdout
    assert missing(connection, topology) == ()
    assert is_declared(connection, topology)

    again = run_celery(configuration, "rabbitdelay declare -j")
    assert again.returncode == 0, again.stderr
    found = checked("declare", again.stdout)
    assert found["missing"] == []
    assert found["fingerprint"] == topology.identity.fingerprint


def test_declare_makes_what_was_deleted_and_a_binding_that_nobody_can_ask_for(
    configuration: dict[str, Any], make_shop: Callable[..., Any], connection: Connection
) -> None:
    # The worker declares nothing, and delivers nothing by other means.
    settings: dict[str, Any] = {"rabbitdelay_declare": "never", "rabbitdelay_modules": []}
    shop = make_shop(**settings)
    topology = shop.rabbitdelay.topology
    declare(connection, topology)
    queue = topology.level_queues["ms.x100"][4]
    channel: Any
    with connection.channel() as channel:
        queue(channel).delete()
        (binding,) = [each for each in topology.bindings if each.pattern == "*.3.#"]
        channel.queue_unbind(binding.target, binding.source, binding.pattern)

    own = {**configuration, **settings}
    found = checked("declare", run_celery(own, "rabbitdelay declare --queues -j").stdout)

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

    dry = run_celery(never, "rabbitdelay declare --queues --dry-run")
    told = run_celery(never, "rabbitdelay declare --queues -j")

    names = [queue.name for queue in shop.amqp.queues.values()]
    assert dry.returncode == 1
    assert f"{len(names)} queues of tasks are missing: " in dry.stdout
    found = checked("declare", told.stdout)
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
        told = run_celery(other, f"rabbitdelay {command}")
        assert told.returncode == 1, command
        (line,) = told.stderr.splitlines()
        assert "other levels under the prefix" in line
        answer = run_celery(other, f"rabbitdelay {command} --json")
        assert answer.returncode == 1
        assert f"Error: {checked('error', answer.stdout)['error']}" == line

    assert missing(connection, topology) == ()


def test_delete_deletes_the_levels_and_leaves_the_queues_of_tasks(
    configuration: dict[str, Any], shop: Any, connection: Connection, target: Any
) -> None:
    topology = shop.rabbitdelay.topology
    declare(connection, topology)
    bind_destination(connection, topology, target.name)

    dry = run_celery(configuration, "rabbitdelay delete --dry-run --json")
    assert dry.returncode == 0, dry.stderr
    found = checked("delete", dry.stdout)
    assert (found["dry_run"], found["deleted"]) == (True, False)
    assert found["exchanges"] == len(topology.exchanges) + 2
    assert found["queues"] == len(topology.queues)
    assert missing(connection, topology) == ()

    told = run_celery(configuration, "rabbitdelay delete --yes")
    assert told.returncode == 0, told.stderr
    assert told.stdout.splitlines()[-1] == "Deleted"
    assert len(missing(connection, topology)) == found["exchanges"] + found["queues"]
    assert count(connection, target.name) == 0

    again = run_celery(configuration, "rabbitdelay delete --yes -j")
    assert again.returncode == 0
    assert checked("delete", again.stdout)["deleted"] is False


def test_delete_finishes_what_an_interrupted_one_has_begun(
    configuration: dict[str, Any], shop: Any, connection: Connection
) -> None:
    topology = shop.rabbitdelay.topology
    declare(connection, topology)
    with connection.channel() as channel:
        topology.identity.marker(channel).delete()
        topology.queues[3](channel).delete()
        topology.exchanges[2](channel).delete()

    told = run_celery(configuration, "rabbitdelay delete --yes -j")

    found = checked("delete", told.stdout)
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
        told = run_celery(hours, f"rabbitdelay {command} --json")
        assert told.returncode == 1
        assert (
            "3 messages still wait in 2 queues under the prefix"
            in checked("error", told.stdout)["error"]
        )
        assert "--force" in told.stderr
    assert missing(connection, topology) == ()

    forced = run_celery(hours, "rabbitdelay delete --yes --force --json")
    assert forced.returncode == 0, forced.stderr
    found = checked("delete", forced.stdout)
    prefix = topology.prefix
    assert found["waiting"] == {f"{prefix}.hours.1": 2, f"{prefix}.hours.2": 1}
    assert found["deleted"] is True


def test_delete_asks_before_it_deletes(
    configuration: dict[str, Any], shop: Any, connection: Connection
) -> None:
    topology = shop.rabbitdelay.topology
    declare(connection, topology)

    told = run_celery(configuration, "rabbitdelay delete", "y\n")
    assert told.returncode == 2
    assert "give --yes" in told.stderr
    assert run_celery(configuration, "rabbitdelay delete --json").returncode == 2
    assert missing(connection, topology) == ()

    for answer, exit_status in ((b"n\n", 1), (b"y\n", 0)):
        primary, secondary = pty.openpty()
        with start_celery(configuration, "rabbitdelay delete", stdin=secondary) as asking:
            os.write(primary, answer)
            assert asking.wait(PATIENCE) == exit_status
        os.close(primary)
        os.close(secondary)
        assert bool(missing(connection, topology)) == (exit_status == 0)


def test_delete_refuses_while_workers_may_hold_messages_unless_forced(
    configuration: dict[str, Any], shop: Any, worker: Worker, connection: Connection
) -> None:
    wait_until_served(worker)
    for command in ("delete --yes", "delete --dry-run"):
        told = run_celery(configuration, f"rabbitdelay {command} --json")
        assert told.returncode == 1
        assert "2 consumers still take messages from" in checked("error", told.stdout)["error"]
        assert "--rabbitdelay-modules=" in told.stderr
    assert missing(connection, shop.rabbitdelay.topology) == ()
    told = run_celery(configuration, "rabbitdelay delete --dry-run --force")
    assert told.returncode == 0, told.stderr
    assert "2 consumers: workers run" in told.stdout


@pytest.mark.parametrize("command", ["declare", "declare --dry-run", "delete --yes"])
def test_a_broker_that_is_down_is_one_line(configuration: dict[str, Any], command: str) -> None:
    down = {**configuration, "broker_url": "amqp://guest:secret@127.0.0.1:1//"}

    told = run_celery(down, f"rabbitdelay {command}")
    answer = run_celery(down, f"rabbitdelay {command} --json")

    assert told.returncode == answer.returncode == EX_UNAVAILABLE
    (line,) = told.stderr.splitlines()
    assert line.startswith("Error: cannot ask the broker amqp://guest")
    assert "secret" not in line
    assert checked("error", answer.stdout) == {"error": line.removeprefix("Error: ")}


def test_options_describe_another_topology(
    configuration: dict[str, Any], make_topology: Callable[..., Topology], connection: Connection
) -> None:
    topology = make_topology(queue_type="classic", shards=2)
    options = "--queue-type classic --shards 2"
    assert run_celery(configuration, f"rabbitdelay declare {options}").returncode == 0
    assert missing(connection, topology) == ()
    assert run_celery(configuration, f"rabbitdelay delete --yes {options}").returncode == 0
    assert missing(connection, topology)


def test_queues_that_each_worker_has_for_itself_are_not_declared(
    configuration: dict[str, Any], make_shop: Callable[..., Any], connection: Connection
) -> None:
    own = {"exclusive_queue": True, "broadcast_queue": True}
    queues = make_shop(**own).amqp.queues.values()
    alone = [each for each in queues if each.exclusive or isinstance(each, Broadcast)]
    assert len(alone) == 2

    told = run_celery({**configuration, **own}, "rabbitdelay declare --queues --json")

    found = checked("declare", told.stdout)
    names = [each.name for each in queues if each not in alone]
    assert found["bound"] == found["missing_queues"] == names
    assert set(queue_counts(connection, alone).values()) == {None}
