"""A campaign: hostile messages against one worker, and an account of each of them."""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any, Final

from kombu import Connection, Exchange, Queue

from celery_rabbitdelay.exceptions import PublishError
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.publishing.declaration import (
    declare,
    declare_destination,
    delete,
    queue_counts,
)
from celery_rabbitdelay.publishing.incoming import reading_unreadable_properties
from celery_rabbitdelay.publishing.message import body_of
from celery_rabbitdelay.publishing.publication import Publication, PublishPolicy
from celery_rabbitdelay.publishing.publisher import Publisher
from celery_rabbitdelay.publishing.wire import Content
from celery_rabbitdelay.testing import wait_for
from tests.chaos.whereabouts import messages, reason_of
from tests.hostile.application import MARK, AttackedWorker, make_app
from tests.hostile.kinds import (
    ALLOWED,
    BEHIND,
    EXPIRED,
    FORBIDDEN,
    KINDS,
    MAX_GROWTH,
    TASKS,
    Hostile,
    hostile_messages,
)

#: Seconds until nothing moves any more.
PATIENCE: Final = 1_800.0

#: What ends a worker's connection, in its log.
TROUBLE: Final = ("connects again", "Connection to broker lost", "Unrecoverable error")

#: The queues beside those of the levels.
NAMES: Final = (TASKS, ALLOWED, EXPIRED, FORBIDDEN)

#: Seconds that each honest task is delayed; and how they go: straight from the levels, and, with a
#: priority of their own, through distribution.
DELAY: Final = 1.0
WAYS: Final = {"levels": None, "distribution": 9}


@dataclass
class Account:
    """What became of the messages of a campaign.

    Attributes:
        names: The kind of each message.
        kinds: For each kind, how many.
        confirmed: The messages that the broker has taken.
        refused: How many that may be refused the broker did not take.
        places: For each place, how many messages lie there, or ran.
        reasons: For each reason in ``undeliverable``, without its values, how many.
        lost: The messages that were confirmed and lie nowhere.
        stuck: The good tasks behind a hostile message that did not run.
        sent: How many honest tasks were sent, for each way.
        late: The seconds by which each was late that ran, for each way.
        growth: The bytes by which the worker's main process has grown.
        trouble: Lines of its log about lost connections; what else is wrong.
    """

    names: dict[int, str] = field(default_factory=dict)
    kinds: Counter[str] = field(default_factory=Counter)
    confirmed: set[int] = field(default_factory=set)
    refused: int = 0
    places: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    lost: list[tuple[int, str]] = field(default_factory=list)
    stuck: list[int] = field(default_factory=list)
    sent: Counter[str] = field(default_factory=Counter)
    late: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in WAYS})
    growth: int = 0
    trouble: list[str] = field(default_factory=list)

    @property
    def complaints(self) -> list[str]:
        """What is wrong: something is not accounted for, or somebody else has noticed."""
        missing = self.sent.total() - sum(map(len, self.late.values()))
        found = {
            f"lost: {self.lost[:5]}": len(self.lost),
            "reached what nobody may reach": self.places[FORBIDDEN],
            "honest tasks did not run": missing,
            "tasks behind a malformed one did not run": len(self.stuck),
            "tasks are left that a worker has held": self.places[TASKS],
            "MiB more memory than allowed": max(self.growth - MAX_GROWTH, 0) // 2**20,
        }
        return [*self.trouble, *(f"{number} {what}" for what, number in found.items() if number)]

    @property
    def is_good(self) -> bool:
        """Whether nothing is wrong."""
        return not self.complaints

    def __str__(self) -> str:
        late = {way: sorted(each) for way, each in self.late.items() if each}
        return "\n".join(
            [
                f"{len(self.names)} hostile messages of {len(self.kinds)} kinds",
                f"refused by the broker: {self.refused}",
                *(f"{place}: {count}" for place, count in self.places.most_common()),
                *(f"  {count:7} {reason}" for reason, count in self.reasons.most_common(40)),
                f"the worker has grown by {self.growth / 2**20:.0f} MiB",
                *(
                    f"honest tasks, {way}: {len(each)}, late p50 {each[len(each) // 2]:.3f} s, "
                    f"most {each[-1]:.3f} s"
                    for way, each in late.items()
                ),
                *(f"NOT GOOD: {complaint}" for complaint in self.complaints),
            ]
        )


