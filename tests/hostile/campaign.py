"""A campaign: hostile messages against one worker, and an account of each of them."""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kombu import Connection, Exchange, Queue

from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.modules.undeliverable import examine
from celery_rabbitdelay.publishing.declaration import declare, declare_destination, delete
from celery_rabbitdelay.publishing.incoming import reading_unreadable_properties
from celery_rabbitdelay.publishing.message import body_of
from celery_rabbitdelay.testing import wait_for
from tests.hostile.application import MARK, AttackedWorker, make_app
from tests.hostile.client import Client
from tests.hostile.honest import Honest
from tests.hostile.kinds import (
    ALLOWED,
    BEHIND,
    EXPIRED,
    FORBIDDEN,
    KINDS,
    MAX_GROWTH,
    TASKS,
    hostile_messages,
)

#: Seconds until nothing moves any more.
PATIENCE: Final = 1_800.0

#: What ends a worker's connection, in its log.
TROUBLE: Final = ("connects again", "Connection to broker lost", "Unrecoverable error")

#: The queues beside those of the levels.
NAMES: Final = (TASKS, ALLOWED, EXPIRED, FORBIDDEN)


@dataclass
class Account:
    """What became of the messages of a campaign.

    Attributes:
        published: How many messages there were.
        refused: Those that the broker did not take.
        unexpected: Why it has closed a connection besides.
        places: For each place, how many messages lie there, or ran.
        reasons: For each reason in ``undeliverable``, without its values, how many.
        kinds: For each kind, how many.
        names: The kind of each message.
        lost: The messages that were confirmed and lie nowhere.
        doubled: For each kind, how many lie in several places, or several times in one.
        astray: How many messages reached what nobody may reach.
        lateness: For each way of honest tasks, the seconds by which each was late, sorted.
        missing: How many honest tasks did not run.
        stuck: The good tasks behind a hostile message that did not run.
        rss: The memory of the worker's main process before, and at most.
        trouble: Lines of its log about lost connections; whether it has ended.
        seconds: How long publishing took, and until nothing moved any more.
    """

    published: int = 0
    refused: int = 0
    unexpected: list[str] = field(default_factory=list)
    places: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    names: dict[int, str] = field(default_factory=dict)
    lost: list[tuple[int, str]] = field(default_factory=list)
    doubled: Counter[str] = field(default_factory=Counter)
    astray: int = 0
    lateness: dict[str, list[float]] = field(default_factory=dict)
    missing: int = 0
    stuck: list[int] = field(default_factory=list)
    rss: tuple[int, int] = (0, 0)
    trouble: list[str] = field(default_factory=list)
    seconds: tuple[float, float] = (0.0, 0.0)

    @property
    def is_good(self) -> bool:
        """Whether everything is accounted for, and nobody else has noticed."""
        return not (
            self.lost
            or self.astray
            or self.missing
            or self.stuck
            or self.places[TASKS]  # a worker has held it
            or self.trouble
            or self.rss[1] - self.rss[0] > MAX_GROWTH
        )

    def __str__(self) -> str:
        lines = [
            f"{self.published} hostile messages of {len(self.kinds)} kinds",
            f"published in {self.seconds[0]:.0f} s, at rest after {self.seconds[1]:.0f} s",
            f"refused by the broker: {self.refused}; unexpectedly: {self.unexpected}",
            *(f"{place}: {count}" for place, count in self.places.most_common()),
            f"lost: {len(self.lost)} {self.lost[:5]}",
            f"more than once: {dict(self.doubled)}",
            f"astray: {self.astray}",
            *(f"  {count:7} {reason}" for reason, count in self.reasons.most_common(40)),
            f"worker: {self.rss[0] / 2**20:.0f} MiB before, {self.rss[1] / 2**20:.0f} MiB at most",
            f"trouble: {self.trouble}",
        ]
        for way, late in self.lateness.items():
            if late:
                p50, p99 = (late[int(part * (len(late) - 1))] for part in (0.5, 0.99))
                lines.append(
                    f"honest tasks, {way}: {len(late)}, late p50 {p50:.3f} s, p99 {p99:.3f} s, "
                    f"most {late[-1]:.3f} s"
                )
        lines.append(f"honest tasks that did not run: {self.missing}")
        lines.append(f"tasks behind a malformed one that did not run: {len(self.stuck)}")
        return "\n".join(lines)


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
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder, "journal")
        journal.touch()
        settings: dict[str, Any] = {"broker_url": broker_url, "prefix": prefix, "pool": pool}
        settings["journal"] = str(journal)
        if rabbitdelay:
            settings["rabbitdelay"] = rabbitdelay
        app: Any = make_app(settings)
        topology: Topology = app.rabbitdelay.topology
        with Connection(broker_url) as connection:
            _declare(connection, app, topology)
        client = Client(broker_url)
        try:
            with AttackedWorker(settings) as worker:
                before = worker.peak_bytes
                began = time.monotonic()
                with Honest(app) as honest:
                    client.publish(_counted(account, topology, count, seed))
                    sent_in = time.monotonic() - began
                    _wait_until_at_rest(account, worker, broker_url, topology)
                account.seconds = sent_in, time.monotonic() - began
                _wait_for_honest(journal, sum(honest.sent.values()))
                if worker.running:
                    account.rss = before, worker.peak_bytes
                else:
                    account.trouble.append("the worker has ended")
                log = worker.log
                account.trouble += [
                    line for line in log.splitlines() if any(word in line for word in TROUBLE)
                ]
                if honest.error is not None:
                    account.trouble.append(f"the honest client has ended: {honest.error!r}")
            _settle(account, client, broker_url, topology, journal, honest)
        finally:
            _delete(broker_url, topology)
            app.close()
    return account


