"""What was sent and what was started, and the files in which processes note it.

All instants are milliseconds of the machine's monotonic clock, which all processes share and which
no change of the time of day touches. Every process has a file of its own and writes each line with
one system call, so that a process that is killed leaves whole lines. A send is noted before it
begins and when it has ended: one that only began was cut off by a kill.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

#: ``confirmed``: the call returned. ``raised``: it raised. ``unknown``: its process was killed.
Outcome: TypeAlias = Literal["confirmed", "raised", "unknown"]


def now_ms() -> float:
    """Return the machine's monotonic clock in milliseconds."""
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC) / 1_000_000


@dataclass(frozen=True)
class Sent:
    """One task that a producer has sent.

    Attributes:
        id: The id of the task.
        group: Which lateness it belongs to; a scenario names its groups.
        due_ms: The call plus the delay. A start before that is early.
        began_ms: When the call began.
        outcome: How the call ended.
        error: The name of the error's class, if it raised.
        may_have_arrived: What the error says about that; None if it does not say.
    """

    id: str
    group: str
    due_ms: float
    began_ms: float
    outcome: Outcome = "unknown"
    error: str | None = None
    may_have_arrived: bool | None = None


@dataclass(frozen=True)
class Start:
    """One start of a task.

    Attributes:
        id: The id of the task.
        place: The queue that it was for.
        at_ms: When.
        redelivered: Whether the broker said that it had delivered this message before.
        args: The arguments of the task.
        taken_from: The queue that its worker consumes from.
    """

    id: str
    place: str
    at_ms: float
    redelivered: bool = False
    args: tuple[Any, ...] = ()
    taken_from: str = ""


@dataclass(frozen=True)
class Trouble:
    """What a scenario did, and from when to when."""

    what: str
    begin_ms: float
    end_ms: float


@dataclass
class Ledger:
    """Everything that was noted: what was sent, and its starts in order, by id."""

    sent: dict[str, Sent] = field(default_factory=dict)
    starts: dict[str, list[Start]] = field(default_factory=lambda: defaultdict(list))
    troubles: list[Trouble] = field(default_factory=list)

    @classmethod
    def of(
        cls, sent: Iterable[Sent], starts: Iterable[Start], troubles: Iterable[Trouble] = ()
    ) -> Ledger:
        """Return a ledger of these."""
        ledger = cls({each.id: each for each in sent}, troubles=[*troubles])
        for start in sorted(starts, key=lambda each: each.at_ms):
            ledger.starts[start.id].append(start)
        return ledger

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


class NotesReader:
    """Reads what was noted since it read last, and keeps all of it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}
        self._sent: dict[str, dict[str, Any]] = {}
        self._starts: list[Start] = []
        self._started: set[str] = set()

    def ledger(self, troubles: Iterable[Trouble] = ()) -> Ledger:
        """Return everything that was noted up to now."""
        self._read_on()
        return Ledger.of((Sent(**each) for each in self._sent.values()), self._starts, troubles)

    def unfinished(self) -> int:
        """Return how many confirmed tasks have not started."""
        self._read_on()
        sent = self._sent.items()
        confirmed = {identity for identity, each in sent if each["outcome"] == "confirmed"}
        return len(confirmed - self._started)

    def _read_on(self) -> None:
        for path in sorted(self._folder.glob("*.notes")):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                new = file.read()
            whole = new[: new.rfind(b"\n") + 1]  # a line may be half written at this moment
            self._read[path] = self._read.get(path, 0) + len(whole)
            for kind, note in map(json.loads, whole.splitlines()):
                if kind == "sent":
                    self._sent.setdefault(note["id"], {}).update(note)
                else:
                    start = Start(**{**note, "args": tuple(note["args"])})
                    self._starts.append(start)
                    self._started.add(start.id)
