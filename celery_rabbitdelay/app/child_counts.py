"""A pipe by which the processes of a worker's pool tell their parent what they have counted.

Each count is written as it is recorded, in one piece, so that nothing is lost when a process ends,
also by SIGKILL; and a pipe leaves no file behind, however the worker ends. The multiprocess mode of
``prometheus_client`` needs a folder and an environment variable that is set before its import, and
would turn the metrics of the user's own into files as well.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import RLock, Thread
from typing import Final

from celery_rabbitdelay.app.counts import Counts, Series, decoded, encoded

#: Seconds that a process waits for room in the pipe. After that it keeps its counts, and tells them
#: with the next one.
PATIENCE: Final = 1.0

#: Bytes that are written in one piece, never mixed with those of another process.
ATOMIC: Final = select.PIPE_BUF

#: Bytes read at a time.
READ_SIZE: Final = 65_536


class ChildCounts:
    """The pipe. Make it before the processes are forked.

    Args:
        merge: Called in the parent, in a thread of its own, with what a process has counted.
    """

    def __init__(self, merge: Callable[..., None]) -> None:
        self._merge = merge
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        # The handler of a signal may interrupt whoever holds it, and count something itself.
        self._lock = RLock()
        self._has_room = True
        self._stopping = False
        self._thread: Thread | None = None

    def start(self) -> None:
        """Begin to read, in the parent."""
        self._thread = Thread(target=self._read, name="rabbitdelay-counts", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Read what was written by now, and close the pipe."""
        self._stopping = True
        self._write(b"\n")  # wakes the thread
        if self._thread is not None:
            self._thread.join(PATIENCE)
        self._close()

    def after_fork(self) -> None:
        """Become the end of a child, which only writes."""
        self._lock = RLock()
        self._has_room = True
        self._thread = None
        self._reading = _closed(self._reading)

    def tell(self, counts: Counts) -> None:
        """Write what a child has counted, and has not told before; keep what finds no room."""
        with self._lock:
            left = counts.take()
            try:
                while left:
                    lines, number = _as_many_as_fit(left)
                    if not self._write(lines):
                        break
                    del left[:number]
            finally:
                for each in left:
                    counts.merge(*each)

    def _write(self, lines: bytes) -> bool:
        """Write lines in one piece; return whether they need not be written again."""
        deadline = time.monotonic() + (PATIENCE if self._has_room else 0.0)
        while True:
            try:
                os.write(self._writing, lines)
            except BlockingIOError:
                rest = deadline - time.monotonic()
                if rest <= 0:
                    self._has_room = False
                    return False
                # Another process may take the room before this one does.
                select.select([], [self._writing], [], min(rest, 0.05))
            except OSError:
                return True  # The parent has ended, and nobody will ask.
            else:
                self._has_room = True
                return True

    def _read(self) -> None:
        rest = b""
        while not self._stopping or select.select([self._reading], [], [], 0)[0]:
            read = os.read(self._reading, READ_SIZE)
            lines, newline, rest = (rest + read).rpartition(b"\n")
            for each in decoded(lines + newline):
                self._merge(*each)

    def _close(self) -> None:
        # The numbers are given to other files at once: a child must not close those.
        self._reading, self._writing = _closed(self._reading), _closed(self._writing)


def _as_many_as_fit(series: Sequence[Series]) -> tuple[bytes, int]:
    """Return the first of the values as lines that are written in one piece, and their number."""
    lines, number = b"", 0
    for each in series:
        line = encoded(*each, ATOMIC)
        if len(lines) + len(line) > ATOMIC:
            break
        lines, number = lines + line, number + 1
    return lines, number


def _closed(descriptor: int) -> int:
    """Close a file; return what stands for no file."""
    with suppress(OSError):
        os.close(descriptor)
    return -1
