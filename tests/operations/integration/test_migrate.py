"""``migrate`` and ``transfer``: all that waits goes to other levels, while workers run."""

import json
import random
import re
import signal
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from uuid import uuid4

import amqp
import pytest
from celery.exceptions import TaskRevokedError
from celery.platforms import EX_UNAVAILABLE
from kombu import Connection

from celery_rabbitdelay import Row
from celery_rabbitdelay.exceptions import LayoutConflict, TopologyIncomplete
from celery_rabbitdelay.kombu import clock, custom
from celery_rabbitdelay.levels import headers as header_names
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.operations.conversion import check_source
from celery_rabbitdelay.operations.mover import BATCH, Place
from celery_rabbitdelay.operations.source import waiting as ready
from celery_rabbitdelay.publishing.declaration import declare, queue_counts
from celery_rabbitdelay.testing import wait_for
from tests.json_schemas import checked
from tests.kernel.integration.arrivals import wait_until_waiting
from tests.kernel.integration.notes import Notes
from tests.kernel.integration.shop import PATIENCE, make_app, named
from tests.kernel.integration.worker import Worker, answer, run_command, start_celery
from tests.rabbitmq_node import RabbitMQNode

#: An hour: what is due later meditates.
OLD: Any = [["minutes", 60, 60], ["seconds", 60, 1], ["tenths", 10, 0.1]]
NEW = [["hours", 24, 3600], ["halves", 120, 30], ["seconds", 30, 1], ["tenths", 10, 0.1]]

#: Seconds for which near tasks wait at least and at most, and far ones.
NEAR, FAR, BEYOND = (6.0, 14.0), (1800.0, 3500.0), (4000.0, 9000.0)


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
    return ready(place.connection, [queue.name for queue in place.topology.queues])


def total(place: Place) -> int:
    return sum(waiting(place).values())


def settled(*places: Place) -> int:
    """Return how many messages there are, once nobody consumes from the queues."""

    def is_settled() -> bool:
        found = [queue_counts(each.connection, each.topology.queues) for each in places]
        return not any(one and one.consumers for counts in found for one in counts.values())

    wait_for(is_settled, "the end of the consumers")
    return sum(map(total, places))


def test_tasks_run_on_time_and_once_after_a_migration_beside_a_worker(
    old: dict[str, Any], new: dict[str, Any], before: Any, after: Any
) -> None:
    """Near tasks one by one and in envelopes, far ones, and some that meditate."""
    notes, waits = Notes(before), 0
    near = [str(uuid4()) for _ in range(200)]
    with Worker(new):
        for ids, envelopes in ((near[:100], False), (near[100:], True)):
            rows = [notes.row(0, delay=random.uniform(*NEAR), task_id=each) for each in ids]
            before.rabbitdelay.send_many("note", rows, tolerance=2, envelopes=envelopes)
        for between in (FAR, BEYOND):
            rows = [notes.row(0, delay=random.uniform(*between)) for _ in range(100)]
            waits += before.rabbitdelay.send_many("note", rows).messages
        moved = answer(new, migrate(old), "moved")
        assert (moved["finished"], moved["left"], moved["copies"]) == (True, {}, 0)
        assert total(place(before)) == 0
        ran = notes.wait(len(near))
    assert total(place(after)) == waits
    assert sorted(note["correlation_id"] for note in ran) == sorted(near)
    assert all(note["at"] >= note["headers"][header_names.DUE] / 1000 - 0.001 for note in ran)
    notes.forget()


