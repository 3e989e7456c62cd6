"""``celery rabbitdelay send``: send one task for each line of a file, until Ctrl-C is pressed."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from difflib import get_close_matches
from types import FrameType
from typing import IO, Any, Final

import celery
import click
from celery.exceptions import QueueNotFound

from celery_rabbitdelay.app.sending.rows import Report
from celery_rabbitdelay.command import shared
from celery_rabbitdelay.command.shared import rabbitdelay
from celery_rabbitdelay.exceptions import InvalidDelay, RabbitDelayError, RowsNotConfirmed
from celery_rabbitdelay.levels.delay import parse_delay

#: How many lines that were not confirmed the text names; ``--json`` names all of them.
MAX_LINES_NAMED: Final = 20

#: Characters of a line's error that are shown.
MAX_REASON_LENGTH: Final = 500

#: The exit status after Ctrl-C: 128 and the number of the signal, as shells have it.
STOPPED_BY_CTRL_C: Final = 130


#: Why reading stopped, after Ctrl-C.
INTERRUPTED: Final = "interrupted"


class Lines:
    """Reads each line as JSON. A line that is not JSON is passed on, so that only its row fails.

    Args:
        file: The file.

    Attributes:
        taken: How many lines were read.
        ended: Whether the end of the file was reached.
        stopped: Why the command stopped before its end; None if it did not.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self.taken = 0
        self.ended = False
        self.stopped: str | None = None
        self._file = file
        self._is_interrupted = self._is_reading = False

    def __iter__(self) -> Iterator[Any]:
        try:
            while line := self._next():
                self.taken += 1
                yield _row(line)
        except OSError as error:
            self.stopped = f"{self._file.name} cannot be read further: {error}"

    @contextmanager
    def stopped_by_ctrl_c(self) -> Iterator[None]:
        """Let Ctrl-C end the rows; a second one ends the command."""
        former = signal.signal(signal.SIGINT, self._interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, former)

    def _next(self) -> bytes:
        """Return the next line, or nothing at the end of the file and after Ctrl-C."""
        if not self._is_interrupted:
            line = b""
            with suppress(KeyboardInterrupt):
                self._is_reading = True
                line = self._file.readline()
                self._is_reading = False
            if line or not self._is_interrupted:
                self.ended = not line
                return line
        # A regular file shows whether there is more; a pipe may never do so.
        self.ended = self._file.seekable() and not self._file.readline()
        self.stopped = None if self.ended else INTERRUPTED
        return b""

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.default_int_handler)
        self._is_interrupted = True
        if self._is_reading:
            # Python would go on with the read.
            raise KeyboardInterrupt


def _row(line: bytes) -> Any:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return line.decode(errors="replace")
    if isinstance(row, dict) and isinstance(row.get("delay"), str):
        with suppress(InvalidDelay):  # the error of the row
            row["delay"] = parse_delay(row["delay"])
    return row


