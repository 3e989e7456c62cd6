"""``celery -A proj rabbitdelay COMMAND``: the delay levels of an application, at the terminal."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from itertools import repeat
from typing import IO, Any, Final, TextIO, cast

import celery
import click
from celery.bin.base import CLIContext
from celery.exceptions import QueueNotFound
from kombu.exceptions import OperationalError

from celery_rabbitdelay.app.extension import RabbitDelay
from celery_rabbitdelay.app.rows import Report
from celery_rabbitdelay.exceptions import RabbitDelayError, RowsNotConfirmed
from celery_rabbitdelay.publishing.backlog import Backlog, backlog_of

__all__ = ["rabbitdelay"]

#: How many of the missing queues are named.
NAMED: Final = 5

#: How many of the lines that were not confirmed are named.
LINES_NAMED: Final = 20

#: How many characters of a reason are shown.
SHOWN: Final = 500


@click.group()
def rabbitdelay() -> None:
    """The delays that wait in RabbitMQ."""


@rabbitdelay.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object, for programs.")
@click.option(
    "--timeout",
    default=1.0,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    help="Seconds to wait for the answers of the workers.",
)
@click.pass_obj
def status(context: CLIContext, as_json: bool, timeout: float) -> None:
    """What waits where, and what the workers' modules do."""
    delays = _delays(context)
    with context.app.connection_for_read() as connection:
        backlog = backlog_of(connection, delays.topology)
        inspect = context.app.control.inspect(timeout=timeout, connection=connection)
        workers: Any = inspect._request("rabbitdelay_status") or {}
    if as_json:
        counts = {name: each._asdict() for name, each in backlog.others.items()}
        click.echo(json.dumps({**backlog._asdict(), "others": counts, "workers": workers}))
        return
    for line in (*_of_backlog(delays, backlog), *_of_workers(workers)):
        click.echo(line)


