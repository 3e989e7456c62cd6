"""The undocumented parts of py-amqp that ``wire.py`` and ``kombu_internals.py`` use exist.

Each test fails with a sentence that says which name has moved.
"""

from __future__ import annotations

import inspect
from importlib.metadata import version
from typing import Any

import pytest
from amqp import channel as amqp_channel
from amqp import spec
from amqp.abstract_channel import AbstractChannel

VERSION = version("amqp")
# An untyped name, because the private ones are in no stub.
Channel: Any = amqp_channel.Channel


@pytest.mark.parametrize(
    ("function", "parameters"),
    [
        (AbstractChannel.send_method, ["sig", "format", "args"]),
        (AbstractChannel.wait, ["method", "returns_tuple"]),
    ],
    ids=["send_method", "wait"],
)
def test_a_channel_sends_and_awaits_single_methods(function: Any, parameters: list[str]) -> None:
    missing = set(parameters) - inspect.signature(function).parameters.keys()
    assert not missing, (
        f"amqp's {function.__qualname__} no longer takes {sorted(missing)}: "
        "publishing/kombu_internals.py pipelines passive declarations with it"
    )


@pytest.mark.parametrize(
    ("declare", "answer", "written"),
    [
        (Channel.queue_declare, spec.Queue.DeclareOk, "BsbbbbbF"),
        (Channel.exchange_declare, spec.Exchange.DeclareOk, "BssbbbbbF"),
    ],
    ids=["queue", "exchange"],
)
def test_amqp_writes_declarations_as_ours(declare: Any, answer: Any, written: str) -> None:
    writes = inspect.signature(declare).parameters["argsig"].default
    assert writes == written, (
        f"amqp's {declare.__qualname__} now writes its arguments as {writes!r}: find_queues and "
        f"find_exchanges of publishing/kombu_internals.py write {written!r}"
    )
    assert answer in Channel._METHODS, (
        f"amqp's Channel no longer reads the method {answer}, for which kombu_internals.py waits"
    )


def test_amqp_opens_a_channel_again_that_the_broker_has_closed() -> None:
    assert "self._do_revive()" in inspect.getsource(Channel._on_close), (
        "amqp's Channel._on_close no longer calls _do_revive: find_queues and find_exchanges of "
        "publishing/kombu_internals.py go on with the channel after NOT_FOUND"
    )
