"""What was sent and what was started: the values that a verdict is told from. Pure.

All instants are milliseconds of the machine's monotonic clock, which all processes share and which
no change of the time of day touches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

#: ``confirmed``: the call returned. ``raised``: it raised. ``unknown``: its process was killed.
Outcome: TypeAlias = Literal["confirmed", "raised", "unknown"]


@dataclass(frozen=True)
class Sent:
    """One task, or one message of kombu, that a producer has sent.

    Attributes:
        id: The id of the task.
        group: Which lateness it belongs to; a scenario names its groups.
        places: The queues at which it has to arrive.
        due_ms: The call plus the delay. A start before that is early.
        began_ms: When the call began.
        outcome: How the call ended.
        error: The name of the error's class, if it raised.
        may_have_arrived: What the error says about that; None if it does not say.
        attempts: How often its address was asked for: once, and once more for each resend. 0 if
            nobody counted.
        distributed: Whether a worker's distribution publishes it to its queue.
    """

    id: str
    group: str
    places: tuple[str, ...]
    due_ms: float
    began_ms: float
    outcome: Outcome = "unknown"
    error: str | None = None
    may_have_arrived: bool | None = None
    attempts: int = 0
    distributed: bool = False


@dataclass(frozen=True)
class Start:
    """One start of a task, or one message that arrived.

    Attributes:
        id: The id of the task.
        place: The queue that it came from.
        at_ms: When.
        redelivered: Whether the broker said that it had delivered this message before.
        marks: Headers of this package that say what happened to the message on the way, for
            example how often it was delivered again.
        args: The arguments of the task.
        taken_from: The queue that its worker consumes from.
    """

    id: str
    place: str
    at_ms: float
    redelivered: bool = False
    marks: Mapping[str, Any] = field(default_factory=dict)
    args: tuple[Any, ...] = ()
    taken_from: str = ""


@dataclass(frozen=True)
class Trouble:
    """What a scenario did, and from when to when.

    Attributes:
        what: In words.
        begin_ms: When it began.
        end_ms: When it ended.
    """

    what: str
    begin_ms: float
    end_ms: float


@dataclass(frozen=True)
class Whereabouts:
    """Where messages are at the end.

    Attributes:
        queues: By the id of a task, the queues in which it was found.
        held: How many messages the broker holds and does not show, by who holds them: the
            dead-letter worker of a queue, which they have left without arriving in the next one; or
            a consumer that has not acknowledged them, although no worker runs any more.
        reasons: By what the modules and the broker say about the messages in ``undeliverable``, how
            many there are.
    """

    queues: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    held: Mapping[str, int] = field(default_factory=dict)
    reasons: Mapping[str, int] = field(default_factory=dict)


@dataclass
class Ledger:
    """Everything that was noted, in one place.

    Attributes:
        sent: What was sent, by id.
        starts: What was started, by id and place, in the order of the instants.
        troubles: What was done meanwhile.
        ended: How often processes ended by themselves and were started again, by what they are.
    """

    sent: dict[str, Sent] = field(default_factory=dict)
    starts: dict[tuple[str, str], list[Start]] = field(default_factory=lambda: defaultdict(list))
    troubles: list[Trouble] = field(default_factory=list)
    ended: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, sent: Iterable[Sent], starts: Iterable[Start]) -> Ledger:
        """Return a ledger of these."""
        ledger = cls(sent={each.id: each for each in sent})
        for start in sorted(starts, key=lambda each: each.at_ms):
            ledger.starts[start.id, start.place].append(start)
        return ledger

    def started(self, sent: Sent) -> bool:
        """Return whether it has started at each of its places."""
        return all((sent.id, place) in self.starts for place in sent.places)

    def missing(self) -> list[Sent]:
        """Return what was confirmed and has not started at each of its places."""
        return [
            each
            for each in self.sent.values()
            if each.outcome == "confirmed" and not self.started(each)
        ]
