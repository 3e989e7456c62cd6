"""Schedules whose workers, brokers and registry are in trouble all along."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar, Final

from celery_rabbitdelay.levels.delay import milliseconds_of
from celery_rabbitdelay.testing import RedisServer, wait_for
from tests.chaos.application import TASK, make_app
from tests.chaos.cluster import Cluster
from tests.chaos.ledger import Sent
from tests.chaos.network import NetworkedCluster
from tests.chaos.notes import Notes, now_ms
from tests.chaos.scenario import SOUND, Scenario
from tests.chaos.stage import Stage

#: Seconds until the first occurrences are due: all schedules are put by then.
HEAD_START: Final = 30

#: Seconds that a node, a part of the network or Redis is away.
AWAY: Final = 10.0

#: Seconds between two troubles.
REST: Final = 12.0


@dataclass(frozen=True, kw_only=True)
class Schedules(Scenario):
    """Two hundred schedules, of one second to a minute, while everything is killed in turn (root).

    Workers and nodes are killed, a node is cut off, Redis is frozen, and once it loses everything;
    then the schedules are put again, as an application does when it starts. Each instant of each
    schedule has to run.
    """

    name: ClassVar[str] = "schedules"

    tasks: int = 200
    minutes: float = 20.0

    def cluster(self, version: str) -> Cluster:
        return NetworkedCluster(version, 3)

    def play(self, stage: Stage) -> None:
        with RedisServer() as redis:
            stage.settings |= {
                "rabbitdelay_registry_url": redis.url,
                "rabbitdelay_registry_options": {"socket_timeout": 5},
            }
            app = make_app(stage.part())
            start = datetime.now(UTC) + timedelta(seconds=HEAD_START)
            end = start + timedelta(minutes=self.minutes)
            every = [1 + number % 60 for number in range(self.tasks)]

            def put_all() -> None:
                for number, seconds in enumerate(every):
                    app.rabbitdelay.schedules.put(
                        *(f"s{number}", TASK, timedelta(seconds=seconds)),
                        start=start,
                        end=end,
                        catch_up="all",
                    )

            put_all()
            self._expect(stage, app, start, end, every)
            workers = [stage.worker(SOUND, first_node=number) for number in range(3)]
            troubles = self._troubles(stage, redis)
            deadline = time.monotonic() + (end - datetime.now(UTC)).total_seconds()
            halfway = time.monotonic() + (deadline - time.monotonic()) / 2
            while time.monotonic() < deadline - REST:
                stage.pause(REST)
                with stage.trouble("worker killed"):
                    worker = random.choice(workers)
                    worker.end(signal.SIGKILL)
                    worker.begin()
                if time.monotonic() > halfway:
                    halfway = deadline
                    self._empty(stage, redis, put_all)
                random.choice(troubles)()
            stage.wait_for_cluster()
            stage.settle(self.patience)
            wait_for(lambda: not app.rabbitdelay.schedules.all(), "the ends", 120)
            for worker in workers:
                stage.dismiss(worker)
            app.close()

    def _expect(
        self, stage: Stage, app: Any, start: datetime, end: datetime, every: list[int]
    ) -> None:
        """Note each instant of each schedule as a task that was sent."""
        notes = Notes(stage.part().folder)
        shift_ms = now_ms() - time.time() * 1000
        for number, seconds in enumerate(every):
            _, task_id = app.rabbitdelay.registry.newest_under(f"schedule:s{number}")
            revision = task_id.rpartition(":")[2]
            for instant in range(milliseconds_of(start), milliseconds_of(end) + 1, seconds * 1000):
                identity = f"s{number}:{instant:015d}:{revision}"
                notes.begin(Sent(identity, "occurrences", (SOUND,), instant + shift_ms, now_ms()))
                notes.end(identity, "confirmed")

    def _troubles(self, stage: Stage, redis: RedisServer) -> list[Callable[[], None]]:
        cluster = stage.cluster
        assert isinstance(cluster, NetworkedCluster)

        def crash() -> None:
            node = random.choice(cluster.nodes)
            with stage.trouble("node killed"):
                node.kill()
                stage.pause(AWAY)
                node.start()
                stage.wait_for_cluster()

        def part() -> None:
            with stage.trouble("partition"), cluster.parted([1], [2, 3], clients=1):
                stage.pause(AWAY)
            stage.wait_for_cluster()

        def freeze() -> None:
            with stage.trouble("Redis frozen"):
                redis.suspend()
                stage.pause(AWAY)
                redis.resume()

        return [crash, part, freeze]

    def _empty(self, stage: Stage, redis: RedisServer, put_all: Callable[[], None]) -> None:
        with stage.trouble("Redis killed, and empty"):
            redis.kill()
            stage.pause(AWAY)
            redis.start()
            put_all()