def attack(
    broker_url: str, prefix: str, count: int, seed: int, pool: str = "prefork", **rabbitdelay: Any
) -> Account:
    """Publish so many hostile messages while an honest client sends tasks; account for all.

    Args:
        broker_url: The broker.
        prefix: The first part of all names.
        count: How many messages.
        seed: Chooses them.
        pool: The pool of the worker, which runs one task at a time.
        **rabbitdelay: Further settings of the application.
    """
    account = Account()
    with ExitStack() as stack:
        journal = Path(stack.enter_context(tempfile.TemporaryDirectory()), "journal")
        journal.touch()
        settings: dict[str, Any] = {"broker_url": broker_url, "prefix": prefix, "pool": pool}
        settings |= {"journal": str(journal), "rabbitdelay": rabbitdelay}
        app: Any = make_app(settings)
        stack.callback(app.close)
        topology: Topology = app.rabbitdelay.topology
        connection = stack.enter_context(Connection(broker_url))
        stack.callback(_delete, connection, topology)
        queues = _declared(connection, app, topology)
        with AttackedWorker(settings) as worker:
            before = worker.peak_bytes
            with honest(app, account):
                _publish(broker_url, hostile_messages(topology, count, seed), account)
                _wait_until_at_rest(connection, worker, topology, account)
            _wait_for_honest(journal, account)
            account.trouble += [
                line for line in worker.log.splitlines() if any(word in line for word in TROUBLE)
            ]
            if worker.running:
                account.growth = worker.peak_bytes - before
            else:
                account.trouble.append("the worker has ended")
        _settle(broker_url, topology, queues, journal, account)
    return account


def _declared(connection: Connection, app: Any, topology: Topology) -> list[Queue]:
    """Declare everything; return the queues beside those of the levels."""
    declare(connection, topology)
    for queue in app.amqp.queues.values():
        declare_destination(connection, topology, queue)
    queues = [Queue(f"{topology.prefix}.{name}") for name in NAMES]
    *_, expired, forbidden = (queue(connection.default_channel) for queue in queues)
    # By default, distribution reaches any exchange, but no queue that the application lacks.
    forbidden.queue_declare()
    # A worker would publish to it what follows a task.
    forbidden.bind_to("amq.direct", routing_key=forbidden.name)
    expired.queue_declare()
    Exchange(expired.name, type="fanout")(connection.default_channel).declare()
    expired.bind_to(expired.name)
    return queues


def _delete(connection: Connection, topology: Topology) -> None:
    delete(connection, topology, force=True)
    channel: Any = connection.default_channel
    for name in NAMES:
        channel.queue_delete(f"{topology.prefix}.{name}")
    channel.exchange_delete(f"{topology.prefix}.{EXPIRED}")


def _publish(url: str, hostile: Iterator[Hostile], account: Account) -> None:
    """Publish messages; those that the broker may refuse, each on a connection of its own."""
    alone: list[Publication] = []

    def publications() -> Iterator[Publication]:
        for number, kind, exchange, key, content, body in hostile:
            account.names[number] = kind
            account.kinds[kind] += 1
            address: Any = partial(tuple, (exchange, key))  # a key that is no text
            made = Publication(Content(content, body), address, number)
            if KINDS[kind].is_refused:
                alone.append(made)
            else:
                yield made

    def done(made: Publication) -> None:
        if made.error is None:
            account.confirmed.add(made.context)
        elif KINDS[account.names[made.context]].is_refused:
            account.refused += 1
        else:
            account.trouble.append(repr(made.error))

    _publish_all(url, publications(), PublishPolicy(timeout=120, window=100), done)
    for each in alone:
        with suppress(PublishError):
            _publish_all(url, [each], PublishPolicy(timeout=120, resends=0), done)


