"""Schedules whose workers, brokers and registry are in trouble all along.

Two applications under one prefix have two hundred schedules. Workers, nodes and Redis are killed, a
node is cut off, and Redis is frozen; nobody takes tasks for a minute, twice; once Redis loses
everything, and the schedules are put again, as an application does when it starts; and once Redis
is restored from an older snapshot. Every ten seconds, a schedule gets other arguments. At the end,
nothing happens for a while.

With ``catch_up="all"``, each instant has to run: once, unless its worker was killed or Redis
forgot. What others leave out needs a reason.
"""

from __future__ import annotations

import json
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from itertools import cycle
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any, Final

from kombu.exceptions import OperationalError
from redis import Redis

from celery_rabbitdelay.exceptions import RabbitDelayError
from celery_rabbitdelay.levels.delay import instant_of
from celery_rabbitdelay.schedules.occurrence import Overlap
from tests.chaos.instants import BACK, EMPTY, CatchUp, Edit, Instants, Planned
from tests.chaos.ledger import Notes, Sent, Start, now_ms
from tests.chaos.network import MACHINE, NetworkedCluster
from tests.chaos.programs import Part, TaskQueue, Worker, make_app
from tests.chaos.stage import SOUND, Stage

#: The queue of each application, and the nodes that its workers try first.
WORKERS: Final = {SOUND: (0, 1, 2), "beside": (1, 2)}

#: What each of ten schedules promises: its group, ``catch_up`` and ``overlap``.
KINDS: Final[Sequence[tuple[str, CatchUp, Overlap]]] = (
    *(("all", "all", "allow"),) * 6,
    ("last", "last", "allow"),
    ("seconds", 20.0, "allow"),
    ("skip", "last", "skip"),
    ("queue-one", "last", "queue-one"),
)

#: Seconds until the first occurrences are due, when all schedules are put; that a node, a part of
#: the network or Redis is away; and between two troubles.
HEAD_START, AWAY, REST = 40.0, 10.0, 12.0

#: Seconds between two edits, and in which a put has to succeed.
EDIT_EVERY, TO_PUT = 10.0, 300.0


