"""The progress of the lines of a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO

from celery_rabbitdelay.app.rows import Report
from celery_rabbitdelay.operations.progress_bar import is_terminal, progress_bar


@contextmanager
def progress_of_lines(label: str, lines: IO[bytes]) -> Iterator[Callable[[Report], None]]:
    """Show how many lines are confirmed, and of how many if the file can be read twice.

    Args:
        label: The text before the bar.
        lines: The file with the lines.

    Yields:
        What updates the bar.
    """
    length = None
    if is_terminal() and lines.seekable():
        begin = lines.tell()
        length = sum(1 for _ in lines)
        lines.seek(begin)
    with progress_bar(label, length) as show:
        yield lambda report: show(report.confirmed, f"{report.rate:,.0f}/s")
