"""The registry does not answer for a while, and tasks come due all the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from celery_rabbitdelay.testing import RedisServer
from tests.chaos.producing import Stream
from tests.chaos.scenario import SOUND, Scenario, choice
from tests.chaos.stage import Stage

#: Seconds for which Redis does not answer.
FOR: Final = 20.0

#: The group of tasks without a delay, which nobody asks the registry about.
AT_ONCE: Final = "at-once"


@dataclass(frozen=True, kw_only=True)
class RegistryAway(Scenario):
    """The Redis of the registry is frozen, or killed and back without its data, for 20 s."""

    name: ClassVar[str] = "registry-away"

    #: The levels hold a task for at most a minute longer than Redis was away.
    limits: ClassVar = {AT_ONCE: 2.0}

    tasks: int = 30_000
    minutes: float = 1.0
    how: str = choice("frozen", "killed", help="what happens to Redis")
    prefetch: int = 64

    def play(self, stage: Stage) -> None:
        with RedisServer() as redis:
            stage.settings |= {"rabbitdelay_registry_url": redis.url}
            worker = stage.worker(SOUND, options=("--prefetch-multiplier", str(self.prefetch)))
            seconds = self.minutes * 60
            stage.send(Stream("held", SOUND, self.tasks, seconds, (0.5, 20.0), "rows"))
            stage.send(Stream(AT_ONCE, SOUND, self.tasks // 50, seconds, (0.0, 0.0)))
            stage.pause(seconds / 3)
            with stage.trouble(f"registry {self.how}"):
                redis.suspend() if self.how == "frozen" else redis.kill()
                stage.pause(FOR)
                redis.resume() if self.how == "frozen" else redis.start()
            stage.settle(self.patience)
            stage.dismiss(worker)
