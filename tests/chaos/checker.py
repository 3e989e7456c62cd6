# ruff: noqa: T201  # a program at the terminal prints
"""The verdict on a ledger: what is lost, early, twice or late, or ran although it must not.

It shares no code with the package: it knows only the ledger, and what the documentation promises.
``python -m tests.chaos.checker FOLDER`` judges the notes in a folder again, and ``--task ID`` tells
all that was noted about one task.
"""

import argparse
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Final, Literal, NamedTuple

from tests.chaos.ledger import Decision, Ledger, Sent, Start, Trouble

#: Milliseconds by which a start may precede its due time: the broker and the producer count whole
#: milliseconds, and each rounds once.
RESOLUTION_MS: Final = 1.0

#: Milliseconds after a trouble in which it explains lateness, or a copy of what is sent then: the
#: longest round in which the broker's dead-letter worker publishes again what was not confirmed.
AFTER_MS: Final = 200_000.0

#: Milliseconds around a send in which the registry may have been away for it.
REGISTRY_MS: Final = 2000.0

#: A start that is later than this, in milliseconds, needs a reason.
LATE_MS: Final = 5000.0

#: How many tasks are named of each kind of wrong.
EXAMPLES: Final = 8

#: The causes of a copy, which the documentation tells: docs/explanation/promises.md, At least once,
#: and What Redis may lose; docs/how-to/keys.md for ``once``.
REDELIVERED: Final = "its worker or connection ended before the ack"
SENT_AGAIN: Final = "its sender ran again"
FORGOTTEN: Final = "the registry has forgotten the first"
FORMER: Final = "workers of the version before"
AROUND: Final = "sent, returned or dead-lettered again around: "
NO_CAUSE: Final = "no cause"

#: The faults that some rules name, and by how many milliseconds a worker's clock is behind.
IN_BETWEEN: Final = "workers of the version before"
BEHIND, BEHIND_MS = "worker's clock behind", 20_000.0

#: The reason of a late start that no trouble explains.
ALONE: Final = "no trouble"


class Expected(NamedTuple):
    """What has to become of a start.

    Attributes:
        ends: Whether it has to start, may, or must not.
        earliest_ms: No start before this instant.
        latest_ms: The instant from which lateness counts.
        why: The decision by which it must not.
    """

    ends: Literal["runs", "may", "not"]
    earliest_ms: float
    latest_ms: float
    why: str = ""


@dataclass
class Verdict:
    """What is to be said about one run.

    Attributes:
        sent: How many tasks were sent, by how the call ended.
        errors: How many calls raised, by the error's name, and how many of these tasks started.
        lost: The ids of tasks that have to start, have not, and are in no queue.
        early: The ids of tasks that started before they were due, and by how many seconds.
        tolerated: How many were early by no more than a policy, or their worker's clock, explains.
        copies: How many starts there were beyond the first, by cause; and messages that are in a
            queue although their task has started.
        no_cause: The ids of the copies without a cause.
        after_decision: The ids that started although a decision had ended it, and which.
        where: How many tasks have to start and have not, by the queue that they are in.
        late: By group, the seconds by which each task was late, in order.
        reasons: Of those that were later than five seconds: how many, and how late the latest.
        complaints: What is wrong, in words. Nothing is wrong if there are none.
        examples: The first tasks of each kind of wrong.
    """

    sent: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    early: dict[str, float] = field(default_factory=dict)
    tolerated: int = 0
    copies: Counter[str] = field(default_factory=Counter)
    no_cause: list[str] = field(default_factory=list)
    after_decision: dict[str, str] = field(default_factory=dict)
    where: Counter[str] = field(default_factory=Counter)
    late: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    reasons: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    complaints: list[str] = field(default_factory=list)
    examples: list[str] = field(default_factory=list)


