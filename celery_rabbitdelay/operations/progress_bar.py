"""A progress bar on the standard error, shown on a terminal only."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import repeat
from typing import Any, Protocol, TextIO, cast

import click


class Show(Protocol):
    """Updates a bar."""

    def __call__(self, done: int, text: str = "", length: int | None = None) -> None:
        """Show how much is done.

        Args:
            done: How much.
            text: The text after the bar.
            length: Of how much, if that has changed.
        """


def is_terminal() -> bool:
    """Return whether the standard error is a terminal, so that a bar is shown."""
    return sys.stderr is not None and sys.stderr.isatty()


@contextmanager
def progress_bar(label: str, length: int | None = None) -> Iterator[Show]:
    """Show how much is done.

    Args:
        label: The text before the bar.
        length: Of how much; None if unknown.

    Yields:
        What updates the bar.
    """
    if not is_terminal():
        yield lambda done, text="", length=None: None
        return
    # Without a length, click wants something to iterate over, and leaves it alone here.
    endless: Any = repeat(None) if length is None else None
    with click.progressbar(
        endless,
        length=length,
        label=label,
        show_pos=True,
        item_show_func=lambda text: text,
        file=cast(TextIO, _Terminal()),
    ) as bar:

        def show(done: int, text: str = "", length: int | None = None) -> None:
            if length is not None:
                bar.length = length
            bar.update(done - bar.pos, text)

        yield show


class _Terminal:
    """The standard error; if it is closed, the program goes on."""

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
