"""The names in other packages that this one relies on although their docs do not promise them.

A test that fails here names what has moved, and the file of ours that has to follow.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from amqp import channel as amqp_channel
from amqp import spec
from amqp.abstract_channel import AbstractChannel

# An untyped name, because the private ones are in no stub.
Channel: Any = amqp_channel.Channel

# amqp: publishing/wire.py, passive declarations


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
        "publishing/wire.py pipelines passive declarations with it"
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
        f"find_exchanges of publishing/wire.py write {written!r}"
    )
    assert answer in Channel._METHODS, (
        f"amqp's Channel no longer reads the method {answer}: publishing/wire.py waits for it"
    )


def test_amqp_opens_a_channel_again_that_the_broker_has_closed() -> None:
    assert "self._do_revive()" in inspect.getsource(Channel._on_close), (
        "amqp's Channel._on_close no longer calls _do_revive: find_queues and find_exchanges of "
        "publishing/wire.py go on with the channel after NOT_FOUND"
    )