def _counted(account: Account, topology: Topology, count: int, seed: int) -> Iterator[Any]:
    for message in hostile_messages(topology, count, seed):
        account.published += 1
        account.kinds[message.kind] += 1
        account.names[message.number] = message.kind
        yield message


def _declare(connection: Connection, app: Any, topology: Topology) -> None:
    declare(connection, topology)
    channel = connection.default_channel
    for queue in app.amqp.queues.values():
        declare_destination(connection, topology, queue)
    # By default, distribution reaches any exchange, but no queue that the application lacks.
    name = f"{topology.prefix}.{FORBIDDEN}"
    forbidden = Queue(name, channel=channel)
    forbidden.declare()
    # A worker would publish to it what follows a task.
    forbidden.bind_to("amq.direct", routing_key=name)
    expired = f"{topology.prefix}.{EXPIRED}"
    Queue(expired, Exchange(expired, type="fanout"), channel=channel).declare()


def _own_queues(topology: Topology) -> dict[str, str]:
    """The queues of a campaign, and what an account calls them."""
    own = {f"{topology.prefix}.{name}": name for name in NAMES}
    return {
        **{queue.name: "waiting" for queue in topology.queues},
        **own,
        topology.module_queues.undeliverable.name: "undeliverable",
    }


def _wait_until_at_rest(
    account: Account, worker: AttackedWorker, broker_url: str, topology: Topology
) -> None:
    """Wait until the modules have nothing to do, and the other queues stay as they are.

    Not longer than the worker lives; what it leaves behind shows in the account.
    """
    modules = topology.module_queues
    busy = (modules.checkin.name, modules.distribution.name, f"{topology.prefix}.{TASKS}")
    last: list[tuple[int, int]] = []
    counts: dict[str, int] = {}

    with Connection(broker_url) as connection:

        def at_rest() -> bool:
            channel: Any = connection.default_channel
            for name in _own_queues(topology):
                counts[name] = channel.queue_declare(name, passive=True).message_count
            settled = counts[modules.undeliverable.name], counts[f"{topology.prefix}.{ALLOWED}"]
            if sum(counts[name] for name in busy) > 5:  # honest tasks and meditation go on
                last.clear()
            last.append(settled)
            return len(last) > 10 and len(set(last[-10:])) == 1

        try:
            wait_for(lambda: not worker.running or at_rest(), "rest", PATIENCE, interval=0.5)
        except TimeoutError as error:
            account.trouble.append(f"{error}: {counts}")


def _journal(journal: Path) -> list[list[Any]]:
    return [json.loads(line) for line in journal.read_text().splitlines() if line.endswith("]")]


def _wait_for_honest(journal: Path, count: int) -> None:
    try:
        wait_for(
            lambda: sum(line[0] == "honest" for line in _journal(journal)) >= count,
            "the honest tasks",
            timeout=60,
            interval=0.5,
        )
    except TimeoutError:
        return  # told as missing


def _settle(
    account: Account,
    client: Client,
    broker_url: str,
    topology: Topology,
    journal: Path,
    honest: Honest,
) -> None:
    found: Counter[int] = Counter()
    noted = _journal(journal)
    for line in noted:
        if line[0] == "hostile":
            found[line[1]] += 1
            account.places["ran as a task"] += 1
    for way in honest.sent:
        late = sorted(line[2] for line in noted if line[0] == "honest" and line[1] == way)
        account.lateness[way] = late
        account.missing += max(honest.sent[way] - len(late), 0)
    own = Connection(broker_url)
    reading_unreadable_properties(own)
    with own as connection:
        for queue, place in _own_queues(topology).items():
            for message in _drained(connection, queue):
                marks = MARK.findall(f"{message.properties.get('message_id')} {body_of(message)!r}")
                account.places[place] += 1
                account.astray += place == FORBIDDEN
                found.update({int(mark): 1 for mark in marks[-1:]})
                if place == "undeliverable":
                    headers = message.properties.get("application_headers") or {}
                    key = message.delivery_info["routing_key"]
                    account.reasons[_general(examine(headers, topology, key).reason)] += 1
    account.refused, account.unexpected = len(client.refused), client.unexpected
    names = account.names
    ran = {line[1] for line in noted if line[0] == "hostile"}
    account.stuck = [n for n in client.confirmed - ran if names[n] == BEHIND]
    for number in sorted(client.confirmed - found.keys()):
        if KINDS[names[number]].is_dropped:
            account.places["dropped by Celery"] += 1
        else:
            account.lost.append((number, names[number]))
    account.doubled = Counter(names[number] for number, count in found.items() if count > 1)


def _general(reason: str) -> str:
    """A reason without the values that a message has in it."""
    return (
        re.sub(r"b?'[^']*'|\"[^\"]*\"|-?\d[\d.e+,]*|\{.*|\[.*", "_", reason)[:90]
        .encode("ascii", "backslashreplace")
        .decode()
    )


def _drained(connection: Connection, queue: str) -> Iterator[Any]:
    channel: Any = connection.channel()
    channel.auto_decode = False
    came: list[Any] = []
    tag = channel.basic_consume(queue, no_ack=True, callback=came.append)
    with suppress(TimeoutError):
        while True:
            connection.drain_events(timeout=2)
            yield from came
            came.clear()
    channel.basic_cancel(tag)
    yield from came


def _delete(broker_url: str, topology: Topology) -> None:
    with Connection(broker_url) as connection:
        delete(connection, topology, force=True)
        channel: Any = connection.default_channel
        for name in NAMES:
            channel.queue_delete(f"{topology.prefix}.{name}")
        channel.exchange_delete(f"{topology.prefix}.{EXPIRED}")