@rabbitdelay.command()
@click.argument("task")
@click.argument("rows", type=click.File("rb"), default="-")
@click.option(
    "--tolerance",
    type=shared.duration_type,
    default="0",
    help="How much later each task may start, to save stops and fill envelopes.",
)
@click.option(
    "--envelopes/--no-envelopes",
    default=None,
    help="Whether tasks that are due together share a message.",
)
@click.option("-Q", "--queue", help="The queue, instead of the one that the router chooses.")
@click.option("--priority", type=click.IntRange(0, 255), help="The priority of all tasks.")
@click.option("--by-name", is_flag=True, help="Send a task that this application does not have.")
def send(
    task: str,
    rows: IO[bytes],
    tolerance: timedelta,
    envelopes: bool | None,
    by_name: bool,
    **options: Any,
) -> None:
    """Send TASK once for each line of ROWS, and wait until the broker has confirmed all of them.

    ROWS is a file; - or nothing is the standard input. A line is a JSON object with the task's
    args, kwargs, delay or eta (in UTC if it is naive), and task_id, all of them optional. Ctrl-C
    takes no further lines and waits for the confirms of the others.
    """
    delays = shared.delays()
    target = task if by_name else _registered_task(shared.app(), task)
    # Celery reads it when a task is sent.
    with shared.usage_errors(Exception, of="the result_backend: "):
        shared.app().backend  # noqa: B018 - made, and so its URL is checked
    given = {name: value for name, value in options.items() if value is not None}
    lines, failed = Lines(rows), None
    with lines.stopped_by_ctrl_c():
        try:
            report = delays.send_many(
                target, lines, tolerance=tolerance, envelopes=envelopes, **given
            )
        except RowsNotConfirmed as error:
            failed, report = error, error.report
        except QueueNotFound as error:
            shared.fail(error, error.args[0])
        except (RabbitDelayError, *shared.BROKER_ERRORS) as error:
            shared.fail(error, str(error))
        except RuntimeError as error:
            shared.fail(error, f"the result_backend does not answer: {error}")
    shared.answer(_as_json(report, failed, lines), [_summary(report)])
    for line in _trouble(failed, lines):
        click.echo(line, err=True)
    if lines.stopped == INTERRUPTED:
        raise SystemExit(STOPPED_BY_CTRL_C)
    if failed is not None or lines.stopped is not None:
        raise SystemExit(shared.FAILED)


def _registered_task(app: celery.Celery, name: str) -> celery.Task[Any, Any]:
    """Return the task itself, which checks its arguments and knows its options."""
    app.loader.import_default_modules()
    if name in app.tasks:
        return app.tasks[name]
    close = get_close_matches(name, app.tasks, n=1)
    hint = f"is it {close[0]!r}? " if close else ""
    raise click.BadParameter(
        f"{name!r} is not a task of {app.main or app!r}; {hint}use --by-name to send it anyway",
        param_hint="TASK",
    )


def _summary(report: Report) -> str:
    return (
        f"{report.confirmed:,} tasks confirmed in {report.seconds:.1f} s ({report.rate:,.0f}/s): "
        f"{report.messages:,} messages, {report.resent:,} resent"
    )


def _as_json(report: Report, failed: RowsNotConfirmed | None, lines: Lines) -> dict[str, Any]:
    errors = {} if failed is None else failed.errors
    return {
        **vars(report),
        "rate": report.rate,
        "not_confirmed": {_line(row): _reason(error) for row, error in errors.items()},
        "may_have_arrived": [] if failed is None else [_line(row) for row in failed.uncertain],
        "not_taken_from": _first_line_not_taken(failed, lines),
        "stopped": lines.stopped,
    }


def _trouble(failed: RowsNotConfirmed | None, lines: Lines) -> Iterator[str]:
    errors = [] if failed is None else list(failed.errors.items())
    for row, error in errors[:MAX_LINES_NAMED]:
        assert failed is not None
        maybe = ", but may have arrived" if row in failed.uncertain else ""
        yield f"line {_line(row)} was not confirmed{maybe}: {_reason(error)}"
    if len(errors) > MAX_LINES_NAMED:
        yield f"... and {len(errors) - MAX_LINES_NAMED:,} more"
    if lines.stopped is not None:
        yield lines.stopped
    first = _first_line_not_taken(failed, lines)
    if first is not None:
        yield f"lines from {first:,} on were not taken"


def _first_line_not_taken(failed: RowsNotConfirmed | None, lines: Lines) -> int | None:
    if failed is not None and failed.rest is not None:
        return _line(failed.rest)
    return None if lines.ended or lines.stopped is None else lines.taken + 1


def _line(row: int) -> int:
    """Return the number of a row's line: lines count from 1, and the library's rows from 0."""
    return row + 1


def _reason(error: Exception) -> str:
    """Return an error's text; of a long one the beginning and the end, which says what is wrong."""
    text, half = str(error), MAX_REASON_LENGTH // 2
    return text if len(text) <= MAX_REASON_LENGTH else f"{text[:half]} ... {text[-half:]}"