@rabbitdelay.command()
@click.argument("task")
@click.argument("rows", type=click.File("rb"), default="-")
@click.option("--tolerance", type=float, default=0, help="Seconds that each may start later.")
@click.option("--envelopes/--no-envelopes", default=None, help="Whether rows share messages.")
@click.option("-Q", "--queue", help="The queue, instead of what the router says.")
@click.option("--priority", type=click.IntRange(0, 255), help="The priority of all.")
@click.option("--by-name", is_flag=True, help="Also a task that this application does not have.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object, for programs.")
@click.pass_obj
def send(
    context: CLIContext,
    /,
    task: str,
    rows: IO[bytes],
    tolerance: float,
    envelopes: bool | None,
    by_name: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Send TASK once for each line of ROWS, and wait for all confirms.

    ROWS is a file; - or nothing is the standard input. A line is a JSON object with what is the
    row's own: args, kwargs, delay (seconds) or eta (ISO 8601), task_id.
    """
    delays = _delays(context)
    what = task if by_name else _task(context.app, task)
    given = {name: value for name, value in options.items() if value is not None}
    failed: RowsNotConfirmed | None = None
    with _bar(task, rows) as progress:
        try:
            report = delays.send_many(
                what,
                map(_read, rows),
                tolerance=tolerance,
                envelopes=envelopes,
                progress=progress,
                **given,
            )
        except RowsNotConfirmed as error:
            failed, report = error, error.report
        except QueueNotFound as error:
            raise click.ClickException(error.args[0]) from error
        except (RabbitDelayError, OperationalError) as error:
            raise click.ClickException(str(error)) from error
    click.echo(json.dumps(_told(report, failed)) if as_json else _summary(report))
    if failed is not None:
        for line in _of_failures(failed):
            click.echo(line, err=True)
        raise SystemExit(1)


def _task(app: celery.Celery, name: str) -> celery.Task[Any, Any]:
    """The task itself, which checks its arguments and knows its options."""
    app.loader.import_default_modules()
    if name in app.tasks:
        return app.tasks[name]
    close = get_close_matches(name, app.tasks, n=1)
    hint = f"is it {close[0]!r}? " if close else ""
    raise click.BadParameter(
        f"{name!r} is no task of {app.main or app!r}; {hint}--by-name sends it all the same",
        param_hint="TASK",
    )


def _read(line: bytes) -> Any:
    """A row, or what no row can be, so that the error is that line's."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return line.decode(errors="replace")


class _Terminal:
    """The standard error; a terminal that is gone is no reason to stop sending."""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> None:
        with _may_be_gone():
            sys.stderr.write(text)

    def flush(self) -> None:
        with _may_be_gone():
            sys.stderr.flush()


@contextmanager
def _may_be_gone() -> Iterator[None]:
    try:
        yield
    except OSError:
        # What is still to be written would make Python itself exit with 120.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stderr.fileno())
        os.close(nowhere)


@contextmanager
def _bar(label: str, lines: IO[bytes]) -> Iterator[Callable[[Report], None] | None]:
    """Show on a terminal how many rows are confirmed; of how many, where that can be known."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield None
        return
    length = None
    if lines.seekable():
        begin = lines.tell()
        length = sum(1 for _ in lines)
        lines.seek(begin)
    # Without a length, click counts what it iterates over; nothing does here.
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


def _told(report: Report, failed: RowsNotConfirmed | None) -> dict[str, Any]:
    wrong = {} if failed is None else failed.errors
    return {
        **vars(report),
        "rate": report.rate,
        "not_confirmed": {row + 1: _reason(error) for row, error in wrong.items()},
        "not_taken_from": failed.rest + 1 if failed and failed.rest is not None else None,
    }


def _summary(report: Report) -> str:
    return (
        f"{report.confirmed:,} tasks confirmed in {report.seconds:.1f} s ({report.rate:,.0f}/s): "
        f"{report.messages:,} messages, {report.resent:,} resent"
    )


def _of_failures(failed: RowsNotConfirmed) -> Iterator[str]:
    wrong = list(failed.errors.items())
    for row, error in wrong[:LINES_NAMED]:
        yield f"line {row + 1} was not confirmed: {_reason(error)}"
    if len(wrong) > LINES_NAMED:
        yield f"... and {len(wrong) - LINES_NAMED:,} more"
    if failed.rest is not None:
        yield f"lines from {failed.rest + 1:,} on were not taken"


def _reason(error: Exception) -> str:
    """What is wrong, which stands at the end, and of what, which may be long, the beginning."""
    text, half = str(error), SHOWN // 2
    return text if len(text) <= SHOWN else f"{text[:half]} ... {text[-half:]}"


def _delays(context: CLIContext) -> RabbitDelay:
    delays = getattr(context.app, "rabbitdelay", None)
    if not isinstance(delays, RabbitDelay):
        raise click.UsageError(
            f"the delays of {context.app!r} are not in RabbitMQ: make it a "
            "celery_rabbitdelay.Celery, or call celery_rabbitdelay.install(app)"
        )
    if not delays.available:
        raise click.UsageError(f"the broker of {context.app!r} is not RabbitMQ")
    return delays


def _of_backlog(delays: RabbitDelay, backlog: Backlog) -> Iterator[str]:
    topology = delays.topology
    yield f"{topology.prefix}: {topology.layout.name}, {len(topology.digit_queues)} digit queues"
    for level, messages in backlog.levels.items():
        yield f"  {level:16} {messages:10,} waiting"
    for name, counts in backlog.others.items():
        consumers = f", {counts.consumers} consumers" if counts.consumers else ""
        yield f"  {name:16} {counts.messages:10,} waiting{consumers}"
    if backlog.missing:
        more = "" if len(backlog.missing) <= NAMED else ", ..."
        names = ", ".join(backlog.missing[:NAMED]) + more
        yield f"  {len(backlog.missing)} queues are missing: {names}"


def _of_workers(workers: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Iterator[str]:
    if not workers:
        yield "no worker has answered"
    for worker, modules in sorted(workers.items()):
        yield worker if modules else f"{worker}: serves no module"
        for name, seen in modules.items():
            yield (
                f"  {name:16} {seen['received']:10,} received ({seen['received_per_second']:,}/s), "
                f"{seen['published']:,} published ({seen['published_per_second']:,}/s), "
                f"{seen['undeliverable']:,} undeliverable"
            )
