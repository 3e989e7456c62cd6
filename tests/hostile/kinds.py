"""The table of what a hostile client publishes: each kind, how often, and where it may end."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from random import Random
from struct import pack
from typing import Any, Final

from celery_rabbitdelay.levels.headers import ENVELOPE
from celery_rabbitdelay.levels.routing_key import DISTRIBUTION
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.modules.envelope import Envelope, Item, length_prefixed
from tests.hostile.fields import BAD_TEXTS, any_field, array, integer, nested, properties, table
from tests.hostile.fields import text as field_text

#: The queue that check-in may reach, and nobody consumes; the queue of a Celery worker; a queue
#: that nothing may reach.
ALLOWED: Final = "allowed"
TASKS: Final = "tasks"
FORBIDDEN: Final = "forbidden"

#: Where the messages of the allowed queue go that expire there.
EXPIRED: Final = "expired"

#: The largest body that the worker takes in a campaign.
MAX_BODY: Final = 2**20

#: A day before 1970, and a million years after.
DUES: Final = (-86_400_000, 0, 5, 2**62, 2**63 - 1, -(2**63))

#: The headers of this package, and one of a later version, without their prefix.
OWN_NAMES: Final = (
    "due exchange routing-key queue priority expiration early reason attempts failed-since "
    "first-reason redriven unreadable properties copy key job once version later"
)

#: How a body says which message it is; in a body that has it somewhere, it replaces this.
_NUMBER: Final = b"#%08d"
_PLACE: Final = b"#--------"


@dataclass(frozen=True)
class Hostile:
    """A message, as it is written.

    Attributes:
        number: Which one; its body ends with it.
        kind: The name of its kind.
        exchange: Where it is published.
        key: Its routing key.
        properties: Its properties.
        body: Its body.
        is_refused: Whether the broker may close the channel or the connection instead.
    """

    number: int
    kind: str
    exchange: bytes
    key: bytes
    properties: bytes
    body: bytes
    is_refused: bool = False


class Draw(Random):
    """Random numbers, the same ones for the same seed.

    Attributes:
        mark: What tells the message that is made from all others.
    """

    mark = b""


@dataclass(frozen=True)
class Kind:
    """A kind of hostile messages.

    Attributes:
        make: Returns exchange, key, properties and body of one.
        weight: How often, compared with the others.
        is_refused: Whether the broker may refuse it.
    """

    make: Callable[[Draw, Topology], tuple[str, bytes, bytes, bytes]]
    weight: float = 10
    is_refused: bool = False


def hostile_messages(topology: Topology, count: int, seed: int) -> Iterator[Hostile]:
    """Yield so many messages; the same ones for the same seed."""
    random = Draw(seed)
    names, weights = list(KINDS), [kind.weight for kind in KINDS.values()]
    # Each kind at least once.
    chosen = [*names, *random.choices(names, weights, k=max(count - len(names), 0))][:count]
    random.shuffle(chosen)
    for number, name in enumerate(chosen):
        kind = KINDS[name]
        mark = random.mark = _NUMBER % number
        exchange, key, content, body = kind.make(random, topology)
        marked = body.replace(_PLACE, mark) if _PLACE in body else body + mark
        yield Hostile(number, name, exchange.encode(), key, content, marked, kind.is_refused)


def _checkin(topology: Topology) -> str:
    return topology.module_queues.checkin.exchange.name


def _allowed(topology: Topology) -> bytes:
    return f"{topology.prefix}.{ALLOWED}".encode()


def _forbidden(topology: Topology) -> bytes:
    return f"{topology.prefix}.{FORBIDDEN}".encode()


def _checked_in(
    make: Callable[[Draw, Topology], Mapping[bytes, bytes]],
) -> Callable[[Draw, Topology], tuple[str, bytes, bytes, bytes]]:
    """A message for check-in and the allowed queue, with these headers."""

    def made(random: Draw, topology: Topology) -> tuple[str, bytes, bytes, bytes]:
        content = properties(make(random, topology))
        return _checkin(topology), _allowed(topology), content, b"body"

    return made


def _soon(random: Draw) -> bytes:
    return integer(random.randint(0, 2_000))


def _own_headers(random: Draw, topology: Topology) -> dict[bytes, bytes]:
    """Forged headers of this package and of the broker, with values of any type."""
    names = OWN_NAMES.split()
    forged = {f"rabbitdelay-{name}".encode() for name in names} | {b"x-delivery-count"}
    chosen = random.sample(sorted(forged), random.randint(1, 6))
    return {name: _forged_value(random, topology) for name in chosen}


def _forged_value(random: Draw, topology: Topology) -> bytes:
    choice = random.random()
    if choice < 0.3:
        return field_text(_forbidden(topology))
    if choice < 0.5:
        return integer(random.choice(DUES))
    if choice < 0.6:
        return field_text(b"celery.pidbox")
    return any_field(random)


def _deaths(random: Draw, topology: Topology) -> dict[bytes, bytes]:
    death = {
        b"queue": field_text(random.choice((b"nowhere", b"\xff", _forbidden(topology)))),
        b"reason": field_text(random.choice((b"rejected", b"\xff"))),
        b"exchange": field_text(topology.module_queues.meditated.name.encode()),
        b"routing-keys": random.choice((array([field_text(b"\xff")]), any_field(random))),
        b"count": integer(random.choice(DUES)),
        b"time": b"T" + pack(">Q", 2**40),
    }
    return {b"x-delay": _soon(random), b"x-death": array([table(death)])}


def _plain(random: Draw, topology: Topology) -> dict[bytes, bytes]:
    return {b"x-delay": _soon(random), b"own": any_field(random)}


def _delay(random: Draw, topology: Topology) -> dict[bytes, bytes]:
    texts = (b"1e3", b" 5", b"0x10", b"\xd9\xa3", b"9" * 5_000, b"-1", b"7")
    delays = (field_text(random.choice(texts)), integer(random.choice(DUES)), any_field(random))
    return {b"x-delay": random.choice(delays)}


def _not_allowed(random: Draw, topology: Topology) -> tuple[str, bytes, bytes, bytes]:
    exchanges: tuple[bytes, ...] = (b"celery.pidbox", b"celeryev", b"amq.fanout", b"reply.celery")
    headers = {b"x-delay": _soon(random)}
    if random.random() < 0.5:
        headers[b"rabbitdelay-exchange"] = field_text(
            random.choice((*exchanges, _forbidden(topology)))
        )
    return _checkin(topology), _forbidden(topology), properties(headers), b"body"


def _bad_key(random: Draw, topology: Topology) -> tuple[str, bytes, bytes, bytes]:
    key = random.choice((*BAD_TEXTS, _allowed(topology) + b"\xff", b"\xff" * 255, b"k" * 255))
    return _checkin(topology), key, properties({b"x-delay": _soon(random)}), b"body"


def _bad_names(random: Draw, topology: Topology) -> dict[bytes, bytes]:
    names = (b"\xff", b"rabbitdelay-\xff", b"x-death\xff", b"", b"n" * 128, b"headers")
    return {random.choice(names): any_field(random), b"x-delay": _soon(random)}


def _bad_properties(random: Draw, topology: Topology) -> tuple[str, bytes, bytes, bytes]:
    names = ("content_type", "content_encoding", "correlation_id", "reply_to", "message_id", "type")
    short: dict[str, bytes] = {random.choice(names): random.choice(BAD_TEXTS)}
    short["priority"] = bytes((random.randint(0, 255),))
    short["delivery_mode"] = random.choice((b"\1", b"\2"))
    short["timestamp"] = pack(">Q", random.choice((0, 2**64 - 1)))
    content = properties({b"x-delay": _soon(random)}, **short)
    return _checkin(topology), _allowed(topology), content, b"body"


def _deep(random: Draw, topology: Topology) -> dict[bytes, bytes]:
    depth = random.choice((31, 32, 33, 300, 990, 5_000))
    name = random.choice((b"deep", b"headers", b"rabbitdelay-early"))
    return {name: nested(depth, random.random() < 0.5), b"x-delay": _soon(random)}


def _nested_headers(random: Draw, topology: Topology) -> dict[bytes, bytes]:
    inner: bytes = table(_own_headers(random, topology))
    for _ in range(random.randint(0, 30)):
        inner = table({b"headers": inner, b"rabbitdelay-due": integer(5)})
    return {b"headers": inner, b"x-delay": _soon(random)}


def _wide(random: Draw, topology: Topology) -> dict[bytes, bytes]:
    """Headers as large as a frame, and many times as large once they are read."""
    names = (b"%c%c" % pair for pair in ((a, b) for a in range(33, 127) for b in range(33, 127)))
    choices = (
        lambda: {b"wide": table(dict.fromkeys(names, b"V"))},
        lambda: {b"wide": array([b"F\0\0\0\0"] * 25_000)},
        lambda: {b"wide": field_text(b"x" * random.randint(126_000, 130_800))},
    )
    return random.choice(choices)()


def _large(random: Draw, topology: Topology) -> tuple[str, bytes, bytes, bytes]:
    size = random.choice((MAX_BODY - 9, MAX_BODY + 1, 2 * MAX_BODY))
    content = properties({b"x-delay": _soon(random)})
    return _checkin(topology), _allowed(topology), content, b"\0" * size


def _expiring(random: Draw, topology: Topology) -> tuple[str, bytes, bytes, bytes]:
    expiration = random.choice((b"0", b"1", b"60000"))
    content = properties({b"x-delay": _soon(random)}, expiration=expiration)
    return _checkin(topology), _allowed(topology), content, b"body"


def _sender_selected(random: Draw, topology: Topology) -> dict[bytes, bytes]:
    return {random.choice((b"CC", b"BCC")): array([field_text(_forbidden(topology))])}


def _refused_properties(random: Draw, topology: Topology) -> tuple[str, bytes, bytes, bytes]:
    choices = (
        lambda: pack(">H", random.getrandbits(16)) + random.randbytes(random.randint(0, 60)),
        lambda: pack(">HI", 0x2000, random.choice((2**32 - 1, 1_000))) + b"\1aV",
        lambda: properties({b"a": b"?" + random.randbytes(4)}),
        lambda: properties({b"CC": any_field(random)}),
        lambda: properties({}, expiration=b"soon"),
        lambda: properties({}, delivery_mode=b"\7"),
        lambda: properties({}, user_id=b"somebody"),
        # Erlang has no such numbers.
        lambda: properties(
            {b"nan": b"d" + pack(">d", random.choice((float("nan"), float("inf"))))}
        ),
    )
    return _checkin(topology), _allowed(topology), random.choice(choices)(), b"body"


def _distributed(
    make: Callable[[Draw, Topology], tuple[Mapping[bytes, bytes], dict[str, bytes], bytes]],
) -> Callable[[Draw, Topology], tuple[str, bytes, bytes, bytes]]:
    """A message for distribution, published as if it had left the levels."""

    def made(random: Draw, topology: Topology) -> tuple[str, bytes, bytes, bytes]:
        headers, short, body = make(random, topology)
        exchange, key = topology.route(0, DISTRIBUTION)[:2]
        return exchange, key.encode(), properties(headers, **short), body

    return made


def _forged_destination(
    random: Draw, topology: Topology
) -> tuple[Mapping[bytes, bytes], dict[str, bytes], bytes]:
    exchange = random.choice((b"", b"", b"celery.pidbox", b"celeryev", b"amq.topic"))
    headers = {
        b"rabbitdelay-exchange": field_text(exchange),
        b"rabbitdelay-routing-key": field_text(_forbidden(topology)),
    }
    if random.random() < 0.3:
        headers[b"rabbitdelay-queue"] = field_text(_forbidden(topology))
    return headers, {}, b"body"


def _any_headers(
    random: Draw, topology: Topology
) -> tuple[Mapping[bytes, bytes], dict[str, bytes], bytes]:
    return _own_headers(random, topology), {}, b"body"


def _far_due(
    random: Draw, topology: Topology
) -> tuple[Mapping[bytes, bytes], dict[str, bytes], bytes]:
    headers = _to_allowed(topology)
    headers[b"rabbitdelay-due"] = random.choice((integer(random.choice(DUES)), any_field(random)))
    headers[b"rabbitdelay-early"] = random.choice(
        (table({b"times": integer(random.choice(DUES))}), any_field(random))
    )
    return headers, {}, b"body"


def _to_allowed(topology: Topology) -> dict[bytes, bytes]:
    return {
        b"rabbitdelay-exchange": field_text(b""),
        b"rabbitdelay-routing-key": field_text(_allowed(topology)),
    }


def _envelope(
    random: Draw, topology: Topology
) -> tuple[Mapping[bytes, bytes], dict[str, bytes], bytes]:
    return _to_allowed(topology), {"content_type": ENVELOPE.encode()}, _packed(random, topology)


def _packed(random: Draw, topology: Topology) -> bytes:
    """The body of an envelope, with something wrong in it."""
    forbidden, mark = _forbidden(topology).decode(), random.mark
    items: dict[str, Callable[[], Any]] = {
        "forbidden": lambda: Item(mark, {"rabbitdelay-routing-key": forbidden}),
        "copied": lambda: Item(mark, {"CC": [forbidden]}),
        "unknown": lambda: Item(mark, {}, {"body": "y", "self": 1, "channel": {}}),
        "typed": lambda: Item(mark, {}, {"priority": "high", "content_type": 7}),
        "large": lambda: Item(b"\0" * (MAX_BODY + 1) + mark),
        "envelope": lambda: Item(mark, {}, {"content_type": ENVELOPE}),
        "huge": lambda: Item(mark, {"n": 10**300}),
        "surrogate": lambda: Item(mark, {"rabbitdelay-routing-key": "\ud800"}),
    }
    blocks: dict[str, Callable[[], bytes]] = {
        "deep": lambda: length_prefixed(b'{"headers":{"a":' + b"[" * 2_000 + b"]" * 2_000 + b"}}"),
        "nan": lambda: length_prefixed(b'{"headers":{"a":NaN}}') + length_prefixed(mark),
        "infinite": lambda: length_prefixed(b'{"headers":{"a":1e999}}') + length_prefixed(mark),
        "lying": lambda: pack(">I", 2**32 - 1) + b"{}",
        "json": lambda: length_prefixed(random.randbytes(20)),
        "digits": lambda: length_prefixed(b'{"headers":{"a":' + b"9" * 5_000 + b"}}"),
        "wide": lambda: length_prefixed(json.dumps({"headers": {"a": "x" * 2**20}}).encode()),
        "bomb": lambda: (
            (length_prefixed(b"{}") + length_prefixed(b"\0" * (MAX_BODY - 9) + mark)) * 4
        ),
    }
    choice = random.random()
    if choice < 0.5:
        return Envelope((random.choice(list(items.values()))(),)).pack()
    if choice < 0.9:
        return zlib.compress(length_prefixed(b"{}") + random.choice(list(blocks.values()))())
    return random.choice((random.randbytes(50), Envelope((Item(mark),)).pack()[:-5]))


def _meditated(random: Draw, topology: Topology) -> tuple[str, bytes, bytes, bytes]:
    due = random.choice((integer(random.choice(DUES)), any_field(random)))
    content = properties({b"rabbitdelay-due": due, **_own_headers(random, topology)})
    modules = topology.module_queues
    return modules.meditated.name, random.choice((b"nowhere", b"\xff")), content, b"body"


def _level(random: Draw, topology: Topology) -> tuple[str, bytes, bytes, bytes]:
    exchange = random.choice(topology.exchanges[1:3]).name
    key = random.choice((b"1.2.nowhere", b"0.0.%nothing", b"9.9.9.9", b"", b"\xff.\xff", b"#.*"))
    return exchange, key, properties(_own_headers(random, topology)), b"body"


def _straight_to_undeliverable(random: Draw, topology: Topology) -> tuple[str, bytes, bytes, bytes]:
    exchange = topology.module_queues.undeliverable.exchange.name
    content = properties({**_own_headers(random, topology), **_deaths(random, topology)})
    return exchange, random.choice(BAD_TEXTS), content, b"body"


def _task(random: Draw, topology: Topology) -> tuple[str, bytes, bytes, bytes]:
    """A task for the worker's own consumer, which restores it, by distribution."""
    headers = {
        b"task": field_text(b"hostile"),
        b"id": field_text(b"%032x" % random.getrandbits(128)),
        **_own_headers(random, topology),
        **_nested_headers(random, topology),
        b"sentry-task-enqueued-time": any_field(random, 0),
        b"rabbitdelay-exchange": field_text(b""),
        b"rabbitdelay-routing-key": field_text(f"{topology.prefix}.{TASKS}".encode()),
        # A due time: distribution leaves it to the worker.
        b"rabbitdelay-due": random.choice((integer(5), field_text(b"soon"), b"t\1", table({}))),
    }
    headers.pop(b"rabbitdelay-queue", None)
    headers.pop(b"rabbitdelay-expiration", None)  # it could expire in its queue
    json_type = {"content_type": b"application/json", "content_encoding": b"utf-8"}
    if random.random() < 0.5:
        headers[b"rabbitdelay-queue"] = headers[b"rabbitdelay-routing-key"]
    exchange, key = topology.route(0, DISTRIBUTION)[:2]
    body = b'[["' + _PLACE + b'"], {}, {}]'
    return exchange, key.encode(), properties(headers, **json_type), body


