"""The private and undocumented parts of kombu and py-amqp, each behind a function with its use.

When kombu moves one of them, tests/kernel/unit/test_upstream.py says which.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from io import BytesIO
from socket import SHUT_RDWR
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from amqp import spec
from amqp.exceptions import ChannelError, NotFound
from kombu import Connection, Producer, Queue
from kombu import compression as compressions
from kombu.serialization import registry  # type: ignore[attr-defined]
from kombu.transport.base import to_rabbitmq_queue_arguments  # type: ignore[attr-defined]
from kombu.transport.pyamqp import Channel
from kombu.utils import json

from celery_rabbitdelay.exceptions import RabbitDelayError

if TYPE_CHECKING:
    # kombu's is a subclass, of which a user's type checker knows nothing.
    from functools import cached_property as cached_property
else:
    from kombu.utils.objects import cached_property as cached_property

#: The options of :func:`serialized`.
SERIALIZING: Final = ("serializer", "content_type", "content_encoding", "compression")

#: Bytes that the decoder of brotli is given at a time.
_GIVEN_TO_BROTLI: Final = 8

#: How many passive declarations are sent before their answers are read. An answer has some 50
#: bytes, so those of one batch fit into the socket's buffers, and the broker never has to stop
#: writing while this side is writing too.
PASSIVE_BATCH: Final = 200


class Counts(NamedTuple):
    """The counts that RabbitMQ reports for a queue.

    Attributes:
        messages: How many messages are ready.
        consumers: How many consumers it has.
    """

    messages: int
    consumers: int


def find_queues(channel: Channel, names: Sequence[str]) -> list[Counts | None]:
    """Return the counts of queues, in their order; None for one that does not exist.

    Args:
        channel: A channel that nobody else uses.
        names: The names of the queues.

    Raises:
        amqp.exceptions.ChannelError: The broker refuses to say it; the message names the queue.
    """
    found = _ask_in_batches(channel, names, spec.Queue, "BsbbbbbF")
    return [None if answer is None else Counts(*answer[1:]) for answer in found]


def find_exchanges(channel: Channel, names: Sequence[str]) -> list[bool]:
    """Return whether exchanges exist, in their order.

    Args:
        channel: A channel that nobody else uses.
        names: The names of the exchanges.

    Raises:
        amqp.exceptions.ChannelError: The broker refuses to say it; the message names the exchange.
    """
    # The broker does not compare the type.
    found = _ask_in_batches(channel, names, spec.Exchange, "BssbbbbbF", "topic")
    return [answer is not None for answer in found]


def _ask_in_batches(
    channel: Channel,
    names: Sequence[str],
    methods: type[spec.Queue | spec.Exchange],
    layout: str,
    *types: str,
) -> list[tuple[Any, ...] | None]:
    """Declare passively; return the arguments of each answer, None for NOT_FOUND.

    For a missing object the broker closes the channel and ignores the questions behind it. py-amqp
    has opened the channel again when it raises the error, so they are asked again: one first and
    then ever more, because others are probably missing as well.
    """
    answers: list[tuple[object, ...] | None] = []
    size = PASSIVE_BATCH
    flags = (True, False, False, False, False)  # passive, ..., nowait
    while len(answers) < len(names):
        batch = names[len(answers) : len(answers) + size]
        for name in batch:
            channel.send_method(methods.Declare, layout, (0, name, *types, *flags, None))
        try:
            for _ in batch:
                # py-amqp handles one method at a time, so no answer is lost between two waits.
                answers.append(channel.wait(methods.DeclareOk, returns_tuple=True))
        except NotFound as missing:
            if missing.method_sig != methods.Declare:
                raise  # it closes another channel of the connection
            answers.append(None)
            size = 1
        else:
            size = min(size * 2, PASSIVE_BATCH)
    return answers


def serialized(
    producer: Producer,
    body: object,
    headers: dict[str, object],
    **how: object,
) -> tuple[bytes, str | None, str | None]:
    """Serialize and compress a body as :meth:`kombu.Producer.publish` does.

    Args:
        producer: The producer, whose serializer is the default.
        body: What to send.
        headers: The message's headers; compression adds one.
        **how: The names of kombu's serializer and compression; the content type and the content
            encoding of a body that is serialized already. See :data:`SERIALIZING`.

    Returns:
        The body, its content type and its content encoding.
    """
    private: Any = producer
    data, content_type, content_encoding = private._prepare(body, headers=headers, **how)
    if isinstance(data, str):
        data = data.encode(content_encoding or "utf-8")  # as py-amqp does
    return data, content_type, content_encoding


def decompressed_size(body: bytes, name: str, most: int) -> int:
    """Return to how many bytes kombu decompresses a body, counted no further than ``most + 1``.

    0 if the application has registered the compression itself. Anybody may have written the body:
    raises errors of many kinds if nobody has registered the compression, or if the body cannot be
    decompressed.

    Args:
        body: The body.
        name: What the header ``compression`` says.
        most: The bytes that may be held.
    """
    decoder = compressions.get_decoder(name)
    if decoder is zlib.decompress:
        return len(zlib.decompressobj().decompress(body, most + 1))
    for each in ("bz2", "lzma", "zstd", "brotli"):
        module: Any = getattr(compressions, each, None)
        # Before 5.7, kombu has a function of its own for zstd.
        kombus = getattr(compressions, f"{each}_decompress", getattr(module, "decompress", None))
        if decoder is kombus and each != "brotli":
            return len(module.open(BytesIO(body)).read(most + 1))
        if decoder is kombus:
            # It does not bound what it returns: each three bytes may become 16 MiB.
            stream, size = module.Decompressor(), 0
            for begin in range(0, len(body), _GIVEN_TO_BROTLI):
                size += len(stream.process(body[begin : begin + _GIVEN_TO_BROTLI]))
                if size > most:
                    return most + 1
            return size
    return 0


def is_kombus_json(serializer: str | None) -> bool:
    """Return whether a serializer is kombu's own JSON, and not another under that name."""
    codec = registry._encoders.get(serializer)
    return codec is not None and codec.encoder is json.dumps


