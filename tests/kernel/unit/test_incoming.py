"""What the frames of a message say that nobody can read, or hold."""

from struct import pack
from types import SimpleNamespace
from typing import Any

import amqp

from celery_rabbitdelay.levels.headers import UNREADABLE, UNREADABLE_PROPERTIES
from celery_rabbitdelay.modules.deliveries import LATEST, HeldBytes
from celery_rabbitdelay.publishing.message import Content
from celery_rabbitdelay.publishing.wire import Seen, _frame_handler


class Line:
    """A connection that frames arrive on.

    Attributes:
        came: The messages that arrived, with their method and its arguments.
        connection: What stands in for py-amqp's connection: it counts frames.
    """

    def __init__(self, max_bytes: int | None = None) -> None:
        self.came: list[tuple[Any, bytes, Any]] = []
        self.connection = SimpleNamespace(bytes_recv=0)
        self._handle = _frame_handler(
            self.connection, lambda _, *rest: self.came.append(rest), max_bytes
        )

    def deliver(self, properties: bytes, *chunks: bytes, channel: int = 1) -> None:
        names = b"\1t" + pack(">QB", 1, 0) + b"\1e\1k"
        self._handle((1, channel, pack(">HH", 60, 60) + names))
        size = sum(map(len, chunks))
        self._handle((2, channel, pack(">HHQ", 60, 0, size) + properties))
        for chunk in chunks:
            self._handle((3, channel, chunk))


def properties(**headers: Any) -> bytes:
    return Content.of(amqp.Message(b"", application_headers=headers)).properties


def nested(depth: int) -> bytes:
    field = b"V"
    for _ in range(depth):
        field = b"A" + pack(">I", len(field)) + field
    table = b"\1n" + field
    return pack(">HI", 0x2000, len(table)) + table


def test_a_body_that_is_too_large_is_never_held() -> None:
    line = Line(max_bytes=10)
    told = properties(mine=1)
    line.deliver(told, b"12345", b"67890")
    line.deliver(told, b"12345", b"67890", b"x")
    line.deliver(told, b"12345")
    bodies = [(message.body, message.rabbitdelay_seen.skipped_bytes) for _, _, message in line.came]
    assert bodies == [(b"1234567890", None), (b"-", 11), (b"12345", None)]
    assert all(message.headers == {"mine": 1} for _, _, message in line.came)
    # py-amqp takes a connection on which it counts no frames for a dead one.
    assert line.connection.bytes_recv == 3 * 2 + 2 + 3 + 1


def test_tables_nested_ten_thousand_deep_cost_their_message_alone() -> None:
    line = Line(max_bytes=10)
    deep = nested(10_000)
    line.deliver(deep, b"deep")
    # The next one, on another channel.
    line.deliver(properties(**{"mine": 1, UNREADABLE: "forged"}), b"next", channel=2)
    line.deliver(deep, b"both, this one too")
    first, second, third = (message for _, _, message in line.came)
    assert "RecursionError" in str(first.rabbitdelay_seen.unreadable)
    assert first.headers[UNREADABLE_PROPERTIES] == deep
    # A sender forges nothing that the frames say.
    assert second.rabbitdelay_seen == Seen(properties_bytes=len(properties(**second.headers)))
    assert third.rabbitdelay_seen.skipped_bytes == 18
    assert third.rabbitdelay_seen.unreadable


def test_the_names_of_a_returned_message_are_made_readable() -> None:
    line = Line()
    arguments = pack(">HH", 60, 50) + b"\x01\x38\x08NO_ROUTE\1\xff\2k\xff"
    line._handle((1, 1, arguments))
    line._handle((2, 1, pack(">HHQ", 60, 0, 0) + properties()))
    ((method, payload, message),) = line.came
    assert (method, payload) == ((60, 50), arguments.replace(b"\xff", b"?"))
    assert message.rabbitdelay_seen.unreadable == r"its exchange is b'\xff', which is not UTF-8"


def test_a_budget_of_bytes_takes_one_message_of_any_size() -> None:
    held = HeldBytes(100)
    assert held.take(1_000)
    held.held = 60
    assert not held.take(41)
    assert held.take(40)
    assert not held.take(1)
    assert held.held == 100
    held.held = 51
    assert not held.may_go_on
    held.held = 50
    assert held.may_go_on


def test_as_many_of_the_largest_of_late_fit_as_take_half_of_the_budget() -> None:
    found = []
    for size in (1, 5, 26, 1_000):
        held = HeldBytes(100)
        held.take(size)
        found.append(held.fitting)
    assert found == [50, 10, 1, 1]
    # The largest is forgotten after two hundred smaller ones.
    fitting = []
    for _ in range(LATEST + 1):
        held.take(1)
        fitting.append(held.fitting)
    assert fitting == [1] * 199 + [50] * 2
