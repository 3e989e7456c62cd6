"""The undocumented parts of py-amqp that ``wire.py`` and ``amqp_methods.py`` use exist.

Each test fails with a sentence that says which name has moved.
"""

from __future__ import annotations

import inspect
from importlib.metadata import version
from typing import Any

import amqp
import pytest
from amqp import abstract_channel, method_framing, serialization, spec, transport
from amqp import channel as amqp_channel
from amqp.abstract_channel import AbstractChannel
from amqp.exceptions import ChannelError

VERSION = version("amqp")
# An untyped name, because the private ones are in no stub.
Channel: Any = amqp_channel.Channel
ABSTRACT_TRANSPORT: Any = vars(transport)["_AbstractTransport"]


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (amqp.Message, "_serialize_properties"),
        (amqp.Message, "inbound_header"),
        (amqp.Message, "PROPERTIES"),
        (amqp.Connection, "blocking_read"),
        (amqp.Connection, "on_inbound_frame"),
        (ABSTRACT_TRANSPORT, "having_timeout"),
        (ABSTRACT_TRANSPORT, "read_frame"),
        (ABSTRACT_TRANSPORT, "write"),
        (method_framing, "frame_handler"),
        (Channel, "basic_cancel"),
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
        "blocking_read",
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


@pytest.mark.parametrize(
    ("function", "parameters"),
    [
        (AbstractChannel.send_method, ["sig", "format", "args"]),
        (AbstractChannel.wait, ["method", "returns_tuple"]),
    ],
    ids=["send_method", "wait"],
)
def test_a_channel_of_amqp_sends_and_awaits_single_methods(
    function: Any, parameters: list[str]
) -> None:
    missing = set(parameters) - inspect.signature(function).parameters.keys()
    assert not missing, (
        f"amqp's {function.__qualname__} no longer takes {sorted(missing)}: "
        "publishing/amqp_methods.py pipelines passive declarations with it"
    )


@pytest.mark.parametrize(
    ("declare", "answer", "written"),
    [
        (Channel.queue_declare, spec.Queue.DeclareOk, "BsbbbbbF"),
        (Channel.exchange_declare, spec.Exchange.DeclareOk, "BssbbbbbF"),
    ],
    ids=["queue", "exchange"],
)
def test_amqp_writes_a_declaration_as_ours_do(
    declare: Any, answer: tuple[int, int], written: str
) -> None:
    writes = inspect.signature(declare).parameters["argsig"].default
    assert writes == written, (
        f"amqp's {declare.__qualname__} now writes its arguments as {writes!r}: find_queues and "
        f"find_exchanges of publishing/amqp_methods.py write {written!r}"
    )
    assert answer in Channel._METHODS, (
        f"amqp's Channel no longer reads the method {answer}, for which amqp_methods.py waits"
    )


def test_amqp_opens_a_channel_again_that_the_broker_has_closed() -> None:
    assert "self._do_revive()" in inspect.getsource(Channel._on_close), (
        "amqp's Channel._on_close no longer calls _do_revive: find_queues and find_exchanges of "
        "publishing/amqp_methods.py go on with the channel after NOT_FOUND"
    )
