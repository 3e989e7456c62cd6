"""``celery rabbitdelay migrate``, ``transfer`` and ``adopt``: move messages into the levels."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from math import inf
from threading import Event
from typing import Any, Final, NamedTuple

import amqp
import celery
import click
from celery.platforms import EX_UNAVAILABLE
from kombu import Connection

from celery_rabbitdelay.app.delays import Delays
from celery_rabbitdelay.app.destinations import configured_destinations, configured_queues
from celery_rabbitdelay.command import shared
from celery_rabbitdelay.exceptions import LayoutConflict, SameTopology, TopologyIncomplete
from celery_rabbitdelay.levels import shown_url
from celery_rabbitdelay.operations import conversion
from celery_rabbitdelay.operations.mover import Convert, Destinations, Moved, Mover, Place
from celery_rabbitdelay.operations.source import waiting
from celery_rabbitdelay.publishing.producer import DelayedProducer
from celery_rabbitdelay.publishing.publisher import Publisher

#: The maximum number of reasons and queues in the text; ``--json`` lists all.
MAX_NAMED: Final = 10


class Pace(NamedTuple):
    """Options of a move.

    Attributes:
        timeout: Maximum seconds for an answer of a broker, and for the target to come back.
        rate: The maximum number of messages to move per second.
        dry_run: Whether to count the messages without moving them.
    """

    timeout: float
    rate: float
    dry_run: bool


rate_option: Final = click.option(
    "--rate",
    type=shared.POSITIVE,
    default=inf,
    metavar="NUMBER",
    help="Move at most this many messages a second.",
)

_move_options: Final = shared.as_one(
    "pace",
    Pace,
    click.option(
        "--timeout",
        type=shared.seconds_type,
        default=60.0,
        show_default=True,
        help="Seconds for an answer of a broker, and for the target to come back.",
    ),
    rate_option,
    click.option("--dry-run", is_flag=True, help="Count the messages, and move none."),
)

#: The options that describe the levels that are emptied.
_source_options: Final = shared.options(
    click.option(
        "--ignore-registry",
        is_flag=True,
        help="Move even if the registry's prefix differs: cancelled tasks then run.",
    ),
    click.option("--sign", is_flag=True, help="Also sign messages without a valid signature."),
    click.option(
        "--allow",
        multiple=True,
        metavar="PATTERN",
        help="Also bind queues with this name or pattern that the application does not have.",
    ),
    shared.topology_options("from-"),
)


@shared.command()
@_source_options
@_move_options
def migrate(pace: Pace, **options: Any) -> None:
    """Move all messages from another prefix's levels on this broker into the application's levels.

    The --from options describe the source, which is emptied; omitted ones default to the
    application's settings. Producers and workers may keep running. The command can be interrupted
    at any time, and started again.
    """
    _migrate(None, pace, **options)


@shared.command()
@click.option(
    "--from",
    "from_url",
    required=True,
    envvar="RABBITDELAY_FROM",
    help="The URL of the broker that is emptied; or the environment variable RABBITDELAY_FROM.",
)
@_source_options
@_move_options
def transfer(from_url: str, pace: Pace, **options: Any) -> None:
    """Move all messages of another broker or virtual host into the application's levels.

    The command works between any two versions of RabbitMQ. Otherwise it behaves like migrate. The
    connection to an amqps:// URL uses the application's broker_use_ssl; an amqp:// URL is not
    encrypted.
    """
    _migrate(from_url, pace, **options)


def _migrate(
    from_url: str | None,
    pace: Pace,
    *,
    ignore_registry: bool,
    allow: Sequence[str],
    sign: bool,
    **given: object,
) -> None:
    delays = shared.delays()
    app, settings = delays.app, delays.settings
    there = app.connection_for_write() if from_url is None else broker_at(app, from_url)
    topology = shared.topology(given, of="of the levels that are emptied: ")
    source, target = Place(there, topology), _target()
    if not ignore_registry:
        _check_registry(delays, topology.prefix)
    app.loader.import_default_modules()
    allowed = configured_destinations(app).also(allow)
    destinations = Destinations(
        target, configured_queues(app), lambda name: allowed.includes("", name)
    )
    migration = conversion.Migration(
        topology, target.topology, destinations.ensure, settings.signing_keys, sign
    )

    def check() -> None:
        if not pace.dry_run:
            conversion.check_places(source, target)
        conversion.check_source(source)

    queues = [queue.name for queue in topology.queues]
    _run(destinations, queues, migration.convert, pace, there, check)


def _target() -> Place:
    delays = shared.delays()
    may_declare = delays.settings.declare == "auto"
    return Place(shared.app().connection_for_write(), delays.topology, may_declare)


def _check_registry(delays: Delays, prefix: str) -> None:
    known = delays.setting("registry_prefix") or delays.settings.prefix
    if delays.setting("registry_url") and known != prefix:
        raise click.UsageError(
            f"the registry of this application has the prefix {known!r}, and does not know the "
            f"tasks that were sent under {prefix!r}: cancelled tasks would run. Set "
            f"rabbitdelay_registry_prefix = {prefix!r}, or pass --ignore-registry"
        )


@shared.command()
@click.option("--chain-prefix", default="", help="Celery's broker_native_delayed_delivery_prefix.")
@_move_options
def adopt(chain_prefix: str, pace: Pace) -> None:
    """Move all tasks from Celery's native delayed delivery into the application's levels.

    Tasks keep their due times. First deploy producers that use the levels. The command can be
    interrupted at any time, and started again.
    """
    settings, app = shared.delays().settings, shared.app()
    destinations = Destinations(_target(), app.amqp.queues)
    chain = conversion.NativeChain(
        DelayedProducer(Publisher(destinations.target.connection), **settings.for_producer),
        app.timezone,
        list(app.amqp.queues.values()),
        destinations.ensure,
        lambda name: not getattr(app.tasks.get(name), "rabbitdelay", True),
    )
    queues, there = conversion.native_queues(chain_prefix), destinations.target.connection
    _run(destinations, queues, chain.convert, pace, there)


def _run(
    destinations: Destinations,
    queues: Sequence[str],
    convert: Convert,
    pace: Pace,
    there: Connection,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Move the messages, or count them, and print the result.

    Args:
        destinations: Binds the destination queues at the target; closed at the end.
        queues: The names of the queues that are emptied.
        convert: Converts a message to the publication that replaces it.
        pace: The options of the move.
        there: The broker of these queues.
        check: Called first; raises an error if messages cannot be moved between these levels.
    """
    mover = Mover(there, queues, destinations.target, convert, timeout=pace.timeout, rate=pace.rate)
    refused = shared.usage_errors(SameTopology, LayoutConflict, TopologyIncomplete)
    try:
        with closing(destinations), refused, set_by_ctrl_c(mover.stopping):
            check()
            if pace.dry_run:
                with there.clone(heartbeat=0) as own:
                    found = waiting(own, queues)
                lines = [f"  {name:40} {messages:12,}" for name, messages in found.items()]
                total = sum(found.values())
                lines.append(f"{total:,} messages wait; nothing was moved")
                shared.answer({"waiting": total, "queues": found}, lines)
                return
            moved = mover.move()
    except shared.BROKER_ERRORS as error:
        why = (
            f"the move has stopped: {mover.result.moved:,} messages are moved, "
            f"{mover.result.copies:,} others may exist twice, and the rest is still in its queues. "
            "To continue, start the command again"
        )
        if not (mover.result.moved or isinstance(error, amqp.AMQPError)):
            why = "cannot reach a broker"
        shared.fail(error, f"{why}: {error}", EX_UNAVAILABLE)
    missing, unnamed = sorted(destinations.missing), sorted(destinations.unnamed)
    answer = {**vars(moved), "missing_queues": missing, "unnamed_queues": unnamed}
    shared.answer(answer, _lines(moved, missing, unnamed))
    is_left = moved.left.keys() - {conversion.KEEPS_OWN}
    if is_left or moved.undeliverable or unnamed or not moved.finished:
        raise SystemExit(shared.FAILED)


