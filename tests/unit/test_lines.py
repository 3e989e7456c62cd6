"""Reading lines until the file ends, or until Ctrl-C is pressed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from celery_rabbitdelay.command.send import Lines


def press_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@contextmanager
def lines_of(path: Path, text: str) -> Iterator[Lines]:
    path.write_text(text)
    with path.open("rb") as file:
        lines = Lines(file)
        with lines.stopped_by_ctrl_c():
            yield lines


@pytest.mark.parametrize(
    ("text", "presses", "outcome"),
    [
        ('{"args": [1]}\nno JSON\n[2]', False, (3, True, None)),
        ("1\n2\n3\n", True, (1, False, "interrupted")),
        # After the last line, none is left out.
        ("1\n", True, (1, True, None)),
    ],
)
def test_a_file_is_read_to_its_end_or_until_ctrl_c(
    tmp_path: Path, text: str, presses: bool, outcome: tuple[int, bool, Any]
) -> None:
    with lines_of(tmp_path / "rows", text) as lines:
        rows = iter(lines)
        assert next(rows) in (1, {"args": [1]})
        if presses:
            press_ctrl_c()
        assert list(rows) == ([] if presses else ["no JSON\n", [2]])
    assert (lines.taken, lines.ended, lines.stopped) == outcome


def test_a_file_that_cannot_be_read_further_says_why() -> None:
    with Path("/proc/self/mem").open("rb") as file:
        lines = Lines(file)
        assert not list(lines)
    assert lines.stopped is not None
    assert "/proc/self/mem cannot be read further: " in lines.stopped
