"""The lines of a file as rows of ``send_many``, until the file ends or Ctrl-C is pressed."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import IO, Any, Final

#: Why reading stopped, after Ctrl-C.
INTERRUPTED: Final = "interrupted"

_NOTICE: Final = (
    "\nNo further lines are read. Waiting for the confirms of the lines already read; "
    "press Ctrl-C again to end at once.\n"
)


class Lines:
    """Reads each line as JSON. A line that is not JSON is passed on, so that only its row fails.

    Args:
        file: The file.

    Attributes:
        taken: How many lines were read.
        ended: Whether the end of the file was reached.
        stopped: Why the command stopped before its end; None if it did not.
        aborted: Whether a second Ctrl-C ended the wait for the confirms.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self.taken = 0
        self.ended = False
        self.stopped: str | None = None
        self.aborted = False
        self._file = file
        self._is_interrupted = False
        self._is_reading = False

    def __iter__(self) -> Iterator[Any]:
        try:
            while line := self._next():
                self.taken += 1
                yield _row(line)
        except OSError as error:
            self.stopped = f"{self._file.name} cannot be read further: {error}"

    @contextmanager
    def stopped_by_ctrl_c(self) -> Iterator[None]:
        """Let the first Ctrl-C end the rows, and raise KeyboardInterrupt at the second one."""
        former = signal.signal(signal.SIGINT, self._interrupt)
        try:
            yield
        except KeyboardInterrupt:
            self.stopped = INTERRUPTED
            self.aborted = True
        finally:
            signal.signal(signal.SIGINT, former)

    def _next(self) -> bytes:
        """Return the next line, or nothing at the end of the file and after Ctrl-C."""
        try:
            self._is_reading = True
            if not self._is_interrupted:
                line = self._file.readline()
                self._is_reading = False
                self.ended = not line
                return line
        except KeyboardInterrupt:
            self._is_reading = False
            self.stopped = INTERRUPTED
            return b""
        self._is_reading = False
        # A regular file tells whether there is more; a pipe may never do.
        self.ended = self._file.seekable() and not self._file.readline()
        self.stopped = None if self.ended else INTERRUPTED
        return b""

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._is_interrupted:
            raise KeyboardInterrupt
        self._is_interrupted = True
        # Past sys.stderr, whose buffer may be in use at the moment of the signal.
        with suppress(OSError, ValueError):
            os.write(sys.stderr.fileno(), _NOTICE.encode())
        if self._is_reading:
            # Python would go on with the read.
            raise KeyboardInterrupt


def _row(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return line.decode(errors="replace")