def may_be_decoded(content_type: object) -> bool:
    """Return whether kombu knows a serializer whose bodies have a content type."""
    return content_type in registry.type_to_name


def declared_entities(connection: Connection) -> set[object]:
    """Return the set of what was declared on a connection; kombu empties it on a new one."""
    declared: set[object] = connection.declared_entities  # type: ignore[assignment]
    return declared


def declared_arguments(queue: Queue) -> dict[str, object]:
    """Return the arguments that a queue is declared with: its own, and those of its attributes."""
    names = ("expires", "message_ttl", "max_length", "max_length_bytes", "max_priority")
    attributes = {name: getattr(queue, name) for name in names}
    return dict(to_rabbitmq_queue_arguments(queue.queue_arguments or {}, **attributes))


#: Seconds that opening a connection may take, within a limit, if it sets none of its own.
CONNECT_TIMEOUT: Final = 5.0


def connect(connection: Connection, deadline: float | None = None) -> None:
    """Open a connection unless it is open, to the first broker of its list that answers.

    Args:
        connection: The connection.
        deadline: When to give up, on the clock of :func:`time.monotonic`. Each wait ends before
            that, so a broker that does not answer leaves time for the others of the list. None:
            each may take its own time.
    """
    if connection.connected:
        return
    own_timeout = connection.connect_timeout
    try:
        for hosts_left in range(max(len(connection.alt), 1), 0, -1):
            if deadline is not None:  # to switch to the next host resets kombu's timeout
                share = max(deadline - time.monotonic(), 0.001) / hosts_left
                connection.connect_timeout = min(own_timeout or CONNECT_TIMEOUT, share)
            try:
                open_connection(connection)
            except connection.recoverable_connection_errors:
                if hosts_left == 1:
                    raise
                connection.maybe_switch_next()
            else:
                return
    finally:
        connection.connect_timeout = own_timeout


def open_connection(connection: Connection) -> None:
    """Connect to the current one of a connection's brokers, in one attempt.

    Its answers are then waited for as long as they take, as is the rule. Over TLS, py-amqp leaves
    the limit for connecting on the socket: each answer of a busy broker would have to arrive within
    these seconds.

    Args:
        connection: The connection, which is not open.
    """
    transport: Any = connection.transport
    opened: list[object] = []

    def opening(**options: object) -> object:
        opened.append(type(transport).Connection(**options))
        return opened[0]

    transport.Connection = opening
    try:
        # Left to itself, kombu waits two seconds and tries again.
        connection.ensure_connection(max_retries=0, reraise_as_library_errors=False)
    except BaseException:
        for each in opened:  # kombu does not know it yet
            _close_socket(each)
        raise
    finally:
        del transport.Connection
    connection.connection.transport.sock.settimeout(None)


def drop_connection(connection: Connection) -> None:
    """Close a connection's socket without AMQP's handshake, or that of TLS.

    The object can be opened again.
    """
    private: Any = connection
    _close_socket(private._connection)
    connection.collect()


def _close_socket(connection: object) -> None:
    transport = getattr(connection, "_transport", None)
    if transport is not None and transport.sock is not None:
        transport.sock, dropped = None, transport.sock
        with suppress(OSError):
            dropped.shutdown(SHUT_RDWR)
        dropped.close()


#: Errors that leave a connection usable: the broker's answers, after which py-amqp has opened the
#: channel again, and errors of this package, which are raised once a broken connection is dropped.
ANSWERS: Final = (ChannelError, RabbitDelayError)


@contextmanager
def conversation(
    connection: Connection, close: Callable[[], object] | None = None
) -> Iterator[None]:
    """Drop a connection at once if a block that asks on it is ended by anything but an answer.

    A soft time limit, a signal or the end of a greenlet may strike between a question and its
    answer. The next question would get that answer, and closing in order would wait for it.

    Args:
        connection: The connection.
        close: Called at the end of the block, unless the connection is dropped.
    """
    close = close or bool
    try:
        try:
            yield
        except ANSWERS:
            close()
            raise
        close()
    except ANSWERS:
        raise
    except BaseException:
        drop_connection(connection)
        raise


@contextmanager
def closing(connection: Connection) -> Iterator[Connection]:
    """Close a connection at the end of a block; drop it at once if the block is interrupted."""
    with conversation(connection, connection.release):
        yield connection
