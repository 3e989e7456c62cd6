"""The progress of a run in the terminal."""

import sys
import time
from typing import Final, TextIO

#: Seconds between two lines if the output is not a terminal.
LINE_INTERVAL: Final = 5.0


class Progress:
    """Prints phases as lines, and counts as one line that is rewritten on a terminal.

    Args:
        output: The file to print to.
    """

    def __init__(self, output: TextIO = sys.stdout) -> None:
        self._output = output
        self._rewrites = output.isatty()
        self._began = time.monotonic()
        self._last_line = 0.0
        self._phase = ""

    def phase(self, phase: str) -> None:
        """Begin a new phase."""
        self._phase = phase
        self._last_line = time.monotonic()
        self._print(f"{self._elapsed} {phase}")

    def counts(self, sent: int, delivered: int) -> None:
        """Show the counts; call it as often as you like."""
        counts = f"sent {sent:,}, delivered {delivered:,}, waiting {sent - delivered:,}"
        if self._rewrites:
            self._output.write(f"\r\033[K{self._elapsed}   {counts}")
            self._output.flush()
        elif time.monotonic() - self._last_line >= LINE_INTERVAL:
            self._last_line = time.monotonic()
            self._print(f"{self._elapsed}   {counts}")

    def end(self) -> None:
        """Clear the line that is rewritten."""
        if self._rewrites:
            self._output.write("\r\033[K")
            self._output.flush()

    def _print(self, line: str) -> None:
        self.end()
        print(line, file=self._output, flush=True)

    @property
    def _elapsed(self) -> str:
        return f"{time.monotonic() - self._began:6.1f} s"
