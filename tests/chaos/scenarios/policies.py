"""A policy matches every queue, those of the levels as well."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from tests.chaos.application import PREFIX
from tests.chaos.producing import Stream
from tests.chaos.scenario import SOUND, Scenario, choice
from tests.chaos.stage import Stage

POLICIES: Final[Mapping[str, Mapping[str, Any]]] = {
    "message-ttl": {"message-ttl": 2000},
    "max-length": {"max-length": 10},
    "expires": {"expires": 5000},
}

#: The policy for the levels in docs/how-to/broker_settings.md, which leaves no room for another.
GUARD: Final = ("--priority", "1000", "guard", rf"^{PREFIX}\.", '{"overflow": "reject-publish"}')

#: Seconds that the policy stays.
FOR: Final = 40.0

#: Seconds; the shortest and the longest delay.
DELAYS: Final = (5.0, 75.0)


@dataclass(frozen=True, kw_only=True)
class Policies(Scenario):
    """A policy on ``.*`` shortens TTLs, bounds queues or deletes those without consumers, for 40 s.

    ``sound`` are tasks that are sent while the policy is there, ``after`` those that are sent when
    it is gone.
    """

    name: ClassVar[str] = "policies"
    limits: ClassVar[Mapping[str, float]] = {"after": 2.0}
    #: The default of ``rabbitdelay_early_tolerance``.
    tolerated_early: ClassVar[float] = 1.0
    patience: ClassVar[float] = 240.0

    tasks: int = 120
    policy: str = choice(*POLICIES, help="what the policy says")

    def prepare(self, stage: Stage) -> None:
        """Called before anything is declared or sent."""

    def play(self, stage: Stage) -> None:
        ctl = stage.cluster.running.ctl
        self.prepare(stage)
        stage.worker(SOUND)
        definition = json.dumps(POLICIES[self.policy])
        with stage.trouble(f"policy {definition}"):
            ctl("set_policy", "chaos", ".*", definition, "--apply-to", "queues")
            stage.send(Stream(SOUND, SOUND, self.tasks, delays=DELAYS), wait=True)
            stage.pause(FOR)
            ctl("clear_policy", "chaos")
        stage.send(Stream("after", SOUND, 20, delays=(3.0, 6.0)), wait=True)


@dataclass(frozen=True, kw_only=True)
class GuardedPolicies(Policies):
    """The same, but a policy of a higher priority keeps it away from the levels: nobody notices."""

    name: ClassVar[str] = "policies-guarded"
    limits: ClassVar[Mapping[str, float]] = {SOUND: 2.0, "after": 2.0}
    tolerated_early: ClassVar[float] = 0.0

    def prepare(self, stage: Stage) -> None:
        stage.cluster.running.ctl("set_policy", *GUARD, "--apply-to", "queues")
