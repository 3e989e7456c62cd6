"""AMQP's passive declarations, many at a time: py-amqp sends one and waits for its answer.

Besides ``wire``, this is the only file that uses undocumented parts of py-amqp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from amqp import spec
from amqp.exceptions import NotFound

#: How many passive declarations are sent before their answers are read. An answer has some 50
#: bytes, so those of one batch fit into the socket's buffers, and the broker never has to stop
#: writing while this side is writing too.
PASSIVE_BATCH: Final = 200


def find_queues(channel: Any, names: Sequence[str]) -> list[tuple[int, int] | None]:
    """Return messages and consumers of queues, in their order; None for one that does not exist.

    Args:
        channel: A channel that nobody else uses.
        names: The names of the queues.

    Raises:
        amqp.exceptions.ChannelError: The broker refuses to say it; the message names the queue.
    """

    def ask(name: str) -> None:
        flags = (True, False, False, False, False)  # passive, ..., nowait
        channel.send_method(spec.Queue.Declare, "BsbbbbbF", (0, name, *flags, None))

    found = _ask_in_batches(channel, names, ask, spec.Queue.Declare, spec.Queue.DeclareOk)
    return [answer and (answer[1], answer[2]) for answer in found]


def find_exchanges(channel: Any, names: Sequence[str]) -> list[bool]:
    """Return whether exchanges exist, in their order.

    Args:
        channel: A channel that nobody else uses.
        names: The names of the exchanges.

    Raises:
        amqp.exceptions.ChannelError: The broker refuses to say it; the message names the exchange.
    """

    def ask(name: str) -> None:
        flags = (True, False, False, False, False)  # passive, ..., nowait
        # The broker does not compare the type.
        channel.send_method(spec.Exchange.Declare, "BssbbbbbF", (0, name, "topic", *flags, None))

    found = _ask_in_batches(channel, names, ask, spec.Exchange.Declare, spec.Exchange.DeclareOk)
    return [answer is not None for answer in found]


def _ask_in_batches(
    channel: Any,
    names: Sequence[str],
    ask: Callable[[str], None],
    question: tuple[int, int],
    answer: tuple[int, int],
) -> list[Any]:
    """Return the arguments of each answer, None for NOT_FOUND.

    For a missing object the broker closes the channel and ignores the questions behind it. py-amqp
    has opened the channel again when it raises the error, so they are asked again: one first and
    then ever more, because others are probably missing as well.
    """
    answers: list[Any] = []
    size = PASSIVE_BATCH
    while len(answers) < len(names):
        batch = names[len(answers) : len(answers) + size]
        for name in batch:
            ask(name)
        try:
            for _ in batch:
                # py-amqp handles one method at a time, so no answer is lost between two waits.
                answers.append(channel.wait(answer, returns_tuple=True))
        except NotFound as missing:
            if missing.method_sig != question:
                raise  # it closes another channel of the connection
            answers.append(None)
            size = 1
        else:
            size = min(size * 2, PASSIVE_BATCH)
    return answers
