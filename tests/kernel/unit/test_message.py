"""The messages that a producer makes: their parts, their size, and how long they are tried."""

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import amqp
import pytest
from kombu import Connection, Queue
from kombu.compression import encoders
from kombu.exceptions import OperationalError

from celery_rabbitdelay import Celery
from celery_rabbitdelay.app import pipelines, task_sending
from celery_rabbitdelay.app.pipelines import MIN_TIMEOUT
from celery_rabbitdelay.app.task_sending import DelayedTaskProducer
from celery_rabbitdelay.exceptions import MessageTooLarge
from celery_rabbitdelay.kombu import DelayedProducer, Destination, Due, Publisher, Topology
from celery_rabbitdelay.levels.headers import DelayHeaders
from celery_rabbitdelay.publishing.message import (
    Content,
    Publication,
    SharedProperties,
    WaitingMessage,
    body_of,
    encoded,
)
from celery_rabbitdelay.publishing.publish_loop import DEFAULT_POLICY, PublishPolicy
from tests.kernel.unit.clock import Clock

TOPOLOGY = Topology()
MODULES = ("check-in", "distribution")
BEYOND = TOPOLOGY.layout.capacity_ms / 1000 + 60

STRAIGHT = Destination(Queue("q"), "", "q")
FAN_OUT = Destination(None, "news", "")


@pytest.mark.parametrize(
    ("properties", "task_id"),
    [
        ({"correlation_id": "4d5e", "message_id": "other"}, "4d5e"),
        ({"correlation_id": "", "message_id": "4d5e"}, "4d5e"),
        ({"message_id": 7}, "7"),
        ({}, "3421780262"),  # CRC-32's check value, https://reveng.sourceforge.io/crc-catalogue
    ],
)
def test_a_message_without_an_id_has_one_of_its_body(properties: Any, task_id: str) -> None:
    assert WaitingMessage(b"123456789", properties, DelayHeaders()).task_id == task_id


@pytest.mark.parametrize("correlation_id", [None, "4d5e", "", "x" * 255])
@pytest.mark.parametrize(
    "value",
    ["", "Größe", "\ud800", 7, -7, 2**31 - 1, 2**31, -(2**31), 2**62, True, None, 1.5, ["a", {}]],
)
def test_shared_properties_are_encoded_as_py_amqp_does(
    value: object, correlation_id: str | None
) -> None:
    shared: dict[str, object] = {"lang": "py", "retries": 0}
    properties: dict[str, object] = {"priority": 3, "content_type": "text/plain", "app_id": "shop"}
    if correlation_id is not None:
        properties["correlation_id"] = correlation_id
    own = {"id": "4d5e", "own": value}
    written = SharedProperties(shared, properties).encode(own, correlation_id)
    assert written == encoded({**properties, "application_headers": {**shared, **own}})


def test_a_correlation_id_that_is_too_long_is_refused_as_py_amqp_does() -> None:
    shared = SharedProperties({}, {"correlation_id": ""})
    with pytest.raises(struct.error):
        shared.encode({}, "x" * 256)


@pytest.mark.parametrize(
    ("text", "encoding", "body"),
    [
        ("Größe", None, "Größe".encode()),
        ("Größe", "latin-1", b"Gr\xf6\xdfe"),
        # A body that was empty is a text, whatever a stranger calls its encoding.
        ("", "unknown", b""),
        ("", "a\0b", b""),
        # This encoding decodes some bytes to a text that it cannot encode.
        ("-" * 64, "idna", b"-" * 64),
    ],
)
def test_a_body_that_py_amqp_has_decoded_is_encoded_as_it_was(
    text: str, encoding: str | None, body: bytes
) -> None:
    message = amqp.Message(text, content_encoding=encoding)
    assert body_of(message) == body
    assert Content.of(message).body == body


def make(
    size: int, destination: Destination, delay: float = 5, bound: int | None = 1000, **options: Any
) -> int:
    """Make a message; return the bytes of its body."""
    publisher = Publisher(Connection("amqp://"))
    producer = DelayedProducer(publisher, TOPOLOGY, modules=MODULES, max_message_bytes=bound)
    given = {"content_type": "application/octet-stream", "content_encoding": "binary", **options}
    made = producer.delayed_message(b"x" * size, destination, Due.after(delay), **given)
    return len(made.message.body)


@pytest.mark.parametrize(
    ("destination", "options"),
    [
        (FAN_OUT, {}),
        (STRAIGHT, {"priority": 9}),
        # Check-in reads it after each round of meditation.
        (STRAIGHT, {"delay": BEYOND}),
        # A compressed body counts as what it is decompressed to, also where no module reads it.
        *((STRAIGHT, {"compression": each}) for each in encoders()),
    ],
)
def test_the_sender_refuses_what_no_module_or_worker_takes(
    destination: Destination, options: Any
) -> None:
    assert 0 < make(1000, destination, **options) <= 1000
    with pytest.raises(
        MessageTooLarge, match="1,001 bytes is larger than rabbitdelay_max_mes"
    ) as e:
        make(1001, destination, **options)
    assert (e.value.size, e.value.bound) == (1001, 1000)
    assert isinstance(e.value, OperationalError)
    assert 0 < make(1001, destination, bound=None, **options) <= 1001
    # What goes straight to a queue may be as large as the broker allows.
    assert make(100_000, STRAIGHT) == 100_000


class Failing(Publisher):
    """Keeps how long publishing may take, and fails after 6 s. A fake: there is no broker."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(Connection("amqp://"))
        self.clock = clock
        self.timeouts: list[float] = []

    def publish(
        self, publication: Publication, policy: PublishPolicy = DEFAULT_POLICY, **_: object
    ) -> None:
        """Publish nothing."""
        self.timeouts.append(policy.timeout)
        self.clock.now += 6.0
        raise OperationalError("no broker")


@pytest.mark.parametrize(
    ("given", "timeouts"),
    # Celery 5.7 sends a callback again; all attempts share one timeout.
    [(None, [28, 20, 12, 4, MIN_TIMEOUT]), (5, [3, MIN_TIMEOUT])],
)
def test_the_wait_for_a_publisher_and_former_attempts_count(
    monkeypatch: pytest.MonkeyPatch, given: Any, timeouts: list[float]
) -> None:
    clock, app = Clock(), Celery("shop", set_as_current=False)
    publisher = Failing(clock)

    @contextmanager
    def borrowed(*_: object) -> Iterator[Publisher]:
        clock.now += 2.0
        yield publisher

    for module in (task_sending, pipelines):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(pipelines, "borrowed_publisher", borrowed)
    due, options = Due.after(60), {"task_id": "task"}
    producer = DelayedTaskProducer(app.rabbitdelay, "remind", due, options)
    for _ in timeouts:
        with pytest.raises(OperationalError):
            producer.publish("body", exchange="", routing_key="celery", confirm_timeout=given)
    assert publisher.timeouts == pytest.approx(timeouts)
