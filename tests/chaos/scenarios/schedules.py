"""Schedules whose workers, brokers and registry are in trouble all along."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from itertools import chain, cycle
from typing import ClassVar, Final

from redis import Redis

from celery_rabbitdelay.levels.delay import milliseconds_of
from celery_rabbitdelay.testing import RedisServer
from tests.chaos.application import TaskQueue
from tests.chaos.cluster import Cluster
from tests.chaos.instants import BACK, EMPTY, Instants, Planned
from tests.chaos.ledger import Sent, Start
from tests.chaos.network import NetworkedCluster
from tests.chaos.notes import Notes, now_ms
from tests.chaos.processes import Worker
from tests.chaos.putting import BESIDE, Author, part_of, planned
from tests.chaos.scenario import RESULTS, SOUND, Scenario
from tests.chaos.stage import Stage

#: The nodes that the workers of each queue try first.
WORKERS: Final = {SOUND: (0, 1, 2), BESIDE: (1, 2)}

#: Seconds until the first occurrences are due: all schedules are put by then.
HEAD_START: Final = 40

#: Seconds that a node, a part of the network or Redis is away.
AWAY: Final = 10.0

#: Seconds between two troubles.
REST: Final = 12.0

#: Seconds that nobody takes tasks from a queue, but no more than a tenth of all; and that nothing
#: happens at the end, but no more than a sixth.
BACKLOG: Final = 60.0
CALM: Final = 180.0

#: Seconds in which all workers answer, and in which all has to have run at the end.
TO_ANSWER: Final = 120.0
TO_RUN: Final = 300.0


@dataclass(frozen=True, kw_only=True)
class Schedules(Scenario):
    """Two hundred schedules, of one second to a minute, while everything is killed in turn (root).

    Two applications under one prefix have them. Workers, nodes and Redis are killed, a node is cut
    off, and Redis is frozen; nobody takes tasks for a minute, twice; once Redis loses everything,
    and the schedules are put again, as an application does when it starts; and once Redis is
    restored from an older snapshot. Every ten seconds, a schedule gets other arguments. At the end,
    nothing happens for a while.

    With ``catch_up="all"``, each instant has to run: once, unless its worker was killed or Redis
    forgot. What others leave out needs a reason.
    """

    name: ClassVar[str] = "schedules"
    patience: ClassVar[float] = 10.0

    tasks: int = 200
    minutes: float = 20.0

    def queues(self) -> Sequence[TaskQueue]:
        return [TaskQueue(queue) for queue in WORKERS]

    def cluster(self, version: str) -> Cluster:
        return NetworkedCluster(version, 3)

    def play(self, stage: Stage) -> None:
        with RedisServer() as redis:
            stage.settings |= {
                "rabbitdelay_registry_url": redis.url,
                "rabbitdelay_registry_options": {"socket_timeout": 5},
            }
            begin = datetime.now(UTC) + timedelta(seconds=HEAD_START)
            plans = planned(self.tasks, milliseconds_of(begin) // 1000 * 1000, self.minutes)
            author = Author({queue: part_of(stage, queue) for queue in WORKERS}, plans)
            with closing(author):
                _Play(stage, redis, author, plans, self.minutes * 60).run()


class _Play:
    """What happens.

    Args:
        stage: The stage.
        redis: The Redis of the registry.
        author: Puts the schedules.
        plans: The schedules.
        seconds: How long it takes from their first instant on.
    """

    def __init__(
        self,
        stage: Stage,
        redis: RedisServer,
        author: Author,
        plans: Sequence[Planned],
        seconds: float,
    ) -> None:
        assert isinstance(stage.cluster, NetworkedCluster)
        self._stage, self._redis, self._author, self._plans = stage, redis, author, plans
        self._cluster = stage.cluster
        self._seconds = seconds
        self._shift_ms = now_ms() - time.time() * 1000
        self._begin_ms = plans[0].begin_ms + self._shift_ms
        self._end_ms = self._begin_ms + seconds * 1000
        self._backlog = min(BACKLOG, seconds / 10)
        self._workers: dict[str, list[Worker]] = {queue: [] for queue in WORKERS}
        self._former: list[Worker] = []
        self._dump = redis.folder / "dump.rdb"
        self._older = redis.folder / "older.rdb"

    def run(self) -> None:
        """Make all the trouble, wait for what is to run, and judge it."""
        stage, author = self._stage, self._author
        author.put_all()
        for queue in WORKERS:
            self._start_workers(queue)
        author.begin()
        regular = cycle([self._crash, self._part, self._freeze, self._kill_redis])
        # By the part of the time that is over.
        once = {0.15: self._stop_workers, 0.35: self._empty, 0.5: self._snapshot}
        once |= {0.55: self._go_back, 0.68: self._cancel_consumers}
        calm_ms = min(CALM, self._seconds / 6) * 1000
        self._wait_until(self._begin_ms)
        while now_ms() < self._end_ms - calm_ms:
            stage.pause(REST)
            with stage.trouble("worker killed"):
                stage.kill(
                    random.choice([each for some in self._workers.values() for each in some])
                )
            over = (now_ms() - self._begin_ms) / 1000 / self._seconds
            due = [part for part in once if part <= over]
            (once.pop(due[0]) if due else next(regular))()
        stage.say(f"calm; {len(once)} kinds of trouble were left out")
        self._wait_until(self._end_ms)
        author.end()
        stage.wait_for_cluster()
        with suppress(TimeoutError):
            stage.wait(self._is_over, "the last instants", TO_RUN, interval=2.0)
        self._complain_of_chains()
        self._judge()

    def _wait_until(self, at_ms: float) -> None:
        self._stage.pause(max(at_ms - now_ms(), 0) / 1000)

    def _start_workers(self, queue: str) -> None:
        for node in WORKERS[queue]:
            worker = Worker(part_of(self._stage, queue, node), [queue], ["-l", "INFO"])
            self._workers[queue].append(worker)
            self._stage.serve(worker)

    def _crash(self) -> None:
        node = random.choice(self._cluster.nodes)
        with self._stage.trouble("node killed"):
            node.kill()
            self._stage.pause(AWAY)
            node.start()
            self._stage.wait_for_cluster()

    def _part(self) -> None:
        with self._stage.trouble("partition"):
            with self._cluster.parted([1], [2, 3], clients=1):
                self._stage.pause(AWAY)
            self._stage.wait_for_cluster()

    def _freeze(self) -> None:
        with self._stage.trouble("Redis frozen"):
            self._redis.suspend()
            self._stage.pause(AWAY)
            self._redis.resume()

    def _kill_redis(self) -> None:
        with self._stage.trouble("Redis killed"):
            self._save()
            self._restart_redis()

    def _stop_workers(self) -> None:
        with self._stage.trouble("all workers stopped"):
            for queue, workers in self._workers.items():
                for worker in workers:
                    self._stage.dismiss(worker)
                self._former += workers
                self._workers[queue] = []
            self._stage.pause(self._backlog)
            for queue in WORKERS:
                self._start_workers(queue)

    def _cancel_consumers(self) -> None:
        with self._stage.trouble("consumers cancelled"):
            self._tell("cancel_consumer")
            self._stage.pause(self._backlog)
            self._tell("add_consumer")

    def _tell(self, command: str) -> None:
        """Tell all workers of the first application something about its queue."""
        control, number = self._author.control(SOUND), len(WORKERS[SOUND])
        tell = getattr(control, command)
        names = [f"chaos-{each.port}@localhost" for each in self._workers[SOUND]]
        self._stage.wait(
            lambda: len(tell(SOUND, destination=names, reply=True, timeout=10)) >= number,
            f"answers of all workers to {command}",
            TO_ANSWER,
        )

    def _empty(self) -> None:
        with self._stage.trouble(EMPTY):
            self._dump.unlink(missing_ok=True)
            self._restart_redis()
            self._author.put_all()

    def _snapshot(self) -> None:
        self._save()
        shutil.copy(self._dump, self._older)
        self._stage.say("a snapshot of Redis is kept")

    def _go_back(self) -> None:
        with self._stage.trouble(BACK):
            shutil.copy(self._older, self._dump)
            self._restart_redis()

    def _save(self) -> None:
        with Redis.from_url(self._redis.url) as client:
            client.save()

    def _restart_redis(self) -> None:
        self._redis.kill()
        self._stage.pause(AWAY)
        self._redis.start()

    def _is_over(self) -> bool:
        """Return whether all has run that has to, and each chain with an end has ended."""
        ended = {each.name for each in self._plans if not each.is_open}
        schedules = self._author.schedules(SOUND).all()
        return ended.isdisjoint(each.name for each in schedules) and not self._found().missing()

    def _complain_of_chains(self) -> None:
        """Complain of chains that have not ended, and of those that stand still; delete these."""
        now, schedules = datetime.now(UTC), self._author.schedules(SOUND)
        known, margin = {each.name: each for each in schedules.all()}, timedelta(seconds=10)
        for plan in self._plans:
            found = known.get(plan.name)
            if not plan.is_open:
                if found is not None:
                    self._complain(f"{plan.name} has not ended: {found.next_id}")
            elif found is None or found.next_at < now - margin:
                self._complain(f"{plan.name} stands still: {found and found.next_id}")
            elif found.next_at > now + timedelta(seconds=plan.seconds):
                self._complain(f"{plan.name} leaves instants out: {found.next_id}")
        for name in known:
            schedules.delete(name)
        self._stage.pause(REST)  # what was decided before has begun
        deleted_ms = now_ms()
        self._stage.pause(REST)
        late = [each.id for each in self._starts() if each.at_ms > deleted_ms]
        if late:
            self._complain(f"{len(late)} ran after they were deleted: {late[:5]}")

    def _complain(self, what: str) -> None:
        self._stage.complaints.append(what)

    def _starts(self) -> list[Start]:
        return [each for some in self._stage.ledger().starts.values() for each in some]

    def _found(self) -> Instants:
        troubles = self._stage.ledger().troubles
        return Instants(
            *(self._plans, self._author.edits, self._starts(), troubles),
            *(self._shift_ms, self._end_ms),
        )

    def _judge(self) -> None:
        """Say what was found, and note what ran as sent tasks, for the table."""
        instants = self._found()
        found = instants.judge()
        drift_ms = now_ms() - time.time() * 1000 - self._shift_ms
        puts = f"{len(self._author.edits)} puts returned, others raised: {self._author.raised}"
        for line in (*found.lines(), puts, f"drift of the clock: {drift_ms:.1f} ms"):
            self._stage.say(line)
        self._stage.complaints += found.complaints
        notes = Notes(self._stage.part().folder)
        for plan in self._plans:
            for instant, starts in instants.runs[plan.name].items():
                due_ms = instant + self._shift_ms
                for identity in {each.id for each in starts}:
                    sent = Sent(identity, plan.group, (plan.queue,), due_ms, due_ms)
                    notes.begin(sent)
                    notes.end(identity, "confirmed")
        self._look_into_logs()

    def _look_into_logs(self) -> None:
        """Keep the logs and notes, and complain of tasks that a worker did not know."""
        folder = RESULTS / "schedules"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self._stage.part().folder, folder)
        said = {"edits": self._author.edits, "shift_ms": self._shift_ms}
        troubles = [asdict(each) for each in self._stage.ledger().troubles]
        (folder / "played.json").write_text(json.dumps({**said, "troubles": troubles}))
        for worker in chain(self._former, *self._workers.values()):
            log = worker.log
            (folder / f"{worker.port}.log").write_text(log)
            if "Received unregistered task" in log:
                self._complain(f"the worker {worker.port} got a task of another application")
