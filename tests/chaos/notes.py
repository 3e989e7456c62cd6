"""The files in which the processes of a scenario note what they do, a line of JSON each.

Every process has a file of its own and writes each line with one system call, so that a process
that is killed leaves whole lines. A send is noted before it begins and when it has ended: one that
only began was cut off by a kill.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from tests.chaos.ledger import Ledger, Outcome, Sent, Start

#: The end of the names of these files.
SUFFIX: Final = ".notes"


def now_ms() -> float:
    """Return the machine's monotonic clock in milliseconds; it is the same in all processes."""
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC) / 1_000_000


class Notes:
    """The file of this process.

    Args:
        folder: The folder of all of these files.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._process = 0
        self._file = -1

    def begin(self, sent: Sent) -> None:
        """Note that a send begins."""
        self._write({"note": "begin", **asdict(sent)})

    def end(
        self, identity: str, outcome: Outcome, error: BaseException | None = None, attempts: int = 0
    ) -> None:
        """Note how a send has ended."""
        told = {
            "outcome": outcome,
            "error": None if error is None else type(error).__name__,
            "may_have_arrived": getattr(error, "may_have_arrived", None),
            "attempts": attempts,
        }
        self._write({"note": "end", "id": identity, **told})

    def start(self, start: Start) -> None:
        """Note that a task starts."""
        self._write({"note": "start", **asdict(start)})

    def _write(self, note: Mapping[str, Any]) -> None:
        if self._process != os.getpid():  # a child of Celery's pool has its own
            self._process = os.getpid()
            path = self._folder / f"{self._process}-{time.monotonic_ns()}{SUFFIX}"
            self._file = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        os.write(self._file, (json.dumps(note) + "\n").encode())


class NotesReader:
    """Reads what was noted since it read last, and keeps all of it.

    Args:
        folder: The folder of the files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}
        self._sent: dict[str, dict[str, Any]] = {}
        self._starts: list[Start] = []
        self._started: set[tuple[str, str]] = set()

    def ledger(self) -> Ledger:
        """Return everything that was noted up to now."""
        self.read()
        return Ledger.of(map(_sent, self._sent.values()), self._starts)

    def unfinished(self) -> int:
        """Return how many confirmed tasks have not started at each of their places."""
        self.read()
        return sum(
            any((identity, place) not in self._started for place in sent["places"])
            for identity, sent in self._sent.items()
            if sent["outcome"] == "confirmed"
        )

    def read(self) -> None:
        """Read what is new."""
        for path in sorted(self._folder.glob(f"*{SUFFIX}")):
            for note in self._new_lines(path):
                kind = note.pop("note")
                if kind == "start":
                    start = Start(**{**note, "args": tuple(note["args"])})
                    self._starts.append(start)
                    self._started.add((start.id, start.place))
                else:
                    self._sent.setdefault(note["id"], {}).update(note)

    def _new_lines(self, path: Path) -> Iterator[dict[str, Any]]:
        with path.open("rb") as file:
            file.seek(self._read.get(path, 0))
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]  # a line may be half written at this moment
        self._read[path] = self._read.get(path, 0) + len(whole)
        return map(json.loads, whole.splitlines())


def _sent(note: Mapping[str, Any]) -> Sent:
    return Sent(**{**note, "places": tuple(note["places"])})
