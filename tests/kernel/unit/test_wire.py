"""The frames of a message are those that py-amqp itself writes."""

from types import SimpleNamespace
from typing import Any

import amqp
from amqp import spec
from amqp.method_framing import frame_writer
from amqp.serialization import dumps
from hypothesis import given, settings
from hypothesis import strategies as st

from celery_rabbitdelay.publishing import wire
from celery_rabbitdelay.publishing.message import Content

#: The least that a peer may ask for: frame-min-size of AMQP 0-9-1.
FRAME_MIN = 4096


class Transport:
    """Keeps what is written, in place of a socket: nothing else can tell where a write ends."""

    def __init__(self) -> None:
        self.written = b""

    def write(self, data: Any) -> None:
        self.written += bytes(data)


def by_pyamqp(
    channel: int, exchange: str, routing_key: str, message: amqp.Message, frame_max: int
) -> bytes:
    """What :meth:`amqp.Channel.basic_publish` puts on the wire, mandatory."""
    transport = Transport()
    connection = SimpleNamespace(frame_max=frame_max, bytes_sent=0)
    arguments = dumps("Bssbb", (0, exchange, routing_key, True, False))
    write: Any = frame_writer(connection, transport)
    write(1, channel, spec.Basic.Publish, arguments, message)
    return transport.written


# AMQP's short strings have at most 255 bytes, and a character up to four.
words = st.text(max_size=63)
header_values = st.recursive(
    words
    | st.binary(max_size=9)
    | st.integers(-(2**63), 2**63 - 1)
    | st.sampled_from([-(2**31), -(2**31) + 1, 2**31 - 1, 2**31])
    | st.floats(allow_nan=False)
    | st.booleans()
    | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=5,
)
properties = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(("content_type", "correlation_id", "reply_to", "expiration"), words),
        **dict.fromkeys(("message_id", "type", "user_id", "app_id", "cluster_id"), words),
        "content_encoding": st.sampled_from(["utf-8", "binary", "utf-16"]),
        "application_headers": st.dictionaries(words, header_values, max_size=5),
        "delivery_mode": st.sampled_from([1, 2]),
        "priority": st.integers(0, 255),
        "timestamp": st.integers(0, 2**63 - 1),
    },
)
bodies = (
    st.binary(max_size=200)
    | st.text(max_size=200)
    | st.integers(FRAME_MIN - 12, FRAME_MIN + 1).map(lambda size: b"x" * size)
    | st.integers(FRAME_MIN - 60, 3 * FRAME_MIN).map(lambda size: b"x" * size)
)


@settings(max_examples=50)
@given(
    st.integers(1, 65_535),
    words,
    words | st.binary(max_size=255),
    properties,
    bodies,
    st.just(FRAME_MIN) | st.integers(FRAME_MIN, 3 * FRAME_MIN) | st.just(131_072),
)
def test_the_frames_of_a_message_are_those_of_py_amqp(
    channel: int,
    exchange: str,
    routing_key: Any,
    told: dict[str, Any],
    body: bytes | str,
    frame_max: int,
) -> None:
    if isinstance(body, str) and told.get("content_encoding") == "binary":
        del told["content_encoding"]
    content = Content.of(amqp.Message(body, **told))
    ours = wire.publish_frames(channel, exchange, routing_key, content, frame_max)
    assert ours == by_pyamqp(channel, exchange, routing_key, amqp.Message(body, **told), frame_max)
