"""What a scenario is, and what it leaves: a verdict, a row of a table, a file of JSON."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Final

from tests.chaos.application import TaskQueue
from tests.chaos.cluster import Cluster
from tests.chaos.ledger import Whereabouts
from tests.chaos.stage import Stage
from tests.chaos.verdict import Verdict, judge

#: Where the outcomes are written to.
RESULTS: Final = Path(__file__).resolve().parents[2] / "build" / "chaos"

#: The queue of the tasks that have nothing to do with the trouble.
SOUND: Final = "sound"


def choice(*choices: Any, help: str, varied: bool = True) -> Any:  # noqa: A002  # as in argparse
    """Return a field that takes one of these; the first is the default.

    Args:
        *choices: What it takes.
        help: What it means.
        varied: Whether ``make chaos`` plays the scenario with each of them.
    """
    return field(default=choices[0], metadata={"choices": choices, "help": help, "varied": varied})


@dataclass(frozen=True, kw_only=True)
class Scenario(ABC):
    """Something that goes wrong while delayed tasks are on their way.

    A subclass has a docstring whose first line says what happens, ``name``, the defaults of the
    class variables and fields that it changes, fields of its own with :func:`choice`, and
    :meth:`play`. Its module stands in ``tests/chaos/scenarios/__init__.py``.

    Attributes:
        tasks: How many tasks, of those that come in any number.
        minutes: For how long they are sent, if they are sent all along.
    """

    name: ClassVar[str]

    #: How many nodes the cluster has.
    nodes: ClassVar[int] = 1

    #: By group, the seconds that no task may be late.
    limits: ClassVar[Mapping[str, float]] = {}

    #: Seconds that a task may be early, because ``rabbitdelay_early_tolerance`` tolerates that.
    tolerated_early: ClassVar[float] = 0.0

    #: Seconds at the end in which everything has to start.
    patience: ClassVar[float] = 600.0

    #: Settings of Celery, for all processes.
    settings: ClassVar[Mapping[str, Any]] = {}

    tasks: int = 0
    minutes: float = 0.0

    def queues(self) -> Sequence[TaskQueue]:
        """Return the queues of the application; the first is its default."""
        return [TaskQueue(SOUND)]

    def cluster(self, version: str) -> Cluster:
        """Return the brokers, not started."""
        return Cluster(version, self.nodes)

    @abstractmethod
    def play(self, stage: Stage) -> None:
        """Send, make trouble, and end it."""

    def allowed_late(self) -> Mapping[str, float]:
        """Return :attr:`limits`, or others if the choices make tasks late."""
        return self.limits

    def allowed_early(self) -> float:
        """Return :attr:`tolerated_early`, or more if the choices make tasks early."""
        return self.tolerated_early

    @classmethod
    def cases(cls) -> list[Scenario]:
        """Return what ``make chaos`` plays: each choice of each field in turn."""
        cases: list[Scenario] = [cls()]
        for each in fields(cls):
            if each.metadata.get("varied"):
                cases += [cls(**{each.name: word}) for word in each.metadata["choices"][1:]]
        return cases

    def __str__(self) -> str:
        words = [
            str(getattr(self, each.name))
            for each in fields(self)
            if each.metadata
            and (each.metadata["varied"] or getattr(self, each.name) != each.default)
        ]
        return " ".join([self.name, *words])


@dataclass
class Outcome:
    """What a scenario came to.

    Attributes:
        title: The scenario with its choices.
        version: The version that RabbitMQ reported.
        verdict: The verdict.
        whereabouts: What was found at the end.
        ended: How often processes ended by themselves, by kind and last words.
    """

    title: str
    version: str
    verdict: Verdict
    whereabouts: Whereabouts = field(default_factory=Whereabouts)
    ended: Mapping[str, int] = field(default_factory=dict)

    HEADER: ClassVar[str] = (
        "| scenario | RabbitMQ | confirmed | raised (arrived) | lost | early | copies | late "
        "p50/p99/max s | not started, where |\n|---|---|---|---|---|---|---|---|---|"
    )

    def row(self) -> str:
        """Return the row of the table."""
        verdict = self.verdict
        arrived = verdict.arrived_nevertheless
        cells = [
            self.title,
            self.version,
            str(verdict.sent["confirmed"]),
            _listed({f"{name} ({arrived[name]})": n for name, n in verdict.errors.items()}),
            str(len(verdict.lost)),
            _early(verdict),
            _listed(verdict.copies),
            "; ".join(
                f"{group} ({late.tasks}) {late.p50:.2f}/{late.p99:.1f}/{late.max:.1f}"
                for group, late in verdict.late.items()
            ),
            _listed(verdict.where),
        ]
        return f"| {' | '.join(cells)} |"

    def text(self) -> str:
        """Return all of it in lines."""
        lines = [self.row()]
        if unknown := self.verdict.sent["unknown"]:
            lines.append(f"  cut off while they were sent: {unknown}")
        lines += [f"  in undeliverable: {n}: {why}" for why, n in self.whereabouts.reasons.items()]
        lines += [f"  ended by itself, {n} times: {what}" for what, n in self.ended.items()]
        lines += [f"  NOT GOOD: {complaint}" for complaint in self.verdict.complaints]
        return "\n".join(lines)

    def save(self) -> Path:
        """Write it as JSON; return the file."""
        RESULTS.mkdir(parents=True, exist_ok=True)
        words = [*self.title.split(), self.version]
        path = RESULTS / f"{'-'.join(words).replace('/', '-')}.json"
        late = {group: late._asdict() for group, late in self.verdict.late.items()}
        told = {
            "scenario": self.title,
            "rabbitmq": self.version,
            "verdict": {**vars(self.verdict), "late": late},
            "undeliverable": dict(self.whereabouts.reasons),
            "ended": dict(self.ended),
        }
        path.write_text(json.dumps(told, indent=2) + "\n")
        return path


def play(scenario: Scenario, version: str) -> Outcome:
    """Play a scenario on a version of RabbitMQ."""
    cluster = scenario.cluster(version)
    with Stage(cluster, scenario.queues(), scenario.settings) as stage:
        reported = cluster.reported
        scenario.play(stage)
        stage.settle(scenario.patience)
        whereabouts = stage.whereabouts()
        # Last, because the workers have gone on until they were ended.
        ledger = stage.ledger()
    verdict = judge(ledger, whereabouts, scenario.allowed_late(), scenario.allowed_early())
    verdict.complaints += stage.complaints
    return Outcome(str(scenario), reported, verdict, whereabouts, ledger.ended)


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {what}" for what, count in Counter(counts).most_common()) or "0"


def _early(verdict: Verdict) -> str:
    if not verdict.early:
        return "0"
    return f"{len(verdict.early)}, by up to {max(verdict.early.values()):.1f} s"
