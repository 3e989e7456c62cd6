"""How a move ends where a message is refused, or its source is lost; both ends are fakes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import amqp
import pytest
from kombu import Connection

from celery_rabbitdelay.exceptions import MessageNacked
from celery_rabbitdelay.kombu import Topology
from celery_rabbitdelay.modules.forwarding import Outgoing
from celery_rabbitdelay.operations.moving import mover as mover_module
from celery_rabbitdelay.operations.moving.mover import Mover, Place
from celery_rabbitdelay.operations.moving.source import SourceLost
from celery_rabbitdelay.publishing.message import WaitingMessage
from celery_rabbitdelay.publishing.publisher import Publisher

Found = int | type[SourceLost]


class Source:
    """Takes as many messages as each look finds, one look after the other, or is lost meanwhile."""

    frame_max = 131_072

    def __init__(self, looks: deque[Found]) -> None:
        self.looks = looks
        self.left = 0
        self.is_lost = False
        self.to_acknowledge: list[int] = []
        self.acknowledged: list[int] = []

    def ready(self, _: object) -> dict[str, int]:
        assert self.looks, "it ends after these looks"
        found = self.looks.popleft()
        self.is_lost = not isinstance(found, int)
        self.left = found if isinstance(found, int) else 1
        return {"from": self.left} if self.left else {}

    def consume(self, *_: object) -> None: ...

    def cancel(self) -> None: ...

    def take(self) -> Any:
        if not self.left:
            return None
        self.left -= 1
        message: Any = amqp.Message(b"", application_headers={})
        tag = {"delivery_tag": self.left}
        message.delivery_info = {"queue": "from", "exchange": "", "routing_key": "from", **tag}
        return message

    def acknowledge(self) -> None:
        if self.is_lost:
            raise SourceLost("gone")
        self.acknowledged += self.to_acknowledge
        self.to_acknowledge = []

    def close(self) -> None: ...

    def drop(self) -> None: ...


def make_mover(patch: pytest.MonkeyPatch, looks: deque[Found], source: Any = Source) -> Mover:
    """Return a mover whose source finds this; the target refuses the message with the tag 7."""

    def publish_all(_: Any, publications: Iterable[Any], *__: Any, done: Any, **___: Any) -> None:
        for each in publications:
            if each.context[0].delivery_tag == 7:
                each.error = MessageNacked("", "to", "full")
            done(each)

    def convert(message: amqp.Message, _: str) -> Outgoing:
        return Outgoing("", "to", WaitingMessage.unopened(message))

    patch.setattr(mover_module, "Source", lambda *_: source(looks))
    patch.setattr(mover_module, "SETTLE", 0)
    patch.setattr(mover_module, "RECONNECT_EVERY", 0)
    patch.setattr(Publisher, "publish_all", publish_all)
    nowhere = Connection("amqp://guest:guest@127.0.0.1:1//")
    return Mover(nowhere, ["from"], Place(nowhere, Topology()), convert)


def test_a_message_that_the_target_refuses_stays_in_its_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = Source(deque([9, 0, 0]))
    moved = make_mover(monkeypatch, source.looks, lambda _: source).move()
    assert sorted(source.acknowledged) == [0, 1, 2, 3, 4, 5, 6, 8]
    assert (moved.moved, moved.copies) == (8, 0)
    assert moved.left == {"the target does not take it (MessageNacked)": 1}


def test_queues_are_looked_at_twice_again_after_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was taken when the source was lost may come back only after a look."""
    looks: deque[Found] = deque([0, SourceLost, 0, 2, 0, 0])
    moved = make_mover(monkeypatch, looks).move()
    assert not looks
    assert (moved.finished, moved.moved, moved.copies) == (True, 3, 1)
