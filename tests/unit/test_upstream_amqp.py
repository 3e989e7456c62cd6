"""The parts of py-amqp that are not documented, and that ``publishing/wire.py`` uses, exist.

Each test fails with a sentence that says which name has moved.
"""

from __future__ import annotations

import inspect
from importlib.metadata import version
from typing import Any

import amqp
import pytest
from amqp import abstract_channel, method_framing, serialization, spec, transport
from amqp.exceptions import ChannelError

VERSION = version("amqp")
ABSTRACT_TRANSPORT: Any = vars(transport)["_AbstractTransport"]


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (amqp.Message, "_serialize_properties"),
        (amqp.Message, "inbound_header"),
        (amqp.Message, "PROPERTIES"),
        (amqp.Connection, "on_inbound_frame"),
        (ABSTRACT_TRANSPORT, "having_timeout"),
        (ABSTRACT_TRANSPORT, "read_frame"),
        (ABSTRACT_TRANSPORT, "write"),
        (method_framing, "frame_handler"),
        (serialization, "dumps"),
        (spec.Basic, "Publish"),
        (spec.Exchange, "Declare"),
        (amqp.Channel, "confirm_select"),
    ],
)
def test_the_names_that_we_use_exist(owner: Any, name: str) -> None:
    where = getattr(owner, "__qualname__", None) or owner.__name__
    assert hasattr(owner, name), f"py-amqp {VERSION} has no {where}.{name} any more"


def test_a_connection_has_the_attributes_that_we_use() -> None:
    source = inspect.getsource(amqp.Connection)
    for name in (
        "frame_max",
        "bytes_sent",
        "bytes_recv",
        "on_blocked",
        "on_unblocked",
        "transport",
        "frame_handler",
    ):
        assert f"self.{name}" in source or f"{name}=" in source, (
            f"py-amqp {VERSION} has no Connection.{name} any more"
        )


def test_a_channel_has_the_attributes_that_we_use() -> None:
    source = inspect.getsource(amqp.Channel) + inspect.getsource(abstract_channel)
    for name in ("channel_id", "is_open", "auto_decode", "events", "connection"):
        assert f"self.{name}" in source, f"py-amqp {VERSION} has no Channel.{name} any more"
    for event in ("basic_ack", "basic_nack", "basic_return"):
        assert f"'{event}'" in source or f"events['{event}']" in source, (
            f"py-amqp {VERSION} has no channel event {event!r} any more"
        )


def test_an_error_of_a_channel_says_which_method_failed() -> None:
    error: Any = ChannelError("text", (60, 40))
    assert error.method_sig == spec.Basic.Publish, (
        f"py-amqp {VERSION} does not keep the method in ChannelError.method_sig any more"
    )
