"""``migrate`` and ``transfer``: all that waits goes to other levels, while workers run."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from socket import create_server
from typing import Any, NamedTuple, cast
from uuid import uuid4

import amqp
import pytest
from celery.exceptions import TaskRevokedError
from kombu import Connection, Queue

from celery_rabbitdelay import Row
from celery_rabbitdelay.levels import headers as header_names
from celery_rabbitdelay.levels.headers import ENVELOPE
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.modules.envelope import Envelope
from celery_rabbitdelay.operations.moving.mover import BATCH, MOST_LOSSES, Mover, Place, Stay
from celery_rabbitdelay.operations.moving.source import Source
from celery_rabbitdelay.operations.undeliverable.messages import undeliverable_messages
from celery_rabbitdelay.publishing.declaration import queue_counts
from celery_rabbitdelay.publishing.message import body_of, headers_of
from celery_rabbitdelay.testing import RabbitMQServer, wait_for
from tests.integration.arrivals import count
from tests.integration.notes import Notes
from tests.integration.shop import PATIENCE, make_app, named
from tests.integration.worker import Worker, answer, run_command, start_celery
from tests.json_schemas import checked

#: An hour: what is due later meditates.
OLD = [["minutes", 60, 60], ["seconds", 60, 1], ["tenths", 10, 0.1]]
NEW = [["hours", 24, 3600], ["halves", 120, 30], ["seconds", 30, 1], ["tenths", 10, 0.1]]

#: Seconds for which near tasks wait at least and at most, and far ones.
NEAR, FAR, BEYOND = (15.0, 45.0), (1800.0, 3500.0), (4000.0, 9000.0)

#: How often a move is killed; ten times by ``RABBITDELAY_KILLS=10``.
KILLS = int(os.environ.get("RABBITDELAY_KILLS", "4"))


class Sent(NamedTuple):
    """Tasks by their ids: those that come due in the test, and those that go on waiting."""

    near: set[str]
    far: set[str]


def ids_in(connection: Connection, topology: Topology) -> Counter[str]:
    """Return how often each task waits; all messages stay where they are."""
    found: Counter[str] = Counter()
    taken: list[amqp.Message] = []
    deadline = time.monotonic() + 60
    source = Source(connection, 60.0)
    found_in = source.ready([queue.name for queue in topology.queues])
    source.consume(list(found_in), 20_000)
    while len(taken) < sum(found_in.values()):
        found_one = source.take()
        assert found_one is not None or time.monotonic() < deadline
        taken += [found_one] if found_one else []
    for message in taken:
        if message.properties.get("content_type") == ENVELOPE:
            found.update(
                str(item.headers["id"]) for item in Envelope.unpack(body_of(message)).items
            )
        else:
            found[headers_of(message)["id"]] += 1
    source.close()
    return found


def waiting(place: Place) -> dict[str, int]:
    """Return how many messages are ready in each queue of a topology that has some."""
    names = [queue.name for queue in place.topology.queues]
    return Mover(place.connection, names, place, cast(Any, None)).waiting()


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


def migrate(old: dict[str, Any]) -> str:
    """Return the command that migrates from the old levels."""
    layout = json.dumps(OLD, separators=(",", ":"))
    return f"migrate --from-prefix {old['prefix']} --from-layout {layout} --from-shards 1"


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
def make(make_shop: Callable[..., Any]) -> Callable[[dict[str, Any]], Any]:
    """Make an application by its whole configuration."""
    return lambda configuration: make_shop(**configuration)


def place(configuration: dict[str, Any], shop: Any) -> Place:
    return Place(Connection(configuration["broker_url"]), shop.rabbitdelay.topology)


def killed_and_then_finished(
    configuration: dict[str, Any], command: str, source: Place, target: Place
) -> None:
    """Start a command and kill it in the middle, again and again; then let it finish."""
    for _ in range(KILLS):
        there, here = sum(waiting(source).values()), sum(waiting(target).values())
        slowly = f"rabbitdelay {command} --rate 100"
        process = start_celery(configuration, slowly, stderr=subprocess.PIPE)

        def has_ended_or_begun(
            process: subprocess.Popen[str] = process, there: int = there, here: int = here
        ) -> bool:
            has_begun = (
                sum(waiting(source).values()) < there and sum(waiting(target).values()) != here
            )
            return process.poll() is not None or has_begun

        try:
            wait_for(has_ended_or_begun, "the first messages moved")
            assert process.poll() is None, process.stderr and process.stderr.read()
        finally:
            process.kill()
            process.communicate()
    assert answer(configuration, command, "moved")["finished"]


def assert_nothing_is_lost(sent: Sent, notes: Notes, source: Place, target: Place) -> None:
    assert waiting(source) == {}
    wait_for(lambda: sent.near <= ran(notes).keys(), "the near tasks")
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


@pytest.fixture
def other_broker(broker_root: Path | None) -> Iterator[RabbitMQServer]:
    """Another broker: of another version, if RABBITDELAY_OTHER_BROKER_ROOT names its system."""
    root = os.environ.get("RABBITDELAY_OTHER_BROKER_ROOT")
    with RabbitMQServer(Path(root) if root else broker_root) as server:
        yield server


@pytest.mark.parametrize("command", ["migrate", "transfer"])
def test_nothing_is_lost_when_a_move_is_killed_again_and_again(
    old: dict[str, Any],
    new: dict[str, Any],
    make: Callable[..., Any],
    command: str,
    request: pytest.FixtureRequest,
) -> None:
    before = make(old)
    if command == "migrate":
        after, whole = make(new), migrate(old)
    else:
        new = {**old, "broker_url": request.getfixturevalue("other_broker").url}
        after, whole = make_app(new), f"transfer --from {old['broker_url']}"
        request.addfinalizer(after.close)
    notes = Notes(before)
    # The workers of the old broker run on.
    with Worker(new), Worker(old) if command == "transfer" else nullcontext():
        sent = send(before, notes, 840)
        source, target = place(old, before), place(new, after)
        killed_and_then_finished(new, whole, source, target)
        assert_nothing_is_lost(sent, notes, source, target)
    notes.forget()


def test_a_move_goes_on_when_its_source_comes_back(
    old: dict[str, Any],
    make: Callable[..., Any],
    other_broker: RabbitMQServer,
    request: pytest.FixtureRequest,
) -> None:
    number, before, after = 300, make_app({**old, "broker_url": other_broker.url}), make(old)
    request.addfinalizer(before.close)
    rows = [Row(delay=1800 + each) for each in range(number)]
    before.rabbitdelay.send_many(before.tasks["look"], rows, envelopes=False)
    command = f"rabbitdelay transfer --from {other_broker.url} --rate 50 --timeout 300 --json"
    target = place(old, after)
    with start_celery(old, command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        wait_for(lambda: sum(waiting(target).values()), "the first messages moved")
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
    assert sum(waiting(target).values()) == moved["moved"]


def settled(*places: Place) -> int:
    """Return how many messages there are, once nobody consumes from the queues."""

    def is_settled() -> bool:
        found = [queue_counts(each.connection, each.topology.queues) for each in places]
        return not any(one and one.consumers for counts in found for one in counts.values())

    wait_for(is_settled, "the end of the consumers")
    return sum(sum(waiting(each).values()) for each in places)


def test_a_kill_leaves_no_more_copies_than_the_page_says(
    old: dict[str, Any], new: dict[str, Any], make: Callable[..., Any]
) -> None:
    number, before, after = 5000, make(old), make(new)
    page = Path(__file__).parents[2] / "docs" / "how-to" / "migrate.md"
    found = re.search(r"at most ([0-9,]+) for each kill", page.read_text())
    assert found is not None
    assert int(found[1].replace(",", "")) == 2 * BATCH
    # Half of them in one queue, where RabbitMQ has the most acknowledgements in progress.
    rows = [Row(delay=random.uniform(*FAR) if each % 2 else 1800) for each in range(number)]
    before.rabbitdelay.send_many(before.tasks["look"], rows, envelopes=False)
    source, target = place(old, before), place(new, after)
    made: list[int] = []
    for _ in range(KILLS):
        here, there = sum(waiting(target).values()), settled(source, target)
        with start_celery(new, f"rabbitdelay {migrate(old)}", stderr=subprocess.PIPE) as process:

            def has_ended_or_begun(here: int = here, process: Any = process) -> bool:
                return process.poll() is not None or sum(waiting(target).values()) > here

            wait_for(has_ended_or_begun, "the first messages moved")
            process.kill()
        made.append(settled(source, target) - there)
    print(f"copies of each kill: {made}")  # noqa: T201  # a figure of the run
    assert min(made) >= 0
    assert max(made) <= 2 * BATCH
    answer(new, migrate(old), "moved")
    assert settled(source) == 0
    assert settled(target) == number + sum(made)


def test_a_dry_run_counts_and_takes_nothing(
    old: dict[str, Any], new: dict[str, Any], make: Callable[..., Any]
) -> None:
    before = make(old)
    for delay in (630, 630, 10_000):
        before.tasks["look"].apply_async(delay=delay)
    told = answer(new, f"{migrate(old)} --dry-run", "waiting")
    prefix = old["prefix"]
    assert told == {"waiting": 3, "queues": {f"{prefix}.minutes.10": 2, f"{prefix}.meditation": 1}}
    assert sum(waiting(place(old, before)).values()) == 3


def test_what_cannot_be_read_and_what_is_undeliverable_goes_to_undeliverable(
    old: dict[str, Any], new: dict[str, Any], make: Callable[..., Any]
) -> None:
    before, after = make(old), make(new)
    before.tasks["look"].apply_async(delay=600)
    with Connection(old["broker_url"]) as connection:
        prefix, producer = old["prefix"], connection.Producer()
        producer.publish({}, exchange="", routing_key=f"{prefix}.minutes.10")
        key = before.rabbitdelay.topology.route(600, "nobody").routing_key
        producer.publish({}, exchange=f"{prefix}.minutes.x1", routing_key=key)
        producer.publish({}, exchange=f"{prefix}.undeliverable", routing_key="any")
        wait_for(lambda: sum(waiting(place(old, before)).values()) == 4, "the messages")
        moved = answer(new, migrate(old), "moved", 1)
        prefix = new["rabbitdelay_prefix"]
        assert moved["moved"] == 3
        assert moved["left"] == {"its routing key is of another layout: see the --from options": 1}
        assert moved["undeliverable"] == {"rabbitdelay-due is None, not milliseconds since 1970": 1}
        found = undeliverable_messages(connection, after.rabbitdelay.topology)
        assert len({each.found.reason for each in found}) == 2
    assert waiting(place(new, after))[f"{prefix}.undeliverable"] == 2


def test_a_task_for_a_queue_that_does_not_exist_is_moved_and_the_queue_named(
    old: dict[str, Any], new: dict[str, Any], make: Callable[..., Any], channel: Any
) -> None:
    before, after = make(old), make(new)
    gone = f"{old['prefix']}-gone"
    before.send_task("look", queue=gone, delay=600)
    channel.queue_delete(gone)
    moved = answer(new, f"{migrate(old)} --allow *-gone", "moved")
    assert (moved["moved"], moved["missing_queues"]) == (1, [gone])
    assert moved["unnamed_queues"] == []
    assert sum(waiting(place(new, after)).values()) == 1


def test_a_queue_that_the_application_does_not_name_is_not_bound(
    old: dict[str, Any], new: dict[str, Any], make: Callable[..., Any], connection: Connection
) -> None:
    """Anybody may have written its name into a routing key."""
    before, after = make(old), make(new)
    name = f"{old['prefix']}-secret"
    before.send_task("look", queue=name, delay=600)
    told = run_command(new, migrate(old))
    assert told.returncode == 1
    assert "wait until these queues are bound" in told.stdout
    assert "undeliverable rabbitdelay_retry_for" in told.stdout
    assert name in told.stdout

    before.send_task("look", queue=name, delay=600)
    moved = answer(new, migrate(old), "moved", 1)
    assert (moved["moved"], moved["missing_queues"], moved["unnamed_queues"]) == (1, [], [name])
    topology = after.rabbitdelay.topology
    channel: Any = connection.default_channel
    key = topology.route(0, name).routing_key
    connection.Producer().publish("x", exchange=topology.delivery.name, routing_key=key)
    # It found no queue.
    distribution = topology.module_queues.distribution.name
    wait_for(lambda: count(connection, distribution) == 1, "a message without a route")
    assert channel.queue_delete(name) == 0


def test_the_same_prefix_on_the_same_broker_is_refused(
    old: dict[str, Any], new: dict[str, Any], make: Callable[..., Any]
) -> None:
    make(old).tasks["look"].apply_async(delay=600)
    told = run_command(old, "migrate")
    assert told.returncode == 2
    assert "have the same prefix" in told.stderr
    # By another name of the same broker.
    url = old["broker_url"].replace("127.0.0.1", "localhost")
    assert run_command(old, f"transfer --from {url}").returncode == 2


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("--from-layout [[", "is not JSON"),
        ("--from-layout hexadecimal", "rabbitdelay_layout"),
        ("--from-shards 0", "rabbitdelay_shards"),
        ("--from-prefix a/b", "rabbitdelay_prefix"),
        ("--rate 0", "--rate"),
    ],
)
def test_wrong_levels_are_refused(new: dict[str, Any], options: str, text: str) -> None:
    told = run_command(new, f"migrate {options}")
    assert told.returncode == 2
    assert text in told.stderr


def test_a_cancelled_task_stays_cancelled_after_the_migration(
    old: dict[str, Any], new: dict[str, Any], make: Callable[..., Any]
) -> None:
    registry = {
        "rabbitdelay_registry_url": old["result_backend"],
        "rabbitdelay_registry_options": {"socket_timeout": PATIENCE},
    }
    old, new = {**old, **registry}, {**new, **registry}
    before = make(old)
    notes = Notes(before)
    options: dict[str, Any] = {"kwargs": {"key": notes.key}, "delay": 100, "track": True}
    first = before.tasks["note"].apply_async(("cancelled",), **options)
    before.tasks["note"].apply_async(("runs",), **options)
    before.rabbitdelay.cancel(first.id)
    refused = run_command(new, migrate(old))
    assert refused.returncode == 2
    assert "those that are cancelled would run" in refused.stderr
    new = {**new, "rabbitdelay_registry_prefix": old["prefix"]}
    make(new)
    assert answer(new, migrate(old), "moved")["moved"] == 2
    with Worker(new):
        notes.wait(1, timeout=PATIENCE)
    assert notes() == ["runs"]
    with pytest.raises(TaskRevokedError):
        first.get(timeout=PATIENCE)
    notes.forget()


def test_after_ctrl_c_nothing_exists_twice_and_the_rest_is_where_it_was(
    old: dict[str, Any], new: dict[str, Any], make: Callable[..., Any]
) -> None:
    before, after = make(old), make(new)
    rows = [Row(delay=random.uniform(*FAR)) for _ in range(2000)]
    before.rabbitdelay.send_many(before.tasks["look"], rows, envelopes=False)
    source, target = place(old, before), place(new, after)
    all_waiting = sum(waiting(source).values())
    command = f"rabbitdelay {migrate(old)} --rate 50 --json"
    process = start_celery(new, command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_for(lambda: waiting(target), "the first messages moved")
    process.send_signal(signal.SIGINT)
    printed, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1, errors
    moved = checked("moved", printed)
    assert not moved["finished"]
    assert moved["moved"] > 0
    here, there = waiting(source), waiting(target)
    assert sum(there.values()) == moved["moved"]
    assert sum(here.values()) == all_waiting - moved["moved"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            "--from-tick 0.01 --from-layout clock --from-shards 1",
            "found --from-layout with the JSON of their rabbitdelay_layout, a 'custom'",
        ),
        ("--from-queue-type classic --from-shards 2", "--from-queue-type quorum --from-shards 1"),
        ("--from-prefix nobodys", "nobodys"),
    ],
)
def test_levels_that_are_not_as_described_are_refused(
    old: dict[str, Any], new: dict[str, Any], make: Callable[..., Any], options: str, text: str
) -> None:
    make(old).tasks["look"].apply_async(delay=600)
    for dry_run in ("", " --dry-run"):
        told = run_command(new, f"migrate --from-prefix {old['prefix']} {options}{dry_run}")
        assert told.returncode == 2, told.stdout
        assert text in told.stderr


@pytest.mark.parametrize(("layout", "tick"), [("binary", 0.1), ("clock", 1)])
def test_a_refusal_says_which_layout_was_found(
    old: dict[str, Any], new: dict[str, Any], make: Callable[..., Any], layout: str, tick: float
) -> None:
    old = {**old, "rabbitdelay_layout": layout, "rabbitdelay_tick": tick}
    make(old).tasks["look"].apply_async(delay=600)
    command = f"migrate --from-prefix {old['prefix']} --from-shards 1 --dry-run"
    told = run_command(new, command)
    option = f"--from-layout {layout} --from-tick {tick}"
    assert f"{old['prefix']!r}: found {option}. " in " ".join(told.stderr.split())
    assert answer(new, f"{command} {option}", "waiting")["waiting"] == 1


def mover_of(connection: Connection, *queues: str) -> Mover:
    def stay(message: Any, queue: str) -> Any:
        raise Stay("it stays")

    return Mover(connection, queues, Place(connection, Topology("undeliverable")), stay)


def test_a_queue_that_another_consumer_has_for_itself_ends_the_move(
    connection: Connection, make_queue: Callable[..., Queue]
) -> None:
    queue = make_queue("busy")
    queue(connection.default_channel).declare()
    connection.Producer().publish({}, routing_key=queue.name)
    wait_for(lambda: count(connection, queue.name) == 1, "the message")
    with connection.clone() as other:
        channel: Any = other.default_channel
        channel.basic_qos(0, 1, False)
        channel.basic_consume(queue.name, callback=list, exclusive=True)
        connection.Producer().publish({}, routing_key=queue.name)
        with pytest.raises(OSError, match="exclusive"):
            mover_of(connection, queue.name).move()


def test_a_destination_that_cannot_be_declared_is_bound_as_it_is(
    old: dict[str, Any], new: dict[str, Any], make: Callable[..., Any], connection: Connection
) -> None:
    before = make(old)
    name = named(before, "default")
    before.tasks["look"].apply_async(delay=600)
    # As the application does not declare it.
    channel: Any = connection.default_channel
    channel.queue_delete(name)
    channel.queue_declare(name, durable=True, auto_delete=False)
    moved = answer(new, migrate(old), "moved")
    assert (moved["moved"], moved["missing_queues"]) == (1, [])
