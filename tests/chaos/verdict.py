"""What a ledger says: what is lost, early, twice or late. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import quantiles
from typing import Final, NamedTuple

from tests.chaos.ledger import Ledger, Sent, Start, Trouble

#: Milliseconds by which a start may precede its due time: the broker and the producer count whole
#: milliseconds, and each rounds once.
RESOLUTION_MS: Final = 1.0

#: Milliseconds before a trouble, or after it, in which a copy is put down to it: the longest round
#: in which the broker's dead-letter worker publishes again what was not confirmed is 180 s.
AROUND_MS: Final = 200_000.0

#: The causes of a copy.
REDELIVERED: Final = "its worker or connection ended before the ack"
AROUND: Final = "sent, returned or dead-lettered again around: "
NO_CAUSE: Final = "no cause"


class Lateness(NamedTuple):
    """How late the tasks of a group started, at the first start of each: seconds.

    Half of them were no later than ``p50``, 99 of 100 no later than ``p99``.
    """

    tasks: int
    p50: float
    p99: float
    max: float

    @classmethod
    def of(cls, late_ms: Sequence[float]) -> Lateness:
        """Return the figures of at least one task, in milliseconds."""
        cuts = quantiles([*late_ms, *late_ms], n=100, method="inclusive")  # it takes two figures
        return cls(len(late_ms), cuts[49] / 1000, cuts[98] / 1000, max(late_ms) / 1000)


@dataclass
class Verdict:
    """What is to be said about one scenario.

    Attributes:
        sent: How many tasks were sent, by how the call ended.
        errors: How many calls raised, by the error's name.
        arrived_nevertheless: How many of these tasks started, by the error's name.
        lost: The ids of tasks that were confirmed, have not started, and are in no queue.
        early: The ids of tasks that started before they were due, and by how many seconds.
        copies: How many starts there were beyond the first at each place, by cause; and messages
            that are in a queue although their task has started.
        where: How many tasks were confirmed and have not started, by the queue that they are in.
        late: How late the others were, by group.
        complaints: What is wrong, in words. Nothing is wrong if there are none.
    """

    sent: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    arrived_nevertheless: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    early: dict[str, float] = field(default_factory=dict)
    copies: Counter[str] = field(default_factory=Counter)
    where: Counter[str] = field(default_factory=Counter)
    late: dict[str, Lateness] = field(default_factory=dict)
    complaints: list[str] = field(default_factory=list)


def judge(
    ledger: Ledger,
    places: Mapping[str, Sequence[str]] | None = None,
    limits: Mapping[str, float] | None = None,
    tolerated_early: float = 0.0,
) -> Verdict:
    """Return the verdict on a ledger.

    Args:
        ledger: What was noted.
        places: By the id of a task, the queues in which messages were found at the end.
        limits: By group, the seconds that no task of it may be late.
        tolerated_early: Seconds that a task may be early without complaint.
    """
    verdict = Verdict(sent=Counter(each.outcome for each in ledger.sent.values()))
    if not ledger.sent:
        verdict.complaints.append("nothing was sent")
    _judge_errors(ledger, verdict)
    _judge_missing(ledger, places or {}, verdict)
    _judge_early(ledger, verdict, tolerated_early)
    _judge_copies(ledger, places or {}, verdict)
    _judge_lateness(ledger, limits or {}, verdict)
    return verdict


def _judge_errors(ledger: Ledger, verdict: Verdict) -> None:
    liars: Counter[str] = Counter()
    for sent in ledger.sent.values():
        if sent.error is not None:
            has_started = sent.id in ledger.starts
            verdict.errors[sent.error] += 1
            verdict.arrived_nevertheless[sent.error] += has_started
            liars[sent.error] += has_started and sent.may_have_arrived is False
    verdict.complaints += [
        f"{times} arrived although {error} said that none can have"
        for error, times in (+liars).items()
    ]


def _judge_missing(ledger: Ledger, places: Mapping[str, Sequence[str]], verdict: Verdict) -> None:
    for identity in ledger.missing():
        if identity in places:
            verdict.where[places[identity][0]] += 1
        else:
            verdict.lost.append(identity)
    if verdict.lost:
        verdict.complaints.append(f"{len(verdict.lost)} lost")
    for queue, times in verdict.where.items():
        verdict.complaints.append(f"{times} not started, in {queue}")


def _judge_early(ledger: Ledger, verdict: Verdict, tolerated: float) -> None:
    for identity, starts in ledger.starts.items():
        sent = ledger.sent.get(identity)
        if sent is None:
            verdict.complaints.append(f"{identity} started, but nobody has sent it")
        elif starts[0].at_ms < sent.due_ms - RESOLUTION_MS:
            verdict.early[identity] = (sent.due_ms - starts[0].at_ms) / 1000
    most = max(verdict.early.values(), default=0.0)
    if most > tolerated:
        verdict.complaints.append(f"{len(verdict.early)} early, by up to {most:.3f} s")


def _judge_copies(ledger: Ledger, places: Mapping[str, Sequence[str]], verdict: Verdict) -> None:
    for identity, starts in ledger.starts.items():
        queues = places.get(identity, ())
        verdict.copies.update(f"started, and in {queue} besides" for queue in queues)
        if sent := ledger.sent.get(identity):
            verdict.copies.update(_cause(sent, copy, ledger.troubles) for copy in starts[1:])
    if verdict.copies[NO_CAUSE]:
        verdict.complaints.append(f"{verdict.copies[NO_CAUSE]} copies without a cause")


def _cause(sent: Sent, copy: Start, troubles: Sequence[Trouble]) -> str:
    """Return the best known cause of a copy."""
    if copy.redelivered:
        return REDELIVERED
    for trouble in troubles:
        begin_ms, end_ms = trouble.begin_ms - AROUND_MS, trouble.end_ms + AROUND_MS
        if sent.began_ms <= end_ms and copy.at_ms >= begin_ms:
            return AROUND + trouble.what
    return NO_CAUSE


def _judge_lateness(ledger: Ledger, limits: Mapping[str, float], verdict: Verdict) -> None:
    late_ms: dict[str, list[float]] = defaultdict(list)
    for sent in ledger.sent.values():
        if sent.id in ledger.starts:
            late_ms[sent.group].append(ledger.starts[sent.id][0].at_ms - sent.due_ms)
    verdict.late = {group: Lateness.of(late) for group, late in late_ms.items()}
    for group, limit in limits.items():
        late = verdict.late.get(group)
        if late is None:
            verdict.complaints.append(f"{group}: none has started")
        elif late.max > limit:
            times = sum(each > limit * 1000 for each in late_ms[group])
            verdict.complaints.append(
                f"{group}: {times} of {late.tasks} later than {limit:g} s, up to {late.max:.1f} s"
            )
