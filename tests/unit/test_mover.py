"""How a move ends where its source is lost. The sources, and the publisher, are fakes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import amqp
import pytest
from kombu import Connection

from celery_rabbitdelay.kombu import Topology
from celery_rabbitdelay.modules.forwarding import Outgoing
from celery_rabbitdelay.operations.moving import mover as mover_module
from celery_rabbitdelay.operations.moving.mover import Mover, Place
from celery_rabbitdelay.operations.moving.source import SourceLost
from celery_rabbitdelay.publishing.message import WaitingMessage
from celery_rabbitdelay.publishing.publisher import Publisher


class Looks:
    """What the sources of a move find, one look after the other; a number is what can be taken."""

    def __init__(self, *found: int | type[SourceLost]) -> None:
        self.found = deque(found)
        self.is_lost = False

    def source(self, *_: object) -> Source:
        self.is_lost = False
        return Source(self)


class Source:
    """Takes as many messages as the last look has found, or is lost while it does."""

    frame_max = 131_072

    def __init__(self, looks: Looks) -> None:
        self.looks = looks
        self.left = 0
        self.to_acknowledge: list[int] = []

    def ready(self, _: object) -> dict[str, int]:
        assert self.looks.found, "it ends after these looks"
        found = self.looks.found.popleft()
        self.looks.is_lost = not isinstance(found, int)
        self.left = found if isinstance(found, int) else 1
        return {"from": self.left} if self.left else {}

    def consume(self, *_: object) -> None: ...

    def cancel(self) -> None: ...

    def take(self) -> Any:
        if not self.left:
            return None
        self.left -= 1
        message: Any = amqp.Message(b"", application_headers={})
        info = {"queue": "from", "exchange": "", "routing_key": "from", "delivery_tag": 1}
        message.delivery_info = info
        return message

    def acknowledge(self) -> None:
        if self.looks.is_lost:
            raise SourceLost("gone")
        self.to_acknowledge = []

    def close(self) -> None: ...

    def drop(self) -> None: ...


def publish_all(_: Any, publications: Iterable[Any], *__: Any, done: Any, **___: Any) -> None:
    for each in publications:
        done(each)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    looks = Looks()
    monkeypatch.setattr(mover_module, "Source", looks.source)
    monkeypatch.setattr(mover_module, "SETTLE", 0)
    monkeypatch.setattr(mover_module, "RECONNECT_EVERY", 0)
    monkeypatch.setattr(Publisher, "publish_all", publish_all)
    return looks


def make_mover() -> Mover:
    nowhere = Connection("amqp://guest:guest@127.0.0.1:1//")

    def convert(message: amqp.Message, _: str) -> Outgoing:
        return Outgoing("", "to", WaitingMessage.unopened(message))

    return Mover(nowhere, ["from"], Place(nowhere, Topology()), convert)


def test_queues_are_looked_at_twice_again_after_a_loss(looks: Looks) -> None:
    """What was taken when the source was lost may come back only after a look."""
    looks.found.extend([0, SourceLost, 0, 2, 0, 0])
    moved = make_mover().move()
    assert not looks.found
    assert (moved.finished, moved.moved, moved.copies) == (True, 3, 1)


def test_a_move_that_is_stopped_when_its_source_is_lost_says_what_it_has_done(
    looks: Looks, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks.found.extend([2, SourceLost])
    mover = make_mover()
    acknowledge = Source.acknowledge

    def stop_first(source: Source) -> None:
        if looks.is_lost:
            mover.stopping.set()
        acknowledge(source)

    monkeypatch.setattr(Source, "acknowledge", stop_first)
    moved = mover.move()
    assert (moved.finished, moved.moved, moved.copies) == (False, 3, 1)
