"""A progress bar on the standard error, shown on a terminal only."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import repeat
from typing import IO, Any, TextIO, cast

import click

from celery_rabbitdelay.app.rows import Report

__all__ = ["progress_bar"]


@contextmanager
def progress_bar(label: str, lines: IO[bytes]) -> Iterator[Callable[[Report], None]]:
    """Show how many lines are confirmed, and of how many if the file can be read twice.

    Args:
        label: What stands before the bar.
        lines: The file with the lines.

    Yields:
        What updates the bar.
    """
    if sys.stderr is None or not sys.stderr.isatty():
        yield lambda report: None
        return
    length = None
    if lines.seekable():
        begin = lines.tell()
        length = sum(1 for _ in lines)
        lines.seek(begin)
    # Without a length, click wants something to iterate over, and leaves it alone here.
    endless: Any = repeat(None) if length is None else None
    with click.progressbar(
        endless,
        length=length,
        label=label,
        show_pos=True,
        item_show_func=lambda report: report and f"{report.rate:,.0f}/s",
        file=cast(TextIO, _Terminal()),
    ) as bar:
        yield lambda report: bar.update(report.confirmed - bar.pos, report)


class _Terminal:
    """The standard error; if it is closed, the command goes on."""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> None:
        with _ignoring_a_closed_terminal():
            sys.stderr.write(text)

    def flush(self) -> None:
        with _ignoring_a_closed_terminal():
            sys.stderr.flush()


@contextmanager
def _ignoring_a_closed_terminal() -> Iterator[None]:
    try:
        yield
    except OSError:
        # Otherwise, Python fails to write the rest at its end and exits with 120.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stderr.fileno())
        os.close(nowhere)