def _publish_all(url: str, made: Any, policy: PublishPolicy, done: Any) -> None:
    with closing(Publisher(Connection(url))) as publisher:
        publisher.publish_all(made, policy, done=done)


@contextmanager
def honest(app: Any, account: Account) -> Iterator[None]:
    """Send tasks in a thread while the block runs, each way in turn."""
    stopping = Event()

    def send() -> None:
        task = app.tasks["honest"]
        with Connection(app.conf.broker_url) as connection:
            while not stopping.is_set():
                for way, priority in WAYS.items():
                    options = {"delay": DELAY, "priority": priority, "connection": connection}
                    task.apply_async((way, time.time() + DELAY), **options)
                    account.sent[way] += 1
                    stopping.wait(0.1)

    def run() -> None:
        try:
            send()
        except BaseException as error:  # noqa: BLE001 - told at the end
            account.trouble.append(f"the honest client has ended: {error!r}")

    thread = Thread(target=run, name="honest")
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
    tasks, allowed = (f"{topology.prefix}.{name}" for name in (TASKS, ALLOWED))
    busy_ones = modules.checkin.name, modules.distribution.name, tasks
    names = (*busy_ones, modules.undeliverable.name, allowed)
    last: list[list[int]] = []

    def at_rest() -> bool:
        found = queue_counts(connection, map(Queue, names)).values()
        *busy, undeliverable, allowed = (each.messages for each in found if each)
        if sum(busy) > 5:  # honest tasks and meditation go on
            last.clear()
        last.append([undeliverable, allowed])
        return len(last) > 10 and all(each == last[-1] for each in last[-10:])

    try:
        wait_for(lambda: not worker.running or at_rest(), "rest", PATIENCE, interval=0.5)
    except TimeoutError as error:
        account.trouble.append(str(error))


def _journal(journal: Path, what: str) -> list[list[Any]]:
    lines = (line for line in journal.read_text().splitlines() if line.endswith("]"))
    return [noted[1:] for noted in map(json.loads, lines) if noted[0] == what]


def _wait_for_honest(journal: Path, account: Account) -> None:
    sent, complaint = account.sent.total(), "the honest tasks"
    try:
        wait_for(lambda: len(_journal(journal, "honest")) >= sent, complaint, 60, interval=0.5)
    except TimeoutError as error:
        account.trouble.append(str(error))
    for way, late in _journal(journal, "honest"):
        account.late[way].append(late)


def _settle(
    url: str, topology: Topology, queues: list[Queue], journal: Path, account: Account
) -> None:
    """Look where each message is."""
    ran = [number for (number,) in _journal(journal, "hostile")]
    found = set(ran)
    account.places["ran as a task"] = len(ran)
    own = Connection(url)
    reading_unreadable_properties(own)
    with own:
        for name, message in messages(own, topology, queues):
            place = name.removeprefix(f"{topology.prefix}.")
            account.places[place if place in (*NAMES, "undeliverable") else "waiting"] += 1
            text = f"{message.properties.get('message_id')} {body_of(message)!r}"
            found.update(map(int, MARK.findall(text)[-1:]))
            if place == "undeliverable":
                account.reasons[_general(reason_of(message, topology))] += 1
    names = account.names
    account.stuck = [n for n in account.confirmed.difference(ran) if names[n] == BEHIND]
    for number in sorted(account.confirmed - found):
        if KINDS[names[number]].is_dropped:
            account.places["dropped by Celery"] += 1
        else:
            account.lost.append((number, names[number]))


def _general(reason: str) -> str:
    """A reason without the values that a message has in it."""
    values = r"b?'[^']*'|\"[^\"]*\"|-?\d[\d.e+,]*|\{.*|\[.*"
    return re.sub(values, "_", reason)[:90].encode("ascii", "backslashreplace").decode()
