"""What was sent and what was started, the files in which processes note it, and the verdict.

All instants are milliseconds of the machine's monotonic clock, which all processes share and which
no change of the time of day touches. Every process has a file of its own and writes each line with
one system call, so that a process that is killed leaves whole lines. A send is noted before it
begins and when it has ended: one that only began was cut off by a kill.
"""

import json
import os
import time
from bisect import insort
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

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


def now_ms() -> float:
    """Return the machine's monotonic clock in milliseconds."""
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC) / 1_000_000


@dataclass(frozen=True)
class Sent:
    """One task that a producer has sent, or one occurrence of a schedule.

    Attributes:
        id: The id of the task.
        group: Which lateness it belongs to; a scenario names its groups.
        due_ms: The call plus the delay. A start before that is early.
        began_ms: When the call began.
        outcome: ``confirmed``: the call returned. ``raised``: it raised. ``unknown``: its process
            was killed, or the occurrence may be left out.
        error: The name of the error's class, if it raised.
        may_have_arrived: What the error says about that; None if it does not say.
    """

    id: str
    group: str
    due_ms: float
    began_ms: float
    outcome: Literal["confirmed", "raised", "unknown"] = "unknown"
    error: str | None = None
    may_have_arrived: bool | None = None


@dataclass(frozen=True)
class Start:
    """One start of a task: its id, when, and whether its message had been delivered before."""

    id: str
    at_ms: float
    redelivered: bool = False


@dataclass(frozen=True)
class Trouble:
    """What a scenario did, and from when to when."""

    what: str
    begin_ms: float
    end_ms: float


@dataclass
class Ledger:
    """Everything that was noted: by id, what was sent, and its starts in their order."""

    sent: dict[str, Sent] = field(default_factory=dict)
    starts: dict[str, list[Start]] = field(default_factory=lambda: defaultdict(list))
    troubles: list[Trouble] = field(default_factory=list)
    _read: dict[Path, int] = field(default_factory=lambda: defaultdict(int))

    def read(self, folder: Path) -> None:
        """Add what was noted in a folder since it was read last."""
        for path in sorted(folder.glob("*.notes")):
            with path.open("rb") as file:
                file.seek(self._read[path])
                for line in file:
                    if not line.endswith(b"\n"):
                        break  # it is half written at this moment
                    self._read[path] += len(line)
                    self.add(*json.loads(line))

    def add(self, kind: str, note: Mapping[str, Any]) -> None:
        """Add a send that began, how one has ended, or a start."""
        if kind == "start":
            insort(self.starts[note["id"]], Start(**note), key=lambda each: each.at_ms)
        else:
            known = self.sent.get(note["id"])
            self.sent[note["id"]] = replace(known, **note) if known else Sent(**note)

    def missing(self) -> list[str]:
        """Return what was confirmed and has not started."""
        confirmed = (each.id for each in self.sent.values() if each.outcome == "confirmed")
        return [identity for identity in confirmed if identity not in self.starts]


class Notes:
    """The file of this process, in the folder of all of them."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._process = 0
        self._file = -1

    def begin(self, sent: Sent) -> None:
        """Note that a send begins."""
        self._write("sent", asdict(sent))

    def end(self, identity: str, error: BaseException | None = None) -> None:
        """Note how a send has ended."""
        told: dict[str, Any] = {"id": identity, "outcome": "raised" if error else "confirmed"}
        if error is not None:
            told["error"] = type(error).__name__
            told["may_have_arrived"] = getattr(error, "may_have_arrived", None)
        self._write("sent", told)

    def start(self, start: Start) -> None:
        """Note that a task starts."""
        self._write("start", asdict(start))

    def _write(self, kind: str, note: Mapping[str, Any]) -> None:
        if self._process != os.getpid():  # a child of Celery's pool has its own
            self._process = os.getpid()
            path = self._folder / f"{self._process}-{time.monotonic_ns()}.notes"
            self._file = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        os.write(self._file, (json.dumps([kind, note]) + "\n").encode())


@dataclass
class Verdict:
    """What is to be said about one scenario.

    Attributes:
        sent: How many tasks were sent, by how the call ended.
        errors: How many calls raised, by the error's name, and how many of these tasks started.
        lost: The ids of tasks that were confirmed, have not started, and are in no queue.
        early: The ids of tasks that started before they were due, and by how many seconds.
        copies: How many starts there were beyond the first, by cause; and messages that are in a
            queue although their task has started.
        where: How many tasks were confirmed and have not started, by the queue that they are in.
        late: By group, the seconds by which each task was late, in order.
        complaints: What is wrong, in words. Nothing is wrong if there are none.
    """

    sent: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    early: dict[str, float] = field(default_factory=dict)
    copies: Counter[str] = field(default_factory=Counter)
    where: Counter[str] = field(default_factory=Counter)
    late: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
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
    liars: Counter[str] = Counter()
    for sent in ledger.sent.values():
        starts, found = ledger.starts.get(sent.id, []), (places or {}).get(sent.id, ())
        if sent.error is not None:
            verdict.errors[sent.error] += 1
            verdict.errors[f"{sent.error} (arrived)"] += bool(starts)
            liars[sent.error] += bool(starts) and sent.may_have_arrived is False
        if starts:
            verdict.late[sent.group].append((starts[0].at_ms - sent.due_ms) / 1000)
            if starts[0].at_ms < sent.due_ms - RESOLUTION_MS:
                verdict.early[sent.id] = (sent.due_ms - starts[0].at_ms) / 1000
            verdict.copies.update(_cause(sent, copy, ledger.troubles) for copy in starts[1:])
            verdict.copies.update(f"started, and in {queue} besides" for queue in found)
        elif sent.outcome == "confirmed" and found:
            verdict.where[found[0]] += 1
        elif sent.outcome == "confirmed":
            verdict.lost.append(sent.id)
    for late in verdict.late.values():
        late.sort()
    most, complaints = max(verdict.early.values(), default=0.0), verdict.complaints
    wrong = {
        "nothing was sent": not ledger.sent,
        f"{len(verdict.lost)} lost": verdict.lost,
        f"{len(verdict.early)} early, by up to {most:.3f} s": most > tolerated_early,
        f"{verdict.copies[NO_CAUSE]} copies without a cause": verdict.copies[NO_CAUSE],
    }
    complaints += [what for what, is_so in wrong.items() if is_so]
    complaints += [f"{n} not started, in {queue}" for queue, n in verdict.where.items()]
    complaints += [
        f"{n} arrived although {each} said that none can have" for each, n in liars.items() if n
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


def _cause(sent: Sent, copy: Start, troubles: Sequence[Trouble]) -> str:
    """Return the best known cause of a copy."""
    if copy.redelivered:
        return REDELIVERED
    for trouble in troubles:
        begin_ms, end_ms = trouble.begin_ms - AROUND_MS, trouble.end_ms + AROUND_MS
        if sent.began_ms <= end_ms and copy.at_ms >= begin_ms:
            return AROUND + trouble.what
    return NO_CAUSE
