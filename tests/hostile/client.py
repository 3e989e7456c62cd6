"""Publishes hostile messages frame by frame, and says which ones the broker has confirmed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from struct import pack
from typing import Any, Final

from amqp.exceptions import AMQPError
from kombu import Connection

from celery_rabbitdelay.publishing.wire import FRAME_OVERHEAD, Wire
from tests.hostile.kinds import Hostile

#: Messages that are written before their confirms are waited for.
BATCH: Final = 100

#: Seconds until they have to be there.
PATIENCE: Final = 120.0


class Client:
    """A client of RabbitMQ that checks nothing of what it writes.

    Args:
        url: The broker.

    Attributes:
        confirmed: The numbers of the messages that the broker has taken.
        refused: Those for which it has closed the channel or the connection.
        unexpected: Why it has done that for others than those that may be refused.
    """

    def __init__(self, url: str) -> None:
        self.confirmed: set[int] = set()
        self.refused: set[int] = set()
        self.unexpected: list[str] = []
        self._url = url

    def publish(self, messages: Iterable[Hostile]) -> None:
        """Publish messages; those that the broker may refuse, each on a connection of its own."""
        connection = Connection(self._url)
        channel = _Confirmed(connection)
        for batch in _batches(messages):
            together = [each for each in batch if not each.is_refused]
            alone = [each for each in batch if each.is_refused]
            try:
                channel.publish(together)
            except (AMQPError, OSError) as error:
                # Some of them are published twice now.
                self.unexpected.append(repr(error))
                alone, together = batch, []
                connection.collect()
                connection = Connection(self._url)
                channel = _Confirmed(connection)
            self.confirmed |= {each.number for each in together}
            for each in alone:
                self._publish_alone(each)
        connection.release()

    def _publish_alone(self, message: Hostile) -> None:
        with Connection(self._url) as connection:
            try:
                _Confirmed(connection).publish([message])
            except (AMQPError, OSError):
                self.refused.add(message.number)
                connection.collect()
            else:
                self.confirmed.add(message.number)


class _Confirmed:
    """A channel in confirm mode."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        channel: Any = connection.default_channel
        channel.confirm_select()
        channel.events["basic_ack"].add(self._on_ack)
        self._number: int = channel.channel_id
        self._wire = Wire(connection)
        self._last_tag = 0
        self._unconfirmed: set[int] = set()

    def publish(self, messages: list[Hostile]) -> None:
        frames = [_frames(self._number, each, self._wire.frame_max) for each in messages]
        first, self._last_tag = self._last_tag + 1, self._last_tag + len(messages)
        self._unconfirmed.update(range(first, self._last_tag + 1))
        self._wire.write(b"".join(frames), PATIENCE)
        while self._unconfirmed:
            self._connection.drain_events(timeout=PATIENCE)

    def _on_ack(self, tag: int, multiple: bool) -> None:
        upto = [each for each in self._unconfirmed if each <= tag] if multiple else [tag]
        self._unconfirmed.difference_update(upto)


def _batches(messages: Iterable[Hostile]) -> Iterator[list[Hostile]]:
    batch: list[Hostile] = []
    size = 0
    for message in messages:
        batch.append(message)
        size += len(message.body) + len(message.properties)
        if len(batch) == BATCH or size > 2**20:
            yield batch
            batch, size = [], 0
    yield batch


def _frames(channel: int, message: Hostile, frame_max: int) -> bytes:
    method = pack(">HHH", 60, 40, 0) + _short(message.exchange) + _short(message.key) + b"\0"
    header = pack(">HHQ", 60, 0, len(message.body)) + message.properties
    most = frame_max - FRAME_OVERHEAD
    bodies = [message.body[at : at + most] for at in range(0, len(message.body), most)]
    parts = [(1, method), (2, header), *((3, body) for body in bodies)]
    return b"".join(pack(">BHI", kind, channel, len(p)) + p + b"\xce" for kind, p in parts)


def _short(name: bytes) -> bytes:
    return bytes((len(name),)) + name
