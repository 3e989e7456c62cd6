"""What is published for messages that are moved, whoever has written them, and how a move ends."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, timedelta
from typing import Any

import amqp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kombu import Connection, Exchange, Queue
from kombu.transport.native_delayed_delivery import calculate_routing_key

from celery_rabbitdelay.exceptions import MessageNacked, UnprocessableMessage
from celery_rabbitdelay.kombu import DelayedProducer, Publisher, Topology, binary, clock, custom
from celery_rabbitdelay.levels import headers as header_names
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.headers import ONCE, UNREADABLE
from celery_rabbitdelay.levels.routing_key import DISTRIBUTION
from celery_rabbitdelay.modules.forwarding import Outgoing
from celery_rabbitdelay.operations import mover as mover_module
from celery_rabbitdelay.operations.conversion import Migration, NativeChain
from celery_rabbitdelay.operations.mover import Mover, Place, Stay
from celery_rabbitdelay.publishing.message import WaitingMessage
from tests.kernel.unit.clock import frozen

# Messages of other delay mechanisms.

TOPOLOGY = Topology("test")
REPORTS = Exchange("reports", "topic")
QUEUES = [
    Queue("daily", REPORTS, "daily"),
    Queue("paper.daily", REPORTS, "paper.daily"),
    Queue("all", Exchange("news", "fanout"), "everyone"),
    Queue("plain", Exchange("plain", "direct"), "plain"),
]
MODULES = ("check-in", "distribution")


@pytest.fixture(autouse=True, scope="module")
def standstill() -> Iterator[None]:
    with frozen(1_900_000_000):
        yield


def headers_of(outgoing: Outgoing) -> dict[str, Any]:
    headers: dict[str, Any] = outgoing.message.headers.to_headers()
    return headers


def chain(modules: tuple[str, ...] = MODULES) -> NativeChain:
    producer = DelayedProducer(Publisher(Connection("amqp://")), TOPOLOGY, modules=modules)
    return NativeChain(producer, UTC, QUEUES, lambda name: None, lambda name: name == "own")


def message(key: str, exchange: str = "", **headers: Any) -> amqp.Message:
    made = amqp.Message(
        b"[[], {}, {}]",
        application_headers={"id": "1", "task": "remind", **headers},
        content_type="application/json",
        content_encoding="utf-8",
    )
    made.delivery_info = {"exchange": exchange, "routing_key": key, "delivery_tag": 1}
    return made


def native(
    key: str, level: int = 5, modules: tuple[str, ...] = MODULES, **headers: Any
) -> Outgoing:
    return chain(modules).convert(message(key, **headers), f"celery_delayed_{level}")


def in_seconds(seconds: float) -> str:
    return (wall_clock.now() + timedelta(seconds=seconds)).isoformat()


def due_in(outgoing: Outgoing) -> float:
    return float(headers_of(outgoing)[header_names.DUE] - wall_clock.ms()) / 1000


def test_a_native_task_waits_until_its_eta_and_then_goes_where_it_was_sent() -> None:
    given: dict[str, Any] = {"eta": in_seconds(39), ONCE: True}
    outgoing = native(calculate_routing_key(40, "paper.daily"), **given)
    assert due_in(outgoing) == 39
    told = (header_names.EXCHANGE, header_names.QUEUE, header_names.ROUTING_KEY, "eta", ONCE)
    found = [headers_of(outgoing)[name] for name in told]
    assert found == ["reports", "paper.daily", "paper.daily", None, True]
    fanout = native(calculate_routing_key(40, "everyone"), eta=in_seconds(40))
    assert fanout.routing_key.endswith(".%distribution")
    assert headers_of(fanout)[header_names.EXCHANGE] == "news"


@pytest.mark.parametrize(
    ("eta", "seconds", "level", "longest"),
    [
        # Of 640 s, 512 are those of the queue that it is in.
        (None, 640, 9, 640),
        ("soon", 640, 7, 128),
        (5, 640, 7, 128),
        # Earlier than the chain.
        (-3600.0, 40, 5, 40),
    ],
)
def test_without_a_valid_eta_it_waits_as_long_as_the_chain_might(
    eta: Any, seconds: int, level: int, longest: int
) -> None:
    given = in_seconds(eta) if isinstance(eta, float) else eta
    outgoing = native(calculate_routing_key(seconds, "daily"), level, eta=given)
    assert due_in(outgoing) == longest


@pytest.mark.parametrize(
    ("key", "modules", "headers", "reason"),
    [
        (calculate_routing_key(40, "plain"), MODULES, {}, "no queue of the application"),
        ("daily", MODULES, {}, "28 bits"),
        (calculate_routing_key(40, "everyone"), (), {}, "distribution"),
        (calculate_routing_key(40, "daily"), (), {"eta": "2060-01-01T00:00:00Z"}, "capacity"),
        (calculate_routing_key(40, "daily"), MODULES, {UNREADABLE: "why"}, "cannot be read"),
        (calculate_routing_key(40, "daily"), MODULES, {"task": "own"}, "rabbitdelay=False"),
    ],
)
def test_a_native_task_stays_if_the_levels_cannot_take_it(
    key: str, modules: tuple[str, ...], headers: dict[str, Any], reason: str
) -> None:
    with pytest.raises(Stay, match=reason):
        native(key, modules=modules, **headers)


# Messages of other levels.

SOURCE = Topology("old", binary(), shards=3)
TARGET = Topology("new", clock())
OLD = SOURCE.module_queues


def convert(
    queue: str,
    key: str,
    headers: dict[str, Any],
    *,
    target: Topology = TARGET,
    ensured: Callable[[str], None] = lambda name: None,
    exchange: str = "old.x",
    **properties: Any,
) -> Outgoing:
    """Convert a message that was in a queue of the source."""
    migration = Migration(SOURCE, target, ensured)
    message = amqp.Message("body", application_headers=headers, **properties)
    message.delivery_info = {"exchange": exchange, "routing_key": key, "delivery_tag": 1}
    return migration.convert(message, queue)


def task(**more: Any) -> dict[str, Any]:
    return {
        header_names.DUE: wall_clock.ms() + 3_600_000,
        header_names.QUEUE: "emails",
        header_names.EXCHANGE: "",
        header_names.ROUTING_KEY: "emails",
        "id": "1",
        **more,
    }


def key_of(topology: Topology, destination: str, seconds: float = 3600) -> str:
    return topology.route(seconds, destination, "1").routing_key


@pytest.mark.parametrize("destination", ["daily.reports", DISTRIBUTION])
def test_what_waits_goes_on_for_the_rest(destination: str) -> None:
    ensured: list[str] = []
    key = key_of(SOURCE, destination)
    # What the broker has added goes, and the users' own stays.
    deaths = {"x-death": [{"queue": "old.seconds.1"}], "x-delivery-count": 2}
    given = task(**{"x-mine": "kept"})
    more: dict[str, Any] = {"priority": 3, "expiration": "5000"}
    outgoing = convert(OLD.meditation.name, destination, {**given, **deaths}, **more)
    assert outgoing.routing_key == key_of(TARGET, destination)
    outgoing = convert("old.s.1", key, {**given, **deaths}, ensured=ensured.append, **more)
    assert outgoing.routing_key == key_of(TARGET, destination)
    assert ensured == ([destination] if destination else [])
    assert headers_of(outgoing) == given
    properties = outgoing.message.amqp().properties
    # The levels drop no message before it is due.
    assert (properties["priority"], properties["expiration"]) == (3, None)
    assert outgoing.reroute is not None
    # What comes back from meditation waits for the rest, what is due goes at once, and what waits
    # longer than the target's levels do meditates there.
    back = convert(OLD.checkin.name, destination, given, exchange=OLD.meditated.name)
    assert back.routing_key == outgoing.routing_key
    due = convert("old.s.1", key, {**given, header_names.DUE: 5})
    assert (due.exchange, due.routing_key) == ("new.delivery", key_of(TARGET, destination, 0))
    small = Topology("new", custom([("seconds", 10, 1)]))
    assert convert("old.s.1", key, given, target=small).exchange == "new.meditation"


def test_what_no_level_holds_stays_what_it_is() -> None:
    # What a client has checked in.
    headers = {"x-delay": 5000, "rabbitdelay-exchange": "reports"}
    outgoing = convert(OLD.checkin.name, "daily", headers, expiration="9000")
    assert (outgoing.exchange, outgoing.routing_key) == ("new.checkin", "daily")
    assert headers_of(outgoing) == headers
    assert outgoing.message.amqp().properties["expiration"] == "9000"
    # What is undeliverable keeps its reason, or gets the broker's.
    known = {header_names.REASON: "no such queue"}
    outgoing = convert(OLD.undeliverable.name, "key", known)
    assert (outgoing.exchange, headers_of(outgoing)) == ("new.undeliverable", known)
    died = {"x-death": [{"queue": OLD.checkin.name, "routing-keys": ["key"]}]}
    told = headers_of(convert(OLD.undeliverable.name, "key", died))
    assert told[header_names.REASON].startswith("delivery limit of old.checkin exceeded")


def test_a_long_name_is_hashed_in_the_key() -> None:
    name, ensured = "q" * 200, list[str]()
    named = task(**{header_names.QUEUE: name})
    convert("old.s.1", key_of(SOURCE, name), named, ensured=ensured.append)
    assert ensured == [name]
    with pytest.raises(UnprocessableMessage, match="hash"):
        convert("old.s.1", key_of(SOURCE, name), task())


def test_a_priority_too_high_for_the_levels_goes_through_distribution() -> None:
    outgoing = convert("old.s.1", key_of(SOURCE, "emails"), task(), priority=9)
    assert outgoing.routing_key.endswith(".%distribution")
    assert outgoing.message.amqp().properties["priority"] == 4
    assert headers_of(outgoing)[header_names.PRIORITY] == 9


def test_a_message_without_a_due_time_is_undeliverable_and_one_of_another_layout_stays() -> None:
    for due in (None, -1, 2**63):
        with pytest.raises(UnprocessableMessage, match="rabbitdelay-due"):
            convert("old.s.1", key_of(SOURCE, "emails"), task(**{header_names.DUE: due}))
    with pytest.raises(Stay, match="another layout"):
        convert("old.s.1", "0.1.emails", task())


@given(key=st.text(max_size=60))
def test_no_routing_key_breaks_the_migration(key: str) -> None:
    for queue in SOURCE.queues:
        try:
            convert(queue.name, key, task(), exchange="")
        except (Stay, UnprocessableMessage):
            assert queue.name not in (OLD.checkin.name, OLD.undeliverable.name)


# How a move ends where a message is refused, or its source is lost; both ends are fakes.

Found = int | type[OSError]


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
            raise OSError("gone")
        self.acknowledged += self.to_acknowledge
        self.to_acknowledge = []

    def close(self) -> None: ...


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
    assert moved.left == {"the target refuses it (MessageNacked)": 1}


def test_a_lost_source_ends_the_move_and_what_is_not_acknowledged_may_exist_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mover = make_mover(monkeypatch, deque([2, OSError, 0, 0]))
    with pytest.raises(OSError, match="gone"):
        mover.move()
    moved = mover.result
    assert (moved.finished, moved.moved, moved.copies) == (False, 3, 1)


def test_queues_are_looked_at_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message may be between two of them."""
    looks: deque[Found] = deque([0, 2, 0, 0])
    moved = make_mover(monkeypatch, looks).move()
    assert not looks
    assert (moved.finished, moved.moved, moved.copies) == (True, 2, 0)