def judge(
    ledger: Ledger, limits: Mapping[str, float] | None = None, tolerated_early: float = 0.0
) -> Verdict:
    """Return the verdict on a ledger.

    Args:
        ledger: What was noted.
        limits: By group, the seconds that no task of it may be late.
        tolerated_early: Seconds that a task may be early without complaint.
    """
    verdict = Verdict(sent=Counter(each.outcome for each in ledger.sent.values()))
    liars: Counter[str] = Counter()
    for sent in ledger.sent.values():
        starts = ledger.starts.get(sent.id, [])
        if sent.error is not None:
            verdict.errors[sent.error] += 1
            verdict.errors[f"{sent.error} (arrived)"] += bool(starts)
            liars[sent.error] += bool(starts) and sent.may_have_arrived is False
        _judge_one(verdict, ledger, sent, starts, tolerated_early * 1000)
    for late in (*verdict.late.values(), *verdict.reasons.values()):
        late.sort()
    most, complaints = max(verdict.early.values(), default=0.0), verdict.complaints
    groups = Counter(ledger.sent[each].group for each in verdict.lost)
    lost = ", ".join(f"{n} {group}" for group, n in groups.items())
    wrong = {
        "nothing was sent": not ledger.sent,
        f"{len(verdict.lost)} lost ({lost})": verdict.lost,
        f"{len(verdict.early)} early, by up to {most:.3f} s": verdict.early,
        f"{len(verdict.no_cause)} copies without a cause": verdict.no_cause,
        f"{len(verdict.after_decision)} ran although a decision had ended them": (
            verdict.after_decision
        ),
    }
    complaints += [what for what, is_so in wrong.items() if is_so]
    complaints += [f"{n} not started, in {queue}" for queue, n in verdict.where.items()]
    complaints += [
        f"{n} arrived although {each} said that none can have" for each, n in liars.items() if n
    ]
    found = {"lost": verdict.lost, "early": [*verdict.early], "copy": verdict.no_cause}
    for each, why in verdict.after_decision.items():
        found.setdefault(f"ran after {why}", []).append(each)
    verdict.examples = [
        f"{each}: {ledger.sent[each].group}, {what}"
        for what, ids in found.items()
        for each in ids[:EXAMPLES]
    ]
    strangers = ledger.starts.keys() - ledger.sent.keys()
    complaints += [f"{each} started, but nobody has sent it" for each in sorted(strangers)]
    for group, limit in (limits or {}).items():
        late = verdict.late.get(group, [])
        times = sum(each > limit for each in late)
        if not late:
            complaints.append(f"{group}: none has started")
        elif times:
            how_late = f"later than {limit:g} s, up to {late[-1]:.1f} s"
            complaints.append(f"{group}: {times} of {len(late)} {how_late}")
    return verdict


def missing(ledger: Ledger) -> list[str]:
    """Return what has to start and has not, up to now."""
    return [
        sent.id
        for sent in ledger.sent.values()
        if sent.id not in ledger.starts and expected(ledger, sent).ends == "runs"
    ]


def _judge_one(
    verdict: Verdict, ledger: Ledger, sent: Sent, starts: list[Start], tolerated_ms: float
) -> None:
    """Add what is to be said about one task."""
    found, awaited = ledger.places.get(sent.id.partition("@")[0], ()), expected(ledger, sent)
    if starts and awaited.ends == "not":
        verdict.after_decision[sent.id] = awaited.why
    elif starts:
        first = starts[0]
        late = (first.at_ms - awaited.latest_ms) / 1000
        verdict.late[sent.group].append(late)
        if late > LATE_MS / 1000:
            verdict.reasons[_reason(ledger, awaited.latest_ms, first.at_ms)].append(late)
        early_ms = awaited.earliest_ms - first.at_ms
        if early_ms > max(tolerated_ms, _tolerated_ms(ledger, sent, first), RESOLUTION_MS):
            verdict.early[sent.id] = early_ms / 1000
        elif early_ms > RESOLUTION_MS:
            verdict.tolerated += 1
        causes = [_cause(ledger, sent, first, copy) for copy in starts[1:]]
        verdict.copies.update(causes)
        verdict.no_cause += [sent.id] * causes.count(NO_CAUSE)
        verdict.copies.update(f"started, and in {queue} besides" for queue in found)
    elif awaited.ends == "runs" and found:
        verdict.where[found[0]] += 1
    elif awaited.ends == "runs":
        verdict.lost.append(sent.id)


def expected(ledger: Ledger, sent: Sent) -> Expected:
    """Return what has to become of a task, by everything that was decided about it."""
    awaited = Expected("runs" if sent.outcome == "confirmed" else "may", sent.due_ms, sent.due_ms)
    if sent.after:
        before = [ledger.starts[each][0].at_ms for each in sent.after if each in ledger.starts]
        due_ms = max(before, default=0.0) + sent.after_ms
        if len(before) < len(sent.after):  # it must not start before all of them have
            return Expected("may", inf, inf)
        refusals = (each for each in ledger.troubles if each.refuses)
        if any(each.begin_ms <= due_ms and max(before) <= each.end_ms for each in refusals):
            awaited = awaited._replace(ends="may")
        awaited = awaited._replace(earliest_ms=due_ms, latest_ms=due_ms)
    for made in ledger.decisions.get(sent.id.partition("/")[0], ()):
        awaited = _decided(ledger, awaited, made)
    if sent.job is not None:
        awaited = _in_job(ledger, awaited, ledger.decisions.get(sent.job, []))
    if sent.key is not None:
        awaited = _under_key(ledger, awaited, sent)
    return awaited