KINDS: Final[dict[str, Kind]] = {
    "plain": Kind(_checked_in(_plain), 20),
    "delay of any type": Kind(_checked_in(_delay), 15),
    "not allowed": Kind(_not_allowed),
    "key not UTF-8": Kind(_bad_key),
    "header name not UTF-8": Kind(_checked_in(_bad_names)),
    "property not UTF-8": Kind(_bad_properties),
    "deep": Kind(_checked_in(_deep), 2),
    "nested headers": Kind(_checked_in(_nested_headers)),
    "as large as a frame": Kind(_checked_in(_wide), 0.5),
    "large body": Kind(_large, 0.1),
    "forged headers": Kind(_checked_in(_own_headers), 20),
    "forged x-death": Kind(_checked_in(_deaths)),
    "expiring": Kind(_expiring, 5),
    "sender-selected": Kind(_checked_in(_sender_selected), 5),
    "refused by the broker": Kind(_refused_properties, 0.2, is_refused=True),
    "forged destination": Kind(_distributed(_forged_destination), 15),
    "distributed with forged headers": Kind(_distributed(_any_headers), 10),
    "forged due time": Kind(_distributed(_far_due), 5),
    "envelope": Kind(_distributed(_envelope), 10),
    "task": Kind(_task, 10),
    "meditated": Kind(_meditated, 5),
    "level": Kind(_level, 5),
    "undeliverable": Kind(_straight_to_undeliverable, 5),
}
