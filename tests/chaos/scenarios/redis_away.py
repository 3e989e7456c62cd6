"""The result backend is down for a while: tasks start all the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from celery_rabbitdelay.testing import RedisServer
from tests.chaos.producing import Stream
from tests.chaos.scenario import SOUND, Scenario
from tests.chaos.stage import Stage

#: Seconds that Redis is away.
FOR: Final = 30.0


@dataclass(frozen=True, kw_only=True)
class RedisAway(Scenario):
    """Redis, the result backend, is killed for 30 s while tasks with results come due."""

    name: ClassVar[str] = "redis-away"

    tasks: int = 1200
    minutes: float = 1.0

    def play(self, stage: Stage) -> None:
        with RedisServer() as redis:
            stage.settings |= {"result_backend": redis.url, "task_ignore_result": False}
            worker = stage.worker(SOUND)
            seconds = self.minutes * 60
            stage.send(Stream(SOUND, SOUND, self.tasks, seconds, (0.5, 20.0)))
            stage.pause(seconds / 4)
            with stage.trouble("Redis away"):
                redis.kill()
                stage.pause(FOR)
                redis.start()
            stage.settle(self.patience)
            # Without Redis, it would not end.
            stage.dismiss(worker)
