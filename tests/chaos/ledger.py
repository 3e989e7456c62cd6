"""What was sent, decided and started, and the files in which processes note it.

All instants are milliseconds of the machine's monotonic clock, which all processes share and which
no change of the time of day touches. Every process has a file of its own, which only grows, and
writes each line with one system call, so that a process that is killed leaves whole lines. A send
or a decision is noted before it begins and when it has ended: one that only began was cut off.

This file and ``checker.py`` share no code with the package.
"""

import json
import os
import time
from bisect import insort
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal


def now_ms() -> float:
    """Return the machine's monotonic clock in milliseconds."""
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC) / 1_000_000


@dataclass
class Sent:
    """One start that a send asks for: of a task, of its retry, at one queue of several.

    Attributes:
        id: The id of the task; with ``/`` and the number of the retry; with ``@`` and the queue.
        group: Its kind: the lateness of each group is told.
        due_ms: The call plus the delay. A start before that is early.
        began_ms: When the call began, the first time.
        ended_ms: When it was confirmed.
        outcome: ``confirmed``: the call returned. ``raised``: it raised. ``unknown``: its process
            was killed, or the occurrence may be left out.
        error: The name of the error's class, if it raised.
        may_have_arrived: What the error says about that; None if it does not say.
        times: How often it was sent under this id.
        once: Whether only the first of its messages may run.
        key: Of the sends with one key, only the newest may run.
        job: The job that has to be committed first.
        after: The starts that a chord's body waits for; it is due ``after_ms`` after the last.
    """

    id: str
    group: str
    due_ms: float
    began_ms: float
    ended_ms: float | None = None
    outcome: Literal["confirmed", "raised", "unknown"] = "unknown"
    error: str | None = None
    may_have_arrived: bool | None = None
    times: int = 1
    once: bool = False
    key: str | None = None
    job: str | None = None
    after: Sequence[str] = ()
    after_ms: float = 0.0


@dataclass(frozen=True)
class Start:
    """One start of a task.

    Attributes:
        id: As it was sent.
        at_ms: When.
        redelivered: Whether its message had been delivered before.
        ahead_ms: How far the clock of its worker was ahead.
        former: Whether its worker is of the version before.
        process: Its worker.
        mark: The header ``rabbitdelay-once``, by which two messages are told apart.
    """

    id: str
    at_ms: float
    redelivered: bool = False
    ahead_ms: float = 0.0
    former: bool = False
    process: int = 0
    mark: str | None = None


@dataclass
class Decision:
    """A call that decides about a task, or about all tasks of a job.

    Attributes:
        of: The id of the task, or the name of the job.
        what: ``cancel``, ``postpone``, ``open``, ``commit`` or ``abort``.
        began_ms: When the call began.
        ended_ms: When it returned.
        outcome: What it returned, ``DONE`` for a call of a job; the name of the error's class.
        due_ms: The new due time.
    """

    of: str
    what: str
    began_ms: float
    ended_ms: float | None = None
    outcome: str | None = None
    due_ms: float | None = None


@dataclass(frozen=True)
class Trouble:
    """What was done to servers, processes or queues, and what that explains.

    Attributes:
        what: What was done.
        begin_ms: When it began.
        end_ms: When everything was back.
        copies: Whether it explains second messages of a task.
        registry: Whether the registry was away.
        early_ms: The milliseconds by which a task may then be early.
        forgets_ms: The registry has forgotten what it was told from then to the end.
        refuses: Whether queues refused messages. Celery gives up the body of a chord whose send
            raises: it logs so, and stores a ``ChordError``.
    """

    what: str
    begin_ms: float
    end_ms: float
    copies: bool = True
    registry: bool = False
    early_ms: float = 0.0
    forgets_ms: float | None = None
    refuses: bool = False


