"""``migrate`` and ``transfer``: all that waits goes to other levels, while workers run."""

from __future__ import annotations

import json
import random
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import pytest
from kombu import Connection

from celery_rabbitdelay import Row
from celery_rabbitdelay.levels import headers as header_names
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.modules.envelope import CONTENT_TYPE, Envelope
from celery_rabbitdelay.operations.migration import Place, waiting
from celery_rabbitdelay.operations.source import Source, Taken
from celery_rabbitdelay.publishing.message import body_of, headers_of
from celery_rabbitdelay.testing import RabbitMQServer, wait_for
from tests.integration.notes import Notes
from tests.integration.shop import make_app
from tests.integration.worker import Worker, run_celery, start_celery

#: An hour: what is due later meditates.
OLD = [["minutes", 60, 60], ["seconds", 60, 1], ["tenths", 10, 0.1]]
NEW = [["hours", 24, 3600], ["halves", 120, 30], ["seconds", 30, 1], ["tenths", 10, 0.1]]

#: Seconds for which near tasks wait at least and at most, and far ones.
NEAR, FAR, BEYOND = (15.0, 45.0), (1800.0, 3500.0), (4000.0, 9000.0)

KILLS = 10


class Sent(NamedTuple):
    """Tasks by their ids: those that come due in the test, and those that go on waiting."""

    near: set[str]
    far: set[str]


def ids_in(connection: Connection, topology: Topology) -> Counter[str]:
    """Return how often each task waits; all messages stay where they are."""
    found: Counter[str] = Counter()
    taken: list[Taken] = []
    deadline = time.monotonic() + 60
    source = Source(connection, 60.0)
    source.open()
    ready = source.ready([queue.name for queue in topology.queues])
    source.consume(list(ready), 20_000)
    while len(taken) < sum(ready.values()):
        found_one = source.take()
        assert found_one is not None or time.monotonic() < deadline
        taken += [found_one] if found_one else []
    for message, *_ in taken:
        if message.properties.get("content_type") == CONTENT_TYPE:
            found.update(
                str(item.headers["id"]) for item in Envelope.unpack(body_of(message)).items
            )
        else:
            found[headers_of(message)["id"]] += 1
    source.close()
    return found


def send(shop: Any, notes: Notes, of_each: int) -> Sent:
    """Send tasks one by one and in envelopes: near ones, far ones, and some that meditate."""
    near: set[str] = set()
    far: set[str] = set()
    kinds = [(near, NEAR, 2), (near, NEAR, 2), (near, NEAR, 0), (far, FAR, 0), (far, FAR, 5)]
    for into, (least, most), tolerance in [*kinds, (far, BEYOND, 0)]:
        rows = []
        for _ in range(of_each):
            task_id, delay = str(uuid4()), random.uniform(least, most)
            rows.append(Row(args=(0,), kwargs={"key": notes.key}, delay=delay, task_id=task_id))
            into.add(task_id)
        shop.rabbitdelay.send_many(
            shop.tasks["note"], rows, tolerance=tolerance, envelopes=bool(tolerance)
        )
    return Sent(near, far)


def layout(levels: Any) -> str:
    """Return levels as an option without blanks."""
    return json.dumps(levels, separators=(",", ":"))


@pytest.fixture
def old(configuration: dict[str, Any]) -> dict[str, Any]:
    """The configuration before the migration."""
    return {**configuration, "rabbitdelay_layout": OLD}


@pytest.fixture
def new(old: dict[str, Any]) -> dict[str, Any]:
    """The configuration after it: another prefix, other levels, several shards."""
    prefix = f"{old['prefix']}-new"
    return {
        **old,
        "rabbitdelay_prefix": prefix,
        "rabbitdelay_layout": NEW,
        "rabbitdelay_shards": 2,
    }


@pytest.fixture
def make(make_shop: Callable[..., Any]) -> Callable[[dict[str, Any]], Any]:
    """Make an application by its whole configuration."""
    return lambda configuration: make_shop(**configuration)


def place(configuration: dict[str, Any], shop: Any) -> Place:
    return Place(Connection(configuration["broker_url"]), shop.rabbitdelay.topology)


def killed_and_then_finished(
    configuration: dict[str, Any], command: str, source: Place, target: Place
) -> dict[str, Any]:
    """Start a command and kill it in the middle, ten times; then let it finish."""
    for _ in range(KILLS):
        there, here = sum(waiting(source).values()), sum(waiting(target).values())
        process = start_celery(configuration, f"{command} --rate 400", stderr=subprocess.PIPE)

        def began(there: int = there, here: int = here) -> bool:
            return sum(waiting(source).values()) < there and sum(waiting(target).values()) != here

        try:
            wait_for(lambda: process.poll() is not None or began(), "the first messages moved", 60)  # noqa: B023
            assert process.poll() is None, process.stderr and process.stderr.read()
        finally:
            process.kill()
            process.communicate()
    last = run_celery(configuration, f"{command} --json")
    assert last.returncode == 0, last.stderr
    moved: dict[str, Any] = json.loads(last.stdout)
    return moved


def assert_nothing_is_lost(sent: Sent, notes: Notes, source: Place, target: Place) -> None:
    assert waiting(source) == {}
    wait_for(lambda: sent.near <= ran(notes).keys(), "the near tasks", 120)
    runs = ran(notes)
    waits = ids_in(target.connection, target.topology)
    assert waits.keys() == sent.far
    late = [at - due for each in runs.values() for at, due in each]
    assert min(late) >= -0.001
    print(  # noqa: T201  # a figure of the run
        f"{len(sent.near) + len(sent.far)} tasks, {len(late) - len(runs)} ran twice, "
        f"{waits.total() - len(waits)} wait twice; latest {max(late):.1f} s"
    )


def ran(notes: Notes) -> dict[str, list[tuple[float, float]]]:
    """Return when each task ran and was due."""
    found: dict[str, list[tuple[float, float]]] = {}
    for note in notes.found():
        due = note["headers"][header_names.DUE] / 1000
        found.setdefault(note["correlation_id"], []).append((note["at"], due))
    return found


def test_nothing_is_lost_when_the_migration_is_killed_again_and_again(
    old: dict[str, Any], new: dict[str, Any], make: Callable[..., Any]
) -> None:
    before, after = make(old), make(new)
    notes = Notes(before)
    with Worker(new):
        sent = send(before, notes, 840)
        source, target = place(old, before), place(new, after)
        command = (
            f"rabbitdelay migrate --from-prefix {old['prefix']} --from-layout {layout(OLD)} "
            "--from-shards 1"
        )
        killed_and_then_finished(new, command, source, target)
        assert_nothing_is_lost(sent, notes, source, target)
    notes.forget()


@pytest.fixture
def other_broker(broker_root: Path | None) -> Iterator[RabbitMQServer]:
    """Another broker."""
    with RabbitMQServer(broker_root) as server:
        yield server


def test_nothing_is_lost_when_the_transfer_is_killed_again_and_again(
    old: dict[str, Any], make: Callable[..., Any], other_broker: RabbitMQServer
) -> None:
    new = {**old, "broker_url": other_broker.url}
    before, after = make(old), make_app(new)
    notes = Notes(before)
    # The workers of the old broker run on.
    with Worker(old), Worker(new):
        sent = send(before, notes, 840)
        source, target = place(old, before), place(new, after)
        command = f"rabbitdelay transfer --from {old['broker_url']}"
        killed_and_then_finished(new, command, source, target)
        assert_nothing_is_lost(sent, notes, source, target)
    notes.forget()
    after.close()