def _decided(ledger: Ledger, before: Expected, made: Decision) -> Expected:
    """Return what is expected after a cancellation or a postponement."""
    is_done = made.outcome == "DONE" and not _is_forgotten(ledger, made)
    if made.what == "cancel":
        return before._replace(ends="not" if is_done else "may", why="cancel: DONE")
    due_ms = made.due_ms or 0.0
    if is_done:
        return before._replace(earliest_ms=due_ms, latest_ms=due_ms)
    if made.outcome in ("RELEASED", "CANCELLED"):
        return before
    return before._replace(
        earliest_ms=min(before.earliest_ms, due_ms), latest_ms=max(before.latest_ms, due_ms)
    )


def _in_job(ledger: Ledger, before: Expected, calls: list[Decision]) -> Expected:
    """Return what is expected of a task that waits for a job.

    If the registry has forgotten an abort, the job expires; a commit, it is committed again later,
    unless queues refused its copy. If it has forgotten the job, its tasks run.
    """
    ended = [each for each in calls if each.what != "open"]
    known_ms = max((each.ended_ms or 0.0 for each in ended), default=0.0)
    now = before._replace(latest_ms=max(before.latest_ms, known_ms))
    is_unknown = any(_is_forgotten(ledger, each) for each in calls if each.what == "open")
    if not is_unknown and ended:
        now = now._replace(earliest_ms=max(before.earliest_ms, ended[0].began_ms))
    if commits := [each for each in ended if each.what == "commit" and each.outcome == "DONE"]:
        has_copy = any(
            not _is_forgotten(ledger, each) or not _was_refused(ledger, each) for each in commits
        )
        return now if has_copy else now._replace(ends="may")
    if is_unknown:
        return now._replace(ends="may")
    if not ended:
        return now._replace(ends="not", why="its job was never committed")
    if any(each.what == "abort" and each.outcome == "DONE" for each in ended):
        return now._replace(ends="not", why="abort: DONE")
    return now._replace(ends="may")


def _was_refused(ledger: Ledger, made: Decision) -> bool:
    """Return whether queues refused messages during a call."""
    return any(
        each.refuses and each.begin_ms <= (made.ended_ms or inf) and made.began_ms <= each.end_ms
        for each in ledger.troubles
    )


def _under_key(ledger: Ledger, before: Expected, sent: Sent) -> Expected:
    """Return what is expected of a task whose key may have been taken by a newer one."""
    for newer in ledger.keyed[sent.key or ""]:
        if newer.began_ms <= sent.began_ms or newer.may_have_arrived is False:
            continue
        ended_ms = newer.ended_ms or inf
        is_sure = (
            newer.outcome == "confirmed"
            and before.earliest_ms > ended_ms
            and not any(
                each.begin_ms < ended_ms + REGISTRY_MS and newer.began_ms < each.end_ms
                for each in ledger.troubles
                if each.registry
            )
            and not _forgot(ledger, sent.began_ms, inf)
        )
        if is_sure:
            return before._replace(ends="not", why="a newer task has its key")
        before = before._replace(ends="may")
    return before


def _forgot(ledger: Ledger, from_ms: float, to_ms: float) -> bool:
    """Return whether the registry has forgotten what it was told in a time."""
    return any(
        each.forgets_ms is not None and from_ms <= each.end_ms and to_ms >= each.forgets_ms
        for each in ledger.troubles
    )


def _is_forgotten(ledger: Ledger, made: Decision) -> bool:
    """Return whether the registry has forgotten a decision, or a start before it."""
    before = [each.at_ms for each in ledger.starts.get(made.of, ()) if each.at_ms < made.began_ms]
    since_ms = min([made.began_ms, *before])
    return _forgot(ledger, since_ms, made.ended_ms or inf)


def _tolerated_ms(ledger: Ledger, sent: Sent, start: Start) -> float:
    """Return by how much a start may be early because of a trouble, or of its worker's clock."""
    around = [each for each in ledger.troubles if _is_around(each, sent, start)]
    early_ms = max((each.early_ms for each in around), default=0.0) + max(start.ahead_ms, 0.0)
    # The clock of the worker that serves check-in decides when a client's message is due.
    is_behind = any(
        each.what == BEHIND and each.begin_ms <= sent.began_ms + AFTER_MS for each in around
    )
    return early_ms + (BEHIND_MS if sent.group == "check-in" and is_behind else 0.0)