def test_a_kill_loses_nothing_and_leaves_no_more_copies_than_the_page_says(
    old: dict[str, Any], new: dict[str, Any], before: Any, after: Any
) -> None:
    page = Path(__file__).parents[3] / "docs" / "how-to" / "migrate.md"
    assert f"at most {2 * BATCH:,} for each kill" in page.read_text()
    # Half of them in one queue, where RabbitMQ has the most acknowledgements in progress.
    number = 3000
    rows = [Row(delay=random.uniform(*FAR) if each % 2 else 1800) for each in range(number)]
    before.rabbitdelay.send_many(before.tasks["look"], rows, envelopes=False)
    source, target = place(before), place(after)
    with start_celery(new, f"rabbitdelay {migrate(old)}", stderr=subprocess.PIPE) as process:
        try:
            wait_for(lambda: total(target) or process.poll() is not None, "messages that moved")
            assert process.poll() is None, process.stderr and process.stderr.read()
        finally:
            process.kill()
    copies = settled(source, target) - number
    assert 0 <= copies <= 2 * BATCH
    answer(new, migrate(old), "moved")
    assert (settled(source), settled(target)) == (0, number + copies)


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


def test_a_transfer_whose_source_is_lost_says_so_and_goes_on_when_it_is_started_again(
    old: dict[str, Any], before: Any, broker_root: Path | None
) -> None:
    number, target = 150, place(before)
    streams: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with RabbitMQNode(broker_root) as other_broker, ExitStack() as apps:
        there = make_app({**old, "broker_url": other_broker.url})
        apps.callback(there.close)
        rows = [Row(delay=1800 + each) for each in range(number)]
        there.rabbitdelay.send_many(there.tasks["look"], rows, envelopes=False)
        command = f"transfer --from {other_broker.url}"
        with start_celery(old, f"rabbitdelay {command} --rate 50", **streams) as process:
            wait_for(lambda: total(target), "the first messages moved")
            other_broker.kill()
            _, errors = process.communicate(timeout=PATIENCE)
        assert process.returncode == EX_UNAVAILABLE
        told = re.search(r"(\d+) messages are moved, (\d+) others may exist twice", errors)
        assert told is not None, errors
        moved, copies = map(int, told.groups())
        other_broker.start()
        again = answer(old, command, "moved")
        assert again["finished"]
        assert number <= moved + again["moved"] <= number + copies
        assert number <= total(target) <= number + copies


def test_a_dry_run_and_a_refusal_take_nothing(
    old: dict[str, Any], new: dict[str, Any], before: Any
) -> None:
    for delay in (630, 630, 10_000):
        before.tasks["look"].apply_async(delay=delay)
    told = answer(new, f"{migrate(old)} --dry-run", "waiting")
    prefix = old["prefix"]
    assert told == {"waiting": 3, "queues": {f"{prefix}.minutes.10": 2, f"{prefix}.meditation": 1}}
    # The same prefix, by another name of the same broker.
    refused = run_command(
        old, f"transfer --from {old['broker_url'].replace('127.0.0.1', 'localhost')}"
    )
    assert (refused.returncode, "have the same prefix" in refused.stderr) == (2, True)
    assert total(place(before)) == 3


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
    # That for the secret queue has found no queue.
    distribution = topology.module_queues.distribution.name
    with Connection(old["broker_url"]) as connection:
        for name in (distribution, own):
            wait_until_waiting(connection, name, 1)
    assert channel.queue_delete(secret) == 0


def test_levels_that_differ_from_the_options_are_refused_and_described(
    connection: Connection, make_topology: Callable[..., Topology]
) -> None:
    topology = make_topology(clock(1.0))
    declare(connection, topology)
    with pytest.raises(LayoutConflict, match=r"another rabbitdelay_layout.*\.clock-"):
        check_source(Place(connection, Topology(topology.prefix, custom(OLD))))
    with pytest.raises(TopologyIncomplete):
        check_source(Place(connection, Topology("nobodys")))


def test_a_cancelled_task_stays_cancelled_after_the_migration(
    old: dict[str, Any], new: dict[str, Any], make_shop: Callable[..., Any]
) -> None:
    registry = {"rabbitdelay_registry_url": old["result_backend"]}
    before = make_shop(**{**old, **registry})
    notes = Notes(before)
    first, _ = (notes.send(each, delay=12, track=True) for each in ("cancelled", "runs"))
    before.rabbitdelay.cancel(first.id)
    refused = run_command({**new, **registry}, migrate(old))
    assert refused.returncode == 2
    assert "cancelled tasks would run" in refused.stderr
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
