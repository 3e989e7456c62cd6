"""A fake: a broker in this process that speaks AMQP's frames and answers as a test says.

It stands in for RabbitMQ where each trouble of publishing is played, at an exact message and
without a wait. ``test_publisher`` has the answers of the real one.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from threading import Thread
from types import TracebackType
from typing import Any, Final

from amqp import spec
from amqp.serialization import dumps, loads
from kombu import Connection

FRAME_MAX: Final = 131_072
METHOD, HEADER, BODY, HEARTBEAT = 1, 2, 3, 8

#: What is answered to a method: another one, and its arguments with their layout.
ANSWERS: Final[dict[tuple[int, int], tuple[tuple[int, int], str, tuple[Any, ...]]]] = {
    spec.Connection.StartOk: (spec.Connection.Tune, "BlB", (2047, FRAME_MAX, 0)),
    spec.Connection.Open: (spec.Connection.OpenOk, "s", ("",)),
    spec.Connection.Close: (spec.Connection.CloseOk, "", ()),
    spec.Channel.Open: (spec.Channel.OpenOk, "S", ("",)),
    spec.Channel.Close: (spec.Channel.CloseOk, "", ()),
    spec.Confirm.Select: (spec.Confirm.SelectOk, "", ()),
    spec.Exchange.Declare: (spec.Exchange.DeclareOk, "", ()),
}


class Session:
    """One connection of a client, as the broker sees it.

    Attributes:
        published: The bodies of the messages that came on it.
        tag: How many came on its channel since confirms were asked for.
    """

    def __init__(self, broker: FrameBroker, peer: socket.socket) -> None:
        self.published: list[str] = []
        self.tag = 0
        self._broker = broker
        self._peer = peer
        # What is written has arrived.
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._stream = peer.makefile("rb")
        self._channel = 0
        #: Whether the broker has closed the channel, and the client has not yet said that it knows.
        self._is_closing = False

    def send(
        self, method: tuple[int, int], layout: str = "", arguments: tuple[Any, ...] = ()
    ) -> None:
        """Send a method, on the channel that was last used unless it is one of the connection."""
        payload = struct.pack(">HH", *method) + dumps(layout, arguments)
        self.send_frame(METHOD, self._channel if method[0] != 10 else 0, payload)

    def send_frame(self, kind: int, channel: int = 0, payload: bytes = b"") -> None:
        self._peer.sendall(struct.pack(">BHI", kind, channel, len(payload)) + payload + b"\xce")

    def ack(self) -> None:
        self.send(spec.Basic.Ack, "Lb", (self.tag, False))

    def nack(self) -> None:
        self.send(spec.Basic.Nack, "Lb", (self.tag, False))

    def give_back(self) -> None:
        """Say that no queue takes the last message, and acknowledge it, as RabbitMQ does."""
        self.send(spec.Basic.Return, "Bsss", (312, "NO_ROUTE", *self._address))
        size = struct.pack(">HHQ", 60, 0, len(self._body))
        self.send_frame(HEADER, self._channel, size + self._properties)
        self.send_frame(BODY, self._channel, self._body)
        self.ack()

    def close_channel(self, code: int, text: str) -> None:
        self._is_closing = True
        self.send(spec.Channel.Close, "BsBB", (code, text, *spec.Basic.Publish))

    def close_connection(self, code: int, text: str) -> None:
        self.send(spec.Connection.Close, "BsBB", (code, text, 0, 0))

    def block(self) -> None:
        self.send(spec.Connection.Blocked, "s", ("low on memory",))

    def unblock(self) -> None:
        self.send(spec.Connection.Unblocked)

    def wake(self) -> None:
        """Send what needs no answer, so that a client that reads looks at its clock."""
        self.send_frame(HEARTBEAT)

    def lose_connection(self) -> None:
        self._peer.shutdown(socket.SHUT_RDWR)

    def serve(self) -> None:
        """Answer until the connection ends."""
        with suppress(OSError, struct.error), self._peer:
            self._stream.read(8)
            capabilities = {
                "publisher_confirms": True,
                "basic.nack": True,
                "connection.blocked": True,
                "authentication_failure_close": True,
            }
            start = (0, 9, {"capabilities": capabilities}, "PLAIN", "en_US")
            self.send(spec.Connection.Start, "ooFSS", start)
            while True:
                kind, self._channel, size = struct.unpack(">BHI", self._stream.read(7))
                self._receive(kind, self._stream.read(size + 1)[:-1])

    def _receive(self, kind: int, payload: bytes) -> None:
        if kind == METHOD:
            self._on_method(struct.unpack_from(">HH", payload), payload)
        elif kind == HEADER:
            (self._left,) = struct.unpack_from(">Q", payload, 4)
            self._properties, self._body = payload[12:], b""
        elif kind == BODY:
            self._body += payload
        if kind in (HEADER, BODY) and len(self._body) == self._left and not self._is_closing:
            self.tag += 1
            self.published.append(self._body.decode())
            self._broker.answer(self, self.published[-1])

    def _on_method(self, method: Any, payload: bytes) -> None:
        if method == spec.Basic.Publish:
            (_, *self._address, _, _), _ = loads("Bssbb", payload, 4)
        elif method == spec.Channel.CloseOk:
            self._is_closing = False
        elif method == spec.Confirm.Select:
            self.tag = 0
        if not self._is_closing and method in self._broker.answers:
            self.send(*self._broker.answers[method])


class FrameBroker:
    """Listens on a port of its own while its block runs.

    Args:
        answer: Called with the connection and the body of each message, to answer it.

    Attributes:
        answers: What is answered to other methods; it is silent about one that is taken out.
        sessions: The connections that there were.
    """

    def __init__(self, answer: Callable[[Session, str], object]) -> None:
        self.answer = answer
        self.answers = dict(ANSWERS)
        self.sessions: list[Session] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._threads = [Thread(target=self._accept)]

    def connection(self, **options: Any) -> Connection:
        """Return a connection to it, which is not open."""
        port = self._listener.getsockname()[1]
        return Connection(f"amqp://guest:guest@127.0.0.1:{port}//", **options)

    @property
    def published(self) -> list[str]:
        """The bodies of all messages that came."""
        return [body for each in self.sessions for body in each.published]

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                self.sessions.append(Session(self, self._listener.accept()[0]))
                self._threads.append(Thread(target=self.sessions[-1].serve))
                self._threads[-1].start()

    def __enter__(self) -> FrameBroker:
        self._threads[0].start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for session in self.sessions:
            with suppress(OSError):
                session.lose_connection()
        for thread in self._threads:
            thread.join()
