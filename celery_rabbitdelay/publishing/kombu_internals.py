"""Functions around private and undocumented parts of kombu and py-amqp.

If kombu changes such a part, tests/kernel/unit/test_upstream.py fails with the part's name.
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
    # A user's type checker does not know that kombu's class is a subclass of this one.
    from functools import cached_property as cached_property
else:
    from kombu.utils.objects import cached_property as cached_property

#: The options of :func:`serialized`.
SERIALIZING: Final = ("serializer", "content_type", "content_encoding", "compression")

#: The number of bytes that are passed to the brotli decoder at a time.
_GIVEN_TO_BROTLI: Final = 8

#: The number of passive declarations that are sent before their answers are read. An answer has
#: some 50 bytes, so the answers of a batch fit into the socket's buffers, and the broker never has
#: to stop writing while this side is writing too.
PASSIVE_BATCH: Final = 200


class Counts(NamedTuple):
    """The counts that RabbitMQ reports for a queue.

    Attributes:
        messages: The number of messages that are ready.
        consumers: The number of consumers.
    """

    messages: int
    consumers: int


def find_queues(channel: Channel, names: Sequence[str]) -> list[Counts | None]:
    """Return the counts of queues, in their order; None for a queue that does not exist.

    Args:
        channel: A channel without other users.
        names: The names of the queues.

    Raises:
        amqp.exceptions.ChannelError: The broker refuses the check; the error names the queue.
    """
    found = _ask_in_batches(channel, names, spec.Queue, "BsbbbbbF")
    return [None if answer is None else Counts(*answer[1:]) for answer in found]


def find_exchanges(channel: Channel, names: Sequence[str]) -> list[bool]:
    """Return whether exchanges exist, in their order.

    Args:
        channel: A channel without other users.
        names: The names of the exchanges.

    Raises:
        amqp.exceptions.ChannelError: The broker refuses the check; the error names the exchange.
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
    """Declare entities passively; return the arguments of each answer, None for NOT_FOUND.

    If an entity is missing, the broker closes the channel and ignores the following declarations.
    py-amqp reopens the channel before it raises the error. The ignored declarations are then sent
    again in batches that grow from one, because further entities are probably missing.
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
                # py-amqp handles one method per wait, so no answer is lost between two waits.
                answers.append(channel.wait(methods.DeclareOk, returns_tuple=True))
        except NotFound as missing:
            if missing.method_sig != methods.Declare:
                raise  # for another channel of the connection
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
        producer: The producer; its serializer is the default.
        body: The body.
        headers: The message's headers; compression adds one.
        **how: Options of kombu: serializer and compression, or the content type and the content
            encoding of a serialized body. See :data:`SERIALIZING`.

    Returns:
        The body, its content type and its content encoding.
    """
    private: Any = producer
    data, content_type, content_encoding = private._prepare(body, headers=headers, **how)
    if isinstance(data, str):
        data = data.encode(content_encoding or "utf-8")  # as py-amqp does
    return data, content_type, content_encoding


def decompressed_size(body: bytes, name: str, most: int) -> int:
    """Return the decompressed size of a body; counting stops at ``most + 1``.

    Return 0 for a compression that the application has registered itself. The body is not trusted:
    an unknown compression or an invalid body raises errors of many kinds.

    Args:
        body: The body.
        name: The value of the header ``compression``.
        most: The maximum bytes to hold in memory.
    """
    decoder = compressions.get_decoder(name)
    if decoder is zlib.decompress:
        return len(zlib.decompressobj().decompress(body, most + 1))
    for each in ("bz2", "lzma", "zstd", "brotli"):
        module: Any = getattr(compressions, each, None)
        # Before 5.7, kombu has its own function for zstd.
        kombus = getattr(compressions, f"{each}_decompress", getattr(module, "decompress", None))
        if decoder is kombus and each != "brotli":
            return len(module.open(BytesIO(body)).read(most + 1))
        if decoder is kombus:
            # The decoder does not limit its output: three bytes may become 16 MiB.
            stream, size = module.Decompressor(), 0
            for begin in range(0, len(body), _GIVEN_TO_BROTLI):
                size += len(stream.process(body[begin : begin + _GIVEN_TO_BROTLI]))
                if size > most:
                    return most + 1
            return size
    return 0


def is_kombus_json(serializer: str | None) -> bool:
    """Return whether a serializer is kombu's own JSON, not a replacement with the same name."""
    codec = registry._encoders.get(serializer)
    return codec is not None and codec.encoder is json.dumps


def may_be_decoded(content_type: object) -> bool:
    """Return whether kombu has a serializer for a content type."""
    return content_type in registry.type_to_name


def declared_entities(connection: Connection) -> set[object]:
    """Return the set of entities declared on a connection; kombu clears it when it reconnects."""
    declared: set[object] = connection.declared_entities  # type: ignore[assignment]
    return declared


def declared_arguments(queue: Queue) -> dict[str, object]:
    """Return the arguments of a queue's declaration, including those from its attributes."""
    names = ("expires", "message_ttl", "max_length", "max_length_bytes", "max_priority")
    attributes = {name: getattr(queue, name) for name in names}
    return dict(to_rabbitmq_queue_arguments(queue.queue_arguments or {}, **attributes))


#: The maximum seconds for opening a connection that has no ``connect_timeout``.
CONNECT_TIMEOUT: Final = 5.0


def connect(connection: Connection, deadline: float | None = None) -> None:
    """Open a connection, unless it is open, to the first broker of its list that answers.

    Args:
        connection: The connection.
        deadline: When to give up, on the clock of :func:`time.monotonic`. The remaining time is
            divided among the remaining brokers of the list. None: no deadline.
    """
    if connection.connected:
        return
    own_timeout = connection.connect_timeout
    try:
        for hosts_left in range(max(len(connection.alt), 1), 0, -1):
            if deadline is not None:  # a switch to the next host resets kombu's timeout
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
    """Connect to the current broker of a connection in one attempt; clear the socket's timeout.

    Over TLS, py-amqp leaves the timeout for connecting on the socket, so it would also apply to
    every later answer of a busy broker.

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
        # By default, kombu waits two seconds and retries.
        connection.ensure_connection(max_retries=0, reraise_as_library_errors=False)
    except BaseException:
        for each in opened:  # kombu does not close it
            _close_socket(each)
        raise
    finally:
        del transport.Connection
    connection.connection.transport.sock.settimeout(None)


def drop_connection(connection: Connection) -> None:
    """Close a connection's socket without the closing handshakes of AMQP and TLS.

    The connection can be opened again.
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


#: Errors that leave a connection usable: the broker's refusals, after which py-amqp reopens the
#: channel, and errors of this package, which are raised after a broken connection was dropped.
ANSWERS: Final = (ChannelError, RabbitDelayError)


@contextmanager
def conversation(
    connection: Connection, close: Callable[[], object] | None = None
) -> Iterator[None]:
    """Drop a connection at once if a block that uses it is interrupted.

    A soft time limit, a signal or the end of a greenlet may interrupt the block between a request
    and its answer. The next request would then receive that answer, and a regular close would wait
    for it.

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
