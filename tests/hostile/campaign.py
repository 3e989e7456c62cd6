"""A campaign: hostile messages against one worker, and an account of each of them."""

import json
import re
import tempfile
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any, Final

from kombu import Connection, Queue

from celery_rabbitdelay.exceptions import PublishError
from celery_rabbitdelay.kombu import Topology, examine
from celery_rabbitdelay.publishing import declaration
from celery_rabbitdelay.publishing.kombu_internals import connect
from celery_rabbitdelay.publishing.message import Content, Publication, body_of, headers_of
from celery_rabbitdelay.publishing.publish_loop import PublishPolicy
from celery_rabbitdelay.publishing.publisher import Publisher
from celery_rabbitdelay.publishing.wire import read_unreadable_properties
from celery_rabbitdelay.testing import wait_for
from tests.chaos.whereabouts import messages
from tests.hostile.application import MARK, AttackedWorker, make_app
from tests.hostile.kinds import ALLOWED, BEHIND, FORBIDDEN, KINDS, MAX_GROWTH, TASKS
from tests.hostile.kinds import hostile_messages as hostile

#: Seconds until nothing moves any more.
PATIENCE: Final = 1_800.0

#: What ends a worker's connection, in its log.
TROUBLE: Final = ": reconnecting|Connection to broker lost|Unrecoverable error"

#: The queues beside those of the levels.
NAMES: Final = (TASKS, ALLOWED, FORBIDDEN)

#: Seconds that each honest task is delayed; and how they go: straight from the levels, and, with a
#: priority of their own, through distribution.
DELAY: Final = 1.0
WAYS: Final = {"levels": None, "distribution": 9}


@dataclass
class Account:
    """What became of the messages of a campaign.

    Attributes:
        kinds: The kind of each message.
        confirmed: The messages that the broker has taken.
        refused: How many that may be refused the broker did not take.
        places: For each place, how many messages lie there, or ran.
        sent: How many honest tasks were sent.
        late: The seconds by which each was late that ran, for each way.
        growth: The bytes by which the worker's main process has grown.
        complaints: What is wrong: lost connections, what is not accounted for, or who noticed.
    """

    kinds: dict[int, str] = field(default_factory=dict)
    confirmed: set[int] = field(default_factory=set)
    refused: int = 0
    places: Counter[str] = field(default_factory=Counter)
    sent: int = 0
    late: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    growth: int = 0
    complaints: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{len(self.kinds)} hostile messages, {self.refused} refused by the broker"]
        lines += [f"{dict(self.places)}, the worker has grown by {self.growth >> 20} MiB"]
        for way, late in ((way, sorted(each)) for way, each in self.late.items()):
            lines.append(f"honest tasks, {way}, late: {late[len(late) // 2]:.3f}/{late[-1]:.3f} s")
        return "\n".join([*lines, *(f"NOT GOOD: {each}" for each in self.complaints)])


def attack(broker_url: str, prefix: str, count: int, seed: int, pool: str = "prefork") -> Account:
    """Publish so many hostile messages while an honest client sends tasks; account for all.

    Args:
        broker_url: The broker.
        prefix: The first part of all names.
        count: How many messages.
        seed: Chooses them.
        pool: The pool of the worker, which runs one task at a time.
    """
    account = Account()
    with ExitStack() as stack:
        journal = Path(stack.enter_context(tempfile.TemporaryDirectory()), "journal")
        journal.touch()
        settings = {"broker_url": broker_url, "prefix": prefix, "pool": pool}
        settings["journal"] = str(journal)
        app: Any = make_app(settings)
        stack.callback(app.close)
        topology: Topology = app.rabbitdelay.topology
        connection = stack.enter_context(Connection(broker_url))
        stack.callback(_delete, connection, topology)
        queues = _declared(connection, app, topology)
        with AttackedWorker(settings) as worker:
            before = worker.peak_bytes
            with honest(app, account):
                _publish(broker_url, topology, count, seed, account)
                _wait_until_at_rest(connection, worker, topology, account)
            with suppress(TimeoutError):  # it shows below
                wait_for(lambda: len(_noted(journal, "honest")) >= account.sent, "", 60, 0.5)
            account.complaints += re.findall(f".*(?:{TROUBLE}).*", worker.log)
            account.complaints += [] if worker.running else ["the worker has ended"]
            account.growth = worker.peak_bytes - before if worker.running else 0
        _settle(broker_url, topology, queues, journal, account)
    return account


def _declared(connection: Connection, app: Any, topology: Topology) -> list[Queue]:
    """Declare everything; return the queues beside those of the levels."""
    declaration.declare(connection, topology)
    for queue in app.amqp.queues.values():
        declaration.declare_destination(connection, topology, queue)
    forbidden = Queue(f"{topology.prefix}.{FORBIDDEN}", channel=connection.default_channel)
    # By default, distribution reaches any exchange, but no queue that the application lacks.
    forbidden.queue_declare()
    # A worker would publish to it what follows a task.
    forbidden.bind_to("amq.direct", routing_key=forbidden.name)
    return [Queue(f"{topology.prefix}.{name}") for name in NAMES]


