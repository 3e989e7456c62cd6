"""What a ledger says: what is lost, early, twice or late. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from statistics import quantiles
from typing import Final, NamedTuple

from tests.chaos.ledger import Ledger, Sent, Start, Trouble, Whereabouts

#: Milliseconds by which a start may precede its due time: the broker and the producer count whole
#: milliseconds, and each rounds once.
RESOLUTION_MS: Final = 1.0

#: Milliseconds before a trouble, or after it, in which a copy is put down to it: the longest round
#: in which the broker's dead-letter worker publishes again what was not confirmed is 180 s.
AROUND_MS: Final = 200_000.0


class Lateness(NamedTuple):
    """How late the tasks of a group started, at the first start of each: seconds.

    Attributes:
        tasks: How many there are.
        p50: Half of them were no later.
        p99: 99 of 100 were no later.
        max: None was later.
    """

    tasks: int
    p50: float
    p99: float
    max: float

    @classmethod
    def of(cls, late_ms: list[float]) -> Lateness:
        """Return the figures of at least one task, in milliseconds."""
        seconds = [each / 1000 for each in late_ms]
        if len(seconds) == 1:
            return cls(1, *seconds * 3)
        cuts = quantiles(seconds, n=100, method="inclusive")
        return cls(len(seconds), cuts[49], cuts[98], max(seconds))


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
    whereabouts: Whereabouts,
    limits: Mapping[str, float] | None = None,
    tolerated_early: float = 0.0,
) -> Verdict:
    """Return the verdict on a ledger.

    Args:
        ledger: What was noted.
        whereabouts: Where messages were found at the end.
        limits: By group, the seconds that no task of it may be late.
        tolerated_early: Seconds that a task may be early without complaint.
    """
    verdict = Verdict(sent=Counter(each.outcome for each in ledger.sent.values()))
    _judge_errors(ledger, verdict)
    _judge_missing(ledger, whereabouts, verdict)
    _judge_early(ledger, verdict, tolerated_early)
    _judge_copies(ledger, whereabouts, verdict)
    _judge_lateness(ledger, limits or {}, verdict)
    if not verdict.sent:
        verdict.complaints.append("nothing was sent")
    return verdict


def _judge_errors(ledger: Ledger, verdict: Verdict) -> None:
    liars: Counter[str] = Counter()
    for sent in ledger.sent.values():
        if sent.error is None:
            continue
        verdict.errors[sent.error] += 1
        if any((sent.id, place) in ledger.starts for place in sent.places):
            verdict.arrived_nevertheless[sent.error] += 1
            liars[sent.error] += sent.may_have_arrived is False
    for error, times in liars.items():
        if times:
            verdict.complaints.append(f"{times} arrived although {error} said that none can have")


def _judge_missing(ledger: Ledger, whereabouts: Whereabouts, verdict: Verdict) -> None:
    nowhere = []
    for sent in ledger.missing():
        found = whereabouts.queues.get(sent.id)
        if found:
            verdict.where[found[0]] += 1
        else:
            nowhere.append(sent.id)
    # These messages cannot be told apart: as many as are held may be there.
    for holder, held in whereabouts.held.items():
        taken, nowhere = nowhere[:held], nowhere[held:]
        if taken:
            verdict.where[holder] += len(taken)
    verdict.lost = nowhere
    if nowhere:
        verdict.complaints.append(f"{len(nowhere)} lost")
    for queue, times in verdict.where.items():
        verdict.complaints.append(f"{times} not started, in {queue}")


def _judge_early(ledger: Ledger, verdict: Verdict, tolerated: float) -> None:
    for (identity, _), starts in ledger.starts.items():
        sent = ledger.sent.get(identity)
        if sent is None:
            verdict.complaints.append(f"{identity} started, but nobody has sent it")
        elif starts[0].at_ms < sent.due_ms - RESOLUTION_MS:
            seconds = (sent.due_ms - starts[0].at_ms) / 1000
            verdict.early[identity] = max(verdict.early.get(identity, 0.0), seconds)
    most = max(verdict.early.values(), default=0.0)
    if most > tolerated:
        verdict.complaints.append(f"{len(verdict.early)} early, by up to {most:.3f} s")


def _judge_copies(ledger: Ledger, whereabouts: Whereabouts, verdict: Verdict) -> None:
    for identity, queues in whereabouts.queues.items():
        if identity in ledger.sent and ledger.started(ledger.sent[identity]):
            verdict.copies.update(f"started, and in {queue} besides" for queue in queues)
    for sent, first, copy in _copies(ledger):
        verdict.copies[_cause(sent, first, copy, ledger.troubles)] += 1
    if verdict.copies[NO_CAUSE]:
        verdict.complaints.append(f"{verdict.copies[NO_CAUSE]} copies without a cause")


def _copies(ledger: Ledger) -> Iterator[tuple[Sent, Start, Start]]:
    for (identity, _), starts in ledger.starts.items():
        sent = ledger.sent.get(identity)
        if sent is not None:
            for copy in starts[1:]:
                yield sent, starts[0], copy


#: The causes of a copy, the most certain first.
REDELIVERED: Final = "its worker or connection ended before the ack"
RESENT: Final = "sent again by the producer"
RETURNED: Final = "delivered again by the modules"
DISTRIBUTED: Final = "published again by distribution"
DEAD_LETTERED: Final = "dead-lettered again by the broker, around: "
NO_CAUSE: Final = "no cause"


def _cause(sent: Sent, first: Start, copy: Start, troubles: list[Trouble]) -> str:
    """Return the best known cause of a copy."""
    if copy.redelivered:
        return REDELIVERED
    if sent.attempts > 1:
        return RESENT
    if first.marks or copy.marks:
        return RETURNED
    if sent.distributed:
        return DISTRIBUTED
    for trouble in troubles:
        begin, end = trouble.begin_ms - AROUND_MS, trouble.end_ms + AROUND_MS
        if sent.began_ms <= end and copy.at_ms >= begin:
            return DEAD_LETTERED + trouble.what
    return NO_CAUSE


def _judge_lateness(ledger: Ledger, limits: Mapping[str, float], verdict: Verdict) -> None:
    late_ms: dict[str, list[float]] = defaultdict(list)
    for sent in ledger.sent.values():
        keys = ((sent.id, place) for place in sent.places)
        firsts = [ledger.starts[key][0] for key in keys if key in ledger.starts]
        late_ms[sent.group].extend(start.at_ms - sent.due_ms for start in firsts)
    verdict.late = {group: Lateness.of(late) for group, late in late_ms.items() if late}
    for group, limit in limits.items():
        late = verdict.late.get(group)
        if late is None:
            verdict.complaints.append(f"{group}: none has started")
        elif late.max > limit:
            times = sum(each > limit * 1000 for each in late_ms[group])
            verdict.complaints.append(
                f"{group}: {times} of {late.tasks} later than {limit:g} s, up to {late.max:.1f} s"
            )