@dataclass
class Ledger:
    """Everything that was noted."""

    sent: dict[str, Sent] = field(default_factory=dict)
    starts: dict[str, list[Start]] = field(default_factory=lambda: defaultdict(list))
    decisions: dict[str, list[Decision]] = field(default_factory=lambda: defaultdict(list))
    keyed: dict[str, list[Sent]] = field(default_factory=lambda: defaultdict(list))
    places: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    troubles: list[Trouble] = field(default_factory=list)
    _read: dict[Path, int] = field(default_factory=lambda: defaultdict(int))
    _ends: list[tuple[str, Any]] = field(default_factory=list)

    def read(self, folder: Path) -> None:
        """Add what was noted in a folder since it was read last.

        Processes write to files of their own, which are read one after the other, so the end of a
        send may be read before its beginning: such ends wait for the next reading.
        """
        notes, self._ends = self._ends, []
        for path in sorted(folder.glob("*.notes")):
            with path.open("rb") as file:
                file.seek(self._read[path])
                for line in file:
                    if not line.endswith(b"\n"):
                        break  # it is half written at this moment
                    self._read[path] += len(line)
                    notes.append(json.loads(line))
        for kind, note in sorted(notes, key=_is_end):
            if _is_end((kind, note)) and note["id"] not in self.sent:
                self._ends.append((kind, note))
            else:
                self.add(kind, note)

    def add(self, kind: str, note: Mapping[str, Any]) -> None:
        """Add a note."""
        match kind:
            case "start":
                insort(self.starts[note["id"]], Start(**note), key=lambda each: each.at_ms)
            case "sent" if note["id"] not in self.sent:
                self.sent[note["id"]] = sent = Sent(**note)
                if sent.key is not None:
                    insort(self.keyed[sent.key], sent, key=lambda each: each.began_ms)
            case "sent":
                self._add_to(self.sent[note["id"]], note)
            case "decision":
                made = self.decisions[note["of"]]
                made[:] = [each for each in made if each.began_ms != note["began_ms"]]
                insort(made, Decision(**note), key=lambda each: each.began_ms)
            case "trouble":
                self.troubles.append(Trouble(**note))
            case "place":
                self.places[note["id"]].append(note["queue"])

    @staticmethod
    def _add_to(known: Sent, note: Mapping[str, Any]) -> None:
        """Add how a send has ended, or that it is sent again."""
        if "began_ms" in note:
            known.times += 1
            known.due_ms = min(known.due_ms, note["due_ms"])
        elif known.outcome != "confirmed":
            for name, value in note.items():
                setattr(known, name, value)


def _is_end(note: tuple[str, Any]) -> bool:
    """Return whether a note says how a send has ended."""
    return note[0] == "sent" and "began_ms" not in note[1]


class Notes:
    """The file of this process, in the folder of all of them."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._process = 0
        self._file = -1

    def begin(self, sent: Sent) -> None:
        """Note that a send begins."""
        self.write("sent", sent)

    def end(self, identity: str, error: BaseException | None = None) -> None:
        """Note how a send has ended."""
        told: dict[str, Any] = {"id": identity, "outcome": "raised" if error else "confirmed"}
        if error is None:
            told |= {"ended_ms": now_ms(), "error": None}
        else:
            told["error"] = type(error).__name__
            told["may_have_arrived"] = getattr(error, "may_have_arrived", None)
        self.write("sent", told)

    @contextmanager
    def deciding(self, of: str, what: str, due_ms: float | None = None) -> Iterator[Decision]:
        """Note a decision; the block sets its outcome, or raises."""
        made = Decision(of, what, now_ms(), due_ms=due_ms)
        self.write("decision", made)
        try:
            yield made
        except Exception as error:
            made.outcome = type(error).__name__
            raise
        finally:
            made.ended_ms = now_ms()
            self.write("decision", made)

    def write(self, kind: str, note: Any) -> None:
        """Write one note, without the attributes that have their defaults."""
        if not isinstance(note, dict):
            given = asdict(note)
            note = {each.name: given[each.name] for each in fields(note) if _told(each, given)}
        if self._process != os.getpid():  # a child of Celery's pool has its own
            self._process = os.getpid()
            path = self._folder / f"{self._process}-{time.monotonic_ns()}.notes"
            self._file = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        os.write(self._file, (json.dumps([kind, note]) + "\n").encode())


def _told(each: Any, given: Mapping[str, Any]) -> bool:
    return each.default is MISSING or given[each.name] != each.default