def _delete(connection: Connection, topology: Topology) -> None:
    declaration.delete(connection, topology, force=True)
    for name in NAMES:
        Queue(f"{topology.prefix}.{name}", channel=connection.default_channel).delete()


def _publish(url: str, topology: Topology, count: int, seed: int, account: Account) -> None:
    """Publish messages; those that the broker may refuse, each on a connection of its own."""
    alone: list[Publication] = []

    def publications() -> Iterator[Publication]:
        for number, kind, exchange, key, content, body in hostile(topology, count, seed):
            account.kinds[number] = kind
            address: Any = partial(tuple, (exchange, key))  # a key that is no text
            made = Publication(Content(content, body), address, number)
            if KINDS[kind].is_refused:
                alone.append(made)
            else:
                yield made

    def done(made: Publication) -> None:
        if made.error is None:
            account.confirmed.add(made.context)
        elif KINDS[account.kinds[made.context]].is_refused:
            account.refused += 1
        else:
            account.complaints.append(repr(made.error))

    def publish_all(made: Iterable[Publication], **policy: Any) -> None:
        with closing(Publisher(Connection(url))) as publisher:
            publisher.publish_all(made, PublishPolicy(timeout=120, **policy), done=done)

    publish_all(publications(), window=100)
    for each in alone:
        with suppress(PublishError):
            publish_all([each], resends=0)


@contextmanager
def honest(app: Any, account: Account) -> Iterator[None]:
    """Send tasks in a thread while the block runs, each way in turn."""
    stopping, task = Event(), app.tasks["honest"]

    def send() -> None:
        try:
            with Connection(app.conf.broker_url) as connection:
                while not stopping.wait(0.1):
                    way, priority = list(WAYS.items())[account.sent % len(WAYS)]
                    options = {"delay": DELAY, "priority": priority, "connection": connection}
                    task.apply_async((way, time.time() + DELAY), **options)
                    account.sent += 1
        except Exception as error:  # noqa: BLE001 - told at the end
            account.complaints.append(f"the honest client has ended: {error!r}")

    thread = Thread(target=send, name="honest")
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join()


def _wait_until_at_rest(
    connection: Connection, worker: AttackedWorker, topology: Topology, account: Account
) -> None:
    """Wait until the modules have nothing to do, and the other queues stay as they are.

    Not longer than the worker lives; what it leaves behind shows in the account.
    """
    modules = topology.module_queues
    own = (f"{topology.prefix}.{name}" for name in (TASKS, ALLOWED))
    names = modules.checkin.name, modules.distribution.name, *own, modules.undeliverable.name
    last: deque[list[int]] = deque(maxlen=10)

    def at_rest() -> bool:
        found = declaration.queue_counts(connection, map(Queue, names)).values()
        *busy, allowed, undeliverable = (each.messages for each in found if each)
        if sum(busy) > 5:  # honest tasks and meditation go on
            last.clear()
        last.append([allowed, undeliverable])
        return len(last) == 10 and all(each == last[-1] for each in last)

    try:
        wait_for(lambda: not worker.running or at_rest(), "rest", PATIENCE, interval=0.3)
    except TimeoutError as error:
        account.complaints.append(str(error))


def _noted(journal: Path, what: str) -> list[list[Any]]:
    lines = (line for line in journal.read_text().splitlines() if line.endswith("]"))
    return [noted[1:] for noted in map(json.loads, lines) if noted[0] == what]


def _settle(
    url: str, topology: Topology, queues: list[Queue], journal: Path, account: Account
) -> None:
    """Look where each message is, and say what is wrong."""
    kinds, places, lost = account.kinds, account.places, Counter[str]()
    ran = {number for (number,) in _noted(journal, "hostile")}
    found = set(ran)
    places["ran as a task"] = len(ran)
    for way, late in _noted(journal, "honest"):
        account.late[way].append(late)
    with Connection(url) as own:
        connect(own)
        read_unreadable_properties(own)
        for name, message in messages(own, topology, queues):
            place = name.removeprefix(f"{topology.prefix}.")
            places[place if place in (*NAMES, "undeliverable") else "waiting"] += 1
            text = f"{message.properties.get('message_id')} {body_of(message)!r}"
            found.update(map(int, MARK.findall(text)[-1:]))
            if place == "undeliverable":
                assert examine(headers_of(message), topology, message.delivery_info["routing_key"])
    for number in account.confirmed - found:
        is_dropped = KINDS[kinds[number]].is_dropped
        (places if is_dropped else lost)["dropped by Celery" if is_dropped else kinds[number]] += 1
    behind = {number for number, kind in kinds.items() if kind == BEHIND}
    wrong = {
        f"lost: {lost}": lost.total(),
        "reached what nobody may reach": places[FORBIDDEN],
        "honest tasks did not run": account.sent - sum(map(len, account.late.values())),
        "tasks behind a malformed one did not run": len(behind & account.confirmed - ran),
        "tasks are left that a worker has held": places[TASKS],
        "MiB more memory than allowed": max(account.growth - MAX_GROWTH, 0) // 2**20,
    }
    account.complaints += [f"{number} {what}" for what, number in wrong.items() if number]