def planned(number_of: int, begin_ms: int, seconds: float) -> list[Planned]:
    """Return so many schedules; a quarter has no end, and a fifth is the second application's."""
    plans: list[Planned] = []
    for number in range(number_of):
        group, catch_up, overlap = KINDS[(number + 3 * (number // 60)) % len(KINDS)]
        plans.append(
            Planned(
                f"s{number}",
                group,
                queue="beside" if number % 5 == 4 else SOUND,
                seconds=1 + number % 60,
                catch_up=catch_up,
                overlap=overlap,
                lasts=0.0 if overlap == "allow" else 0.2,
                begin_ms=begin_ms,
                end_ms=begin_ms + int(seconds * 1000),
                is_open=number % 4 == 3,
            )
        )
    return plans


class Author:
    """Puts the schedules of two applications, and edits one every ten seconds, in a thread.

    Attributes:
        apps: The applications, by their queues.
        edits: All puts that have returned.
        raised: How many puts have raised, by the name of the error.
    """

    def __init__(self, parts: Sequence[Part], plans: Sequence[Planned]) -> None:
        self.apps: dict[str, Any] = {part.place: make_app(part) for part in parts}
        self.edits: list[Edit] = []
        self.raised: Counter[str] = Counter()
        self._plans = plans
        self._revisions = [0] * len(plans)
        self._lock = Lock()
        self._ends = Event()
        self._thread = Thread(target=self._edit, name="edits", daemon=True)

    def begin(self) -> None:
        """Begin to edit."""
        self._thread.start()

    def end(self) -> None:
        """Edit no more."""
        self._ends.set()
        self._thread.join()

    def put_all(self) -> None:
        """Put all schedules, as applications do when they start."""
        for number in range(len(self._plans)):
            self._put(number, 0)

    def _edit(self) -> None:
        while not self._ends.wait(EDIT_EVERY):
            self._put(random.randrange(len(self._plans)), 1)

    def _put(self, number: int, change: int) -> None:
        """Put a schedule until that succeeds."""
        with self._lock:
            self._revisions[number] += change
            plan, revision = self._plans[number], self._revisions[number]
            deadline = time.monotonic() + TO_PUT
            while True:
                try:
                    self.apps[plan.queue].rabbitdelay.schedules.put(
                        *(plan.name, f"note-{plan.queue}", timedelta(seconds=plan.seconds)),
                        *((plan.queue, revision), {"seconds": plan.lasts}),
                        start=instant_of(plan.begin_ms),
                        end=None if plan.is_open else instant_of(plan.end_ms),
                        catch_up=plan.catch_up,
                        overlap=plan.overlap,
                    )
                    break
                except (RabbitDelayError, OperationalError) as error:
                    self.raised[type(error).__name__] += 1
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(1)
            self.edits.append(Edit(plan.name, revision, now_ms()))


def play_schedules(stage: Stage, number_of: int, seconds: float) -> None:
    """Make all the trouble, wait for what is to run, and judge it."""
    redis = stage.redis()
    stage.settings |= {
        "rabbitdelay_registry_url": redis.url,
        "rabbitdelay_registry_options": {"socket_timeout": 5},
    }
    begin_ms = int(time.time() + HEAD_START) * 1000
    plans = planned(number_of, begin_ms, seconds)
    author = Author([part_of(stage, queue) for queue in WORKERS], plans)
    try:
        Troubles(stage, redis, author, plans, seconds).play()
    finally:
        for app in author.apps.values():
            app.close()


def part_of(stage: Stage, queue: str, first_node: int = 0) -> Part:
    """Return what a process of the application that has a queue has to know."""
    part = stage.part(queue, first_node)
    return replace(part, queues=[TaskQueue(queue)], task=f"note-{queue}")


class Troubles:
    """What happens, and what is found."""

    def __init__(
        self, stage: Stage, redis: Any, author: Author, plans: Sequence[Planned], seconds: float
    ) -> None:
        assert isinstance(stage.cluster, NetworkedCluster)
        self._stage, self._redis, self._author, self._plans = stage, redis, author, plans
        self._cluster = stage.cluster
        self._seconds = seconds
        self._shift_ms = now_ms() - time.time() * 1000
        self._end_ms = plans[0].begin_ms + self._shift_ms + seconds * 1000
        self._workers: list[Worker] = []
        self._dump: Path = redis.folder / "dump.rdb"

    def play(self) -> None:
        """Play it."""
        stage, author = self._stage, self._author
        begin_ms = self._end_ms - self._seconds * 1000
        author.put_all()
        self._start_workers()
        author.begin()
        regular = cycle([self._crash, self._part, self._freeze, self._kill_redis])
        # By the part of the time that is over.
        once: dict[float, Callable[[], None]] = {0.15: self._stop_workers, 0.35: self._empty}
        once |= {0.5: self._snapshot, 0.55: self._go_back, 0.68: self._cancel_consumers}
        stage.pause((begin_ms - now_ms()) / 1000)
        calm = min(180.0, self._seconds / 6)
        while now_ms() < self._end_ms - calm * 1000:
            stage.pause(REST)
            with stage.trouble("worker killed"):
                stage.kill(random.choice(self._workers))
            over = (now_ms() - begin_ms) / 1000 / self._seconds
            due = [part for part in once if part <= over]
            (once.pop(due[0]) if due else next(regular))()
        stage.say(f"calm; {len(once)} kinds of trouble were left out")
        stage.pause((self._end_ms - now_ms()) / 1000)
        author.end()
        stage.wait_for_cluster()
        with suppress(TimeoutError):
            stage.wait(self._is_over, "the last instants", 300, interval=2.0)
        self._judge_chains()
        self._judge()

    def _start_workers(self) -> None:
        for queue, nodes in WORKERS.items():
            for node in nodes:
                worker = Worker(part_of(self._stage, queue, node), "-l", "INFO")
                self._workers.append(worker)
                self._stage.serve(worker)

    @contextmanager
    def _trouble(self, what: str) -> Iterator[None]:
        """There is trouble while the block runs, and until the cluster is together."""
        with self._stage.trouble(what):
            yield
            self._stage.wait_for_cluster()

    def _crash(self) -> None:
        node = random.choice(self._cluster.nodes)
        with self._trouble("node killed"):
            node.kill()
            self._stage.pause(AWAY)
            node.start()

    def _part(self) -> None:
        with self._trouble("partition"), self._cluster.parted([1], [MACHINE, 2, 3]):
            self._stage.pause(AWAY)

    def _freeze(self) -> None:
        with self._trouble("Redis frozen"):
            self._redis.suspend()
            self._stage.pause(AWAY)
            self._redis.resume()

    def _kill_redis(self) -> None:
        with self._trouble("Redis killed"):
            self._save()
            self._restart_redis()

    def _empty(self) -> None:
        with self._trouble(EMPTY):
            self._dump.unlink(missing_ok=True)
            self._restart_redis()
            self._author.put_all()

    def _snapshot(self) -> None:
        self._save()
        shutil.copy(self._dump, self._dump.with_name("older.rdb"))

    def _go_back(self) -> None:
        with self._trouble(BACK):
            shutil.copy(self._dump.with_name("older.rdb"), self._dump)
            self._restart_redis()

    def _save(self) -> None:
        with Redis.from_url(self._redis.url) as client:
            client.save()

    def _restart_redis(self) -> None:
        self._redis.kill()
        self._stage.pause(AWAY)
        self._redis.start()

    def _backlog(self) -> None:
        self._stage.pause(min(60.0, self._seconds / 10))

    def _stop_workers(self) -> None:
        with self._stage.trouble("all workers stopped"):
            for worker in self._workers:
                self._stage.dismiss(worker)
                self._look_into(worker)
            self._workers.clear()
            self._backlog()
            self._start_workers()

    def _cancel_consumers(self) -> None:
        with self._stage.trouble("consumers cancelled"):
            self._tell("cancel_consumer")
            self._backlog()
            self._tell("add_consumer")

    def _tell(self, command: str) -> None:
        """Tell all workers of the first application something about its queue."""
        tell = getattr(self._author.apps[SOUND].control, command)
        names = [each.name for each in self._workers if each.part.place == SOUND]
        self._stage.wait(
            lambda: len(tell(SOUND, destination=names, reply=True, timeout=10)) >= len(names),
            f"answers of all workers to {command}",
            120,
        )

    def _is_over(self) -> bool:
        """Return whether all has run that has to, and each chain with an end has ended."""
        ended = {each.name for each in self._plans if not each.is_open}
        known = self._author.apps[SOUND].rabbitdelay.schedules.all()
        return ended.isdisjoint(each.name for each in known) and not self._instants().missing()

    def _judge_chains(self) -> None:
        """Complain of chains that have not ended, and of those that stand still; delete these."""
        complaints, now = self._stage.complaints, datetime.now(UTC)
        schedules = self._author.apps[SOUND].rabbitdelay.schedules
        known = {each.name: each for each in schedules.all()}
        for plan in self._plans:
            found = known.get(plan.name)
            if not plan.is_open:
                complaints += [f"{plan.name} has not ended: {found.next_id}"] if found else []
            elif found is None or found.next_at < now - timedelta(seconds=10):
                complaints.append(f"{plan.name} stands still: {found and found.next_id}")
            elif found.next_at > now + timedelta(seconds=plan.seconds):
                complaints.append(f"{plan.name} leaves instants out: {found.next_id}")
        for name in known:
            schedules.delete(name)
        self._stage.pause(REST)  # what was decided before has begun
        deleted_ms = now_ms()
        self._stage.pause(REST)
        late = [each.id for each in self._starts() if each.at_ms > deleted_ms]
        complaints += [f"{len(late)} ran after they were deleted: {late[:5]}"] if late else []

    def _starts(self) -> list[Start]:
        return [each for some in self._stage.ledger().starts.values() for each in some]

    def _instants(self) -> Instants:
        edits, troubles = self._author.edits, self._stage.ledger().troubles
        return Instants(self._plans, edits, self._starts(), troubles, self._shift_ms, self._end_ms)

    def _judge(self) -> None:
        """Say what was found, and note what ran as sent tasks, for the table."""
        instants = self._instants()
        found = instants.judge()
        drift_ms = now_ms() - time.time() * 1000 - self._shift_ms
        puts = f"{len(self._author.edits)} puts returned, others raised: {self._author.raised}"
        for line in (*found.lines(), puts, f"drift of the clock: {drift_ms:.1f} ms"):
            self._stage.say(line)
        self._stage.complaints += found.complaints
        notes = Notes(self._stage.folder)
        for plan in self._plans:
            for instant, starts in instants.runs[plan.name].items():
                due_ms = instant + self._shift_ms
                for identity in {each.id for each in starts}:
                    notes.begin(Sent(identity, plan.group, due_ms, due_ms))
                    notes.end(identity)
        for worker in self._workers:
            self._look_into(worker)
        self._keep()

    def _look_into(self, worker: Worker) -> None:
        """Complain if a worker got a task of the other application."""
        if "Received unregistered task" in worker.log:
            self._stage.complaints.append(f"{worker.name} got a task of another application")

    def _keep(self) -> None:
        """Keep the notes, edits and troubles."""
        folder = Path(__file__).resolve().parents[2] / "build" / "chaos" / "schedules"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self._stage.folder, folder)
        troubles = [asdict(each) for each in self._stage.ledger().troubles]
        played = {"edits": self._author.edits, "shift_ms": self._shift_ms, "troubles": troubles}
        (folder / "played.json").write_text(json.dumps(played))
        for worker in self._workers:
            (folder / f"{worker.port}.log").write_text(worker.log)