def _is_around(trouble: Trouble, sent: Sent, start: Start) -> bool:
    """Return whether a task was on its way during a trouble, or while it had its effects."""
    return sent.began_ms <= trouble.end_ms + AFTER_MS and start.at_ms >= trouble.begin_ms


def _cause(ledger: Ledger, sent: Sent, first: Start, copy: Start) -> str:
    """Return the best known cause of a copy."""
    if copy.redelivered:
        return REDELIVERED
    is_registered = sent.once or sent.key or sent.job or sent.id in ledger.decisions
    if is_registered and _forgot(ledger, first.at_ms, copy.at_ms):
        return FORGOTTEN
    if sent.once:
        has_former = first.former or copy.former
        for trouble in ledger.troubles:
            has_former |= trouble.what == IN_BETWEEN and _is_around(trouble, sent, copy)
        return FORMER if has_former else NO_CAUSE
    if sent.times > 1:
        return SENT_AGAIN
    for trouble in reversed(ledger.troubles):
        if trouble.copies and _is_around(trouble, sent, copy):
            return AROUND + trouble.what
    return NO_CAUSE


def _reason(ledger: Ledger, due_ms: float, at_ms: float) -> str:
    """Return the trouble that explains a late start best: the last before it was due, or the next.

    A trouble of seconds has effects for minutes: see :data:`AFTER_MS`.
    """
    begun = [each for each in ledger.troubles if each.begin_ms <= at_ms]
    before = [each for each in begun if each.begin_ms <= due_ms <= each.end_ms + AFTER_MS]
    after = [each for each in begun if each.begin_ms > due_ms]
    if not before and not after:
        return ALONE
    last = max(before, key=lambda each: each.begin_ms, default=None)
    return (last or min(after, key=lambda each: each.begin_ms)).what


def lines_of(verdict: Verdict) -> Iterator[str]:
    """Yield the verdict in lines."""
    figures = {what: str(n) for what, n in verdict.sent.items()}
    for what, counts in {
        "raised": verdict.errors,
        "copies": verdict.copies,
        "not started, where": verdict.where,
    }.items():
        figures[what] = ", ".join(f"{n} {each}" for each, n in counts.items() if n)
    figures["early, tolerated"] = str(verdict.tolerated or "")
    for group, late in verdict.late.items():
        p50, p99 = (late[len(late) * part // 100] for part in (50, 99))
        figures[f"{group}, late"] = f"{p50:.2f}/{p99:.1f}/{late[-1]:.1f} s, {len(late)} tasks"
    for what, late in verdict.reasons.items():
        figures[f"later than 5 s, {what}"] = f"{len(late)} tasks, up to {late[-1]:.1f} s"
    yield from (f"{what}: {figure}" for what, figure in figures.items() if figure)
    yield from (f"NOT GOOD: {each}" for each in verdict.complaints)
    yield from (f"    {each}" for each in verdict.examples)


def story_of(ledger: Ledger, identity: str) -> list[str]:
    """Return all that was noted about a task, in its order."""
    told = [(at.at_ms, f"starts: {at}") for at in ledger.starts.get(identity, [])]
    sent = ledger.sent.get(identity)
    if sent is not None:
        told.append((sent.began_ms, f"sent: {sent}"))
        told.append((sent.due_ms, f"due; {expected(ledger, sent)}"))
    of = {identity, identity.partition("/")[0], sent.job if sent else None}
    told += [
        (made.began_ms, str(made)) for each in of for made in ledger.decisions.get(each or "", ())
    ]
    told += [
        (other.began_ms, f"under its key: {other}")
        for other in ledger.keyed.get((sent and sent.key) or "", ())
    ]
    if told:
        begin_ms, end_ms = min(told)[0], max(told)[0]
        told += [
            (each.begin_ms, str(each))
            for each in ledger.troubles
            if each.end_ms + AFTER_MS > begin_ms and each.begin_ms < end_ms
        ]
    return [f"{at_ms / 1000:12.3f} {what}" for at_ms, what in sorted(told)]


def main() -> int:
    """Judge the notes in a folder; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.checker", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--task", help="tell all that was noted about one task")
    given = parser.parse_args()
    ledger = Ledger()
    ledger.read(given.folder)
    if given.task:
        print(*story_of(ledger, given.task), sep="\n")
        return 0
    verdict = judge(ledger)
    print(*lines_of(verdict), sep="\n")
    return int(bool(verdict.complaints))


if __name__ == "__main__":
    sys.exit(main())