def _lines(moved: Moved, missing: Sequence[str], unnamed: Sequence[str]) -> Iterator[str]:
    rate = moved.moved / moved.seconds if moved.seconds else 0
    yield f"{moved.moved:,} messages moved in {moved.seconds:,.1f} s ({rate:,.0f}/s)"
    for what, reasons in (("undeliverable", moved.undeliverable), ("left", moved.left)):
        for reason, number in reasons.most_common(MAX_NAMED):
            yield f"  {number:,} {what}: {reason}"
    if moved.copies:
        yield f"  {moved.copies:,} may exist twice: a connection was lost"
    if not moved.finished:
        yield "  stopped before all messages were moved; to continue, start the command again"
    if missing:
        names = shared.first_of(missing, MAX_NAMED)
        yield f"  these queues do not exist; distribution retries when their tasks are due: {names}"
    if unnamed:
        yield (
            "  these queues are not bound: the application does not have them. Their messages "
            "wait until the queues are bound, but become undeliverable rabbitdelay_retry_for (a "
            "day) after they are due. Start a worker that consumes from the queues, call "
            "celery_rabbitdelay.kombu.bind_destination, or pass --allow: "
            f"{shared.first_of(unnamed, MAX_NAMED)}"
        )


def broker_at(application: celery.Celery, url: str) -> Connection:
    """Return an unopened connection to a broker other than the application's broker.

    An ``amqps://`` URL uses the application's ``broker_use_ssl``, with the URL's host as
    ``server_hostname``; any other URL uses no TLS.

    Raises:
        click.UsageError: The URL is malformed, or not a URL of RabbitMQ.
    """
    shown = shown_url.without_password(url)
    if "@" in url and "://" not in url:
        raise click.UsageError(f"{shown!r} is not a URL such as amqp://host")
    tls, own = application.conf.broker_use_ssl, "server_hostname"
    if isinstance(tls, Mapping):
        # A copy: kombu replaces None in the dict by the host of the connection.
        tls = {name: None if name == own else each for name, each in tls.items()}
    ssl = (tls or True) if url.startswith("amqps:") else False
    connect = partial(application.connection_for_write, url, ssl=ssl)
    return shared.checked_connection(connect, repr(shown))


@contextmanager
def set_by_ctrl_c(stopping: Event) -> Iterator[None]:
    """Set an event at Ctrl-C or SIGTERM; a second signal ends the command as usual."""

    def stop(number: int, frame: object) -> None:
        signal.signal(number, former[signal.Signals(number)])
        stopping.set()

    former = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
