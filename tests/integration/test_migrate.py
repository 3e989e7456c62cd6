"""``migrate`` and ``transfer``: all that waits goes to other levels, while workers run."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from socket import create_server
from typing import Any, cast
from uuid import uuid4

import amqp
import pytest
from celery.exceptions import TaskRevokedError
from kombu import Connection, Queue

from celery_rabbitdelay import Row
from celery_rabbitdelay.exceptions import LayoutConflict, TopologyIncomplete
from celery_rabbitdelay.kombu import Layout, clock, custom
from celery_rabbitdelay.levels import headers as header_names
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.operations.moving.migration import check_source
from celery_rabbitdelay.operations.moving.mover import BATCH, MOST_LOSSES, Mover, Place
from celery_rabbitdelay.operations.undeliverable.messages import undeliverable_messages
from celery_rabbitdelay.publishing.declaration import declare, queue_counts
from celery_rabbitdelay.testing import RabbitMQServer, wait_for
from tests.integration.arrivals import count
from tests.integration.notes import Notes
from tests.integration.shop import PATIENCE, make_app, named
from tests.integration.worker import Worker, answer, run_command, start_celery
from tests.json_schemas import checked

#: An hour: what is due later meditates.
OLD: Any = [["minutes", 60, 60], ["seconds", 60, 1], ["tenths", 10, 0.1]]
NEW = [["hours", 24, 3600], ["halves", 120, 30], ["seconds", 30, 1], ["tenths", 10, 0.1]]

#: Seconds for which near tasks wait at least and at most, and far ones.
NEAR, FAR, BEYOND = (8.0, 20.0), (1800.0, 3500.0), (4000.0, 9000.0)

#: How often a move is killed; ten times by ``RABBITDELAY_KILLS=10``.
KILLS = int(os.environ.get("RABBITDELAY_KILLS", "2"))


@pytest.fixture
def old(configuration: dict[str, Any]) -> dict[str, Any]:
    """The configuration before the migration."""
    return {**configuration, "rabbitdelay_layout": OLD}


@pytest.fixture
def new(old: dict[str, Any]) -> dict[str, Any]:
    """The configuration after it: another prefix, other levels, several shards."""
    prefix = f"{old['prefix']}-new"
    return {**old, "rabbitdelay_prefix": prefix, "rabbitdelay_layout": NEW, "rabbitdelay_shards": 2}


@pytest.fixture
def before(old: dict[str, Any], make_shop: Callable[..., Any]) -> Any:
    """The application before the migration."""
    return make_shop(**old)


@pytest.fixture
def after(new: dict[str, Any], make_shop: Callable[..., Any]) -> Any:
    """The application after it."""
    return make_shop(**new)


def migrate(old: dict[str, Any]) -> str:
    """Return the command that migrates from the old levels."""
    layout = json.dumps(OLD, separators=(",", ":"))
    return f"migrate --from-prefix {old['prefix']} --from-layout {layout} --from-shards 1"


def place(shop: Any) -> Place:
    return Place(Connection(shop.conf.broker_url), shop.rabbitdelay.topology)


def waiting(place: Place) -> dict[str, int]:
    """Return how many messages are ready in each queue of a topology that has some."""
    names = [queue.name for queue in place.topology.queues]
    return Mover(place.connection, names, place, cast(Any, None)).waiting()


def total(place: Place) -> int:
    return sum(waiting(place).values())


def settled(*places: Place) -> int:
    """Return how many messages there are, once nobody consumes from the queues."""

    def is_settled() -> bool:
        found = [queue_counts(each.connection, each.topology.queues) for each in places]
        return not any(one and one.consumers for counts in found for one in counts.values())

    wait_for(is_settled, "the end of the consumers")
    return sum(map(total, places))


def kill_when_it_has_begun(new: dict[str, Any], command: str, source: Place, target: Place) -> None:
    """Start a command, and kill it once it has moved messages."""
    there, here = total(source), total(target)

    def has_ended_or_begun() -> bool:
        has_begun = total(source) < there and total(target) != here
        return process.poll() is not None or has_begun

    with start_celery(new, f"rabbitdelay {command}", stderr=subprocess.PIPE) as process:
        try:
            wait_for(has_ended_or_begun, "the first messages moved")
            assert process.poll() is None, process.stderr and process.stderr.read()
        finally:
            process.kill()


def test_tasks_run_on_time_and_once_after_a_migration_beside_a_worker(
    old: dict[str, Any], new: dict[str, Any], before: Any, after: Any
) -> None:
    """Near tasks one by one and in envelopes, far ones, and some that meditate."""
    notes, waits = Notes(before), 0
    near = [str(uuid4()) for _ in range(400)]
    with Worker(new):
        for ids, envelopes in ((near[:200], False), (near[200:], True)):
            rows = [notes.row(0, delay=random.uniform(*NEAR), task_id=each) for each in ids]
            before.rabbitdelay.send_many("note", rows, tolerance=2, envelopes=envelopes)
        for between in (FAR, BEYOND):
            rows = [notes.row(0, delay=random.uniform(*between)) for _ in range(200)]
            waits += before.rabbitdelay.send_many("note", rows).messages
        moved = answer(new, migrate(old), "moved")
        assert (moved["finished"], moved["left"], moved["copies"]) == (True, {}, 0)
        source, target = place(before), place(after)
        assert waiting(source) == {}
        ran = notes.wait(400)
    assert total(target) == waits
    assert sorted(note["correlation_id"] for note in ran) == sorted(near)
    assert all(note["at"] >= note["headers"][header_names.DUE] / 1000 - 0.001 for note in ran)
    notes.forget()


def test_a_kill_loses_nothing_and_leaves_no_more_copies_than_the_page_says(
    old: dict[str, Any], new: dict[str, Any], before: Any, after: Any
) -> None:
    page = Path(__file__).parents[2] / "docs" / "how-to" / "migrate.md"
    found = re.search(r"at most ([0-9,]+) for each kill", page.read_text())
    assert found is not None
    assert int(found[1].replace(",", "")) == 2 * BATCH
    # Half of them in one queue, where RabbitMQ has the most acknowledgements in progress.
    number = 3000
    rows = [Row(delay=random.uniform(*FAR) if each % 2 else 1800) for each in range(number)]
    before.rabbitdelay.send_many(before.tasks["look"], rows, envelopes=False)
    source, target = place(before), place(after)
    made: list[int] = []
    for _ in range(KILLS):
        there = settled(source, target)
        kill_when_it_has_begun(new, migrate(old), source, target)
        made.append(settled(source, target) - there)
    assert min(made) >= 0
    assert max(made) <= 2 * BATCH
    answer(new, migrate(old), "moved")
    assert settled(source) == 0
    assert settled(target) == number + sum(made)


def test_after_ctrl_c_nothing_exists_twice_and_the_rest_is_where_it_was(
    old: dict[str, Any], new: dict[str, Any], before: Any, after: Any
) -> None:
    rows = [Row(delay=random.uniform(*FAR)) for _ in range(1000)]
    before.rabbitdelay.send_many(before.tasks["look"], rows, envelopes=False)
    source, target = place(before), place(after)
    command = f"rabbitdelay {migrate(old)} --rate 50 --json"
    process = start_celery(new, command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_for(lambda: waiting(target), "the first messages moved")
    process.send_signal(signal.SIGINT)
    printed, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1, errors
    moved = checked("moved", printed)
    assert not moved["finished"]
    assert moved["moved"] > 0
    assert (total(target), total(source)) == (moved["moved"], 1000 - moved["moved"])


@pytest.fixture
def other_broker(broker_root: Path | None) -> Iterator[RabbitMQServer]:
    """Another broker: of another version, if RABBITDELAY_OTHER_BROKER_ROOT names its system."""
    root = os.environ.get("RABBITDELAY_OTHER_BROKER_ROOT")
    with RabbitMQServer(Path(root) if root else broker_root) as server:
        yield server


def test_a_transfer_goes_on_when_its_source_comes_back(
    old: dict[str, Any],
    before: Any,
    other_broker: RabbitMQServer,
    request: pytest.FixtureRequest,
) -> None:
    number, there = 150, make_app({**old, "broker_url": other_broker.url})
    request.addfinalizer(there.close)
    rows = [Row(delay=1800 + each) for each in range(number)]
    there.rabbitdelay.send_many(there.tasks["look"], rows, envelopes=False)
    command = f"rabbitdelay transfer --from {other_broker.url} --rate 50 --timeout 300 --json"
    target = place(before)
    with start_celery(old, command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        wait_for(lambda: total(target), "the first messages moved")
        other_broker.kill()
        # More attempts than losses of the connection end a move, of two connections at most.
        with create_server(("127.0.0.1", other_broker.port)) as nobody:
            nobody.settimeout(PATIENCE)
            for _ in range(2 * (MOST_LOSSES + 1)):
                nobody.accept()[0].close()
        other_broker.start()
        told, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    moved = json.loads(told)
    assert (moved["finished"], moved["moved"] - moved["copies"]) == (True, number)
    assert total(target) == moved["moved"]


def test_a_dry_run_counts_and_takes_nothing(
    old: dict[str, Any], new: dict[str, Any], before: Any
) -> None:
    for delay in (630, 630, 10_000):
        before.tasks["look"].apply_async(delay=delay)
    told = answer(new, f"{migrate(old)} --dry-run", "waiting")
    prefix = old["prefix"]
    assert told == {"waiting": 3, "queues": {f"{prefix}.minutes.10": 2, f"{prefix}.meditation": 1}}
    assert total(place(before)) == 3


def test_what_cannot_be_read_and_what_is_undeliverable_goes_to_undeliverable(
    old: dict[str, Any], new: dict[str, Any], before: Any, after: Any, connection: Connection
) -> None:
    before.tasks["look"].apply_async(delay=600)
    prefix, producer = old["prefix"], connection.Producer()
    producer.publish({}, exchange="", routing_key=f"{prefix}.minutes.10")
    key = before.rabbitdelay.topology.route(600, "nobody").routing_key
    producer.publish({}, exchange=f"{prefix}.minutes.x1", routing_key=key)
    producer.publish({}, exchange=f"{prefix}.undeliverable", routing_key="any")
    wait_for(lambda: total(place(before)) == 4, "the messages")
    moved = answer(new, migrate(old), "moved", 1)
    assert moved["moved"] == 3
    assert moved["left"] == {"its routing key is of another layout: see the --from options": 1}
    assert moved["undeliverable"] == {"rabbitdelay-due is None, not milliseconds since 1970": 1}
    found = undeliverable_messages(connection, after.rabbitdelay.topology)
    assert len({each.found.reason for each in found}) == 2


def test_queues_that_the_application_does_not_name_are_not_bound(
    old: dict[str, Any], new: dict[str, Any], before: Any, after: Any, channel: Any
) -> None:
    """Anybody may have written a name into a routing key."""
    secret, gone = f"{old['prefix']}-secret", f"{old['prefix']}-gone"
    for name in (secret, gone):
        before.send_task("look", queue=name, delay=600)
    channel.queue_delete(gone)
    # The application's own, which does not exist as it would declare it.
    own = named(before, "default")
    before.tasks["look"].apply_async(delay=600)
    channel.queue_delete(own)
    channel.queue_declare(own, durable=True, auto_delete=False)

    moved = answer(new, f"{migrate(old)} --allow *-gone", "moved", 1)

    assert (moved["moved"], moved["missing_queues"]) == (3, [gone])
    assert moved["unnamed_queues"] == [secret]
    topology = after.rabbitdelay.topology
    for name in (own, secret):
        key = topology.route(0, name).routing_key
        channel.basic_publish(amqp.Message("x"), topology.delivery.name, key)
    with Connection(old["broker_url"]) as connection:
        # That for the secret queue has found no queue.
        distribution = topology.module_queues.distribution.name
        wait_for(lambda: count(connection, distribution) == 1, "a message without a route")
        wait_for(lambda: count(connection, own) == 1, "the other one")
    assert channel.queue_delete(secret) == 0


def test_the_same_prefix_on_the_same_broker_is_refused(old: dict[str, Any], before: Any) -> None:
    before.tasks["look"].apply_async(delay=600)
    # By another name of the same broker.
    url = old["broker_url"].replace("127.0.0.1", "localhost")
    told = run_command(old, f"transfer --from {url}")
    assert told.returncode == 2
    assert "have the same prefix" in told.stderr


@pytest.mark.parametrize(
    ("declared", "described", "found"),
    [
        (custom(OLD), {"layout": clock()}, "--from-layout with the JSON of their rabbitdelay_lay"),
        (custom(OLD), {"queue_type": "classic", "shards": 2}, "--from-queue-type quorum --from-s"),
        (clock(1.0), {"layout": custom(OLD)}, r"found --from-layout clock --from-tick 1\."),
    ],
)
def test_a_refusal_says_which_levels_were_found(
    connection: Connection,
    make_topology: Callable[..., Topology],
    declared: Layout,
    described: dict[str, Any],
    found: str,
) -> None:
    topology = make_topology(declared)
    declare(connection, topology)
    other = Topology(topology.prefix, **{"layout": declared, **described})
    with pytest.raises(LayoutConflict, match=found):
        check_source(Place(connection, other))
    with pytest.raises(TopologyIncomplete):
        check_source(Place(connection, Topology("nobodys")))


def test_a_cancelled_task_stays_cancelled_after_the_migration(
    old: dict[str, Any], new: dict[str, Any], make_shop: Callable[..., Any]
) -> None:
    registry = {
        "rabbitdelay_registry_url": old["result_backend"],
        "rabbitdelay_registry_options": {"socket_timeout": PATIENCE},
    }
    before = make_shop(**{**old, **registry})
    notes = Notes(before)
    options: dict[str, Any] = {"kwargs": {"key": notes.key}, "delay": 20, "track": True}
    first = before.tasks["note"].apply_async(("cancelled",), **options)
    before.tasks["note"].apply_async(("runs",), **options)
    before.rabbitdelay.cancel(first.id)
    refused = run_command({**new, **registry}, migrate(old))
    assert refused.returncode == 2
    assert "those that are cancelled would run" in refused.stderr
    new = {**new, **registry, "rabbitdelay_registry_prefix": old["prefix"]}
    make_shop(**new)
    # On a slow machine, they are due by then, and in their queue.
    assert answer(new, migrate(old), "moved")["left"] == {}
    with Worker(new):
        notes.wait(1, timeout=PATIENCE)
        with pytest.raises(TaskRevokedError):
            first.get(timeout=PATIENCE)
    assert notes() == ["runs"]
    notes.forget()


def test_a_queue_that_another_consumer_has_for_itself_ends_the_move(
    connection: Connection, make_queue: Callable[..., Queue]
) -> None:
    target = make_queue("busy")
    target(connection.default_channel).declare()
    connection.Producer().publish({}, routing_key=target.name)
    wait_for(lambda: count(connection, target.name) == 1, "the message")
    with connection.clone() as other:
        channel: Any = other.default_channel
        channel.basic_qos(0, 1, False)
        channel.basic_consume(target.name, callback=list, exclusive=True)
        connection.Producer().publish({}, routing_key=target.name)
        mover = Mover(connection, [target.name], Place(connection, Topology()), cast(Any, None))
        with pytest.raises(OSError, match="exclusive"):
            mover.move()
