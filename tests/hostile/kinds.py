"""The table of what a hostile client publishes: each kind, how often, and where it may end."""

from __future__ import annotations

import itertools
import json
import pickle
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from random import Random
from struct import pack
from typing import Any, Final, NamedTuple

from kombu.compression import compress, encoders

from celery_rabbitdelay.levels.headers import ENVELOPE
from celery_rabbitdelay.levels.routing_key import DISTRIBUTION
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.modules.envelope import Envelope, Item, length_prefixed
from tests.hostile import malformed
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

#: Bytes that the worker's main process may grow by: two modules hold 64 MiB each and have as much
#: in flight at most, the largest message, and what Python does not give back.
MAX_GROWTH: Final = 384 * 2**20

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


class Hostile(NamedTuple):
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
    """Random numbers, the same ones for the same seed, and where messages may be for.

    Args:
        seed: The seed.
        topology: The levels.

    Attributes:
        mark: What tells the message that is made from all others.
        checkin: The exchange of check-in.
        allowed: The queue that check-in may reach.
        forbidden: The queue that nothing may reach.
        tasks: The queue of the worker.
        way: How the last task went to the worker.
    """

    mark = b""
    way = "checked in"

    # Random makes an object of its first argument alone.
    def __new__(cls, seed: int, topology: Topology) -> Draw:
        return super().__new__(cls, seed)  # type: ignore[call-arg]

    def __init__(self, seed: int, topology: Topology) -> None:
        super().__init__(seed)
        self.topology = topology
        self.checkin = topology.module_queues.checkin.exchange.name
        self.allowed, self.forbidden, self.tasks = (
            f"{topology.prefix}.{name}".encode() for name in (ALLOWED, FORBIDDEN, TASKS)
        )


#: Exchange, key, properties and body of a message; and what makes one.
Made = tuple[str, bytes, bytes, bytes]
Make = Callable[[Draw], Made]

#: Headers, other properties and body of a message for distribution.
Distributed = tuple[Mapping[bytes, bytes], dict[str, bytes], bytes]


class Kind(NamedTuple):
    """A kind of hostile messages.

    Attributes:
        make: Makes one.
        weight: How often, compared with the others.
        is_refused: Whether the broker may refuse it.
        is_dropped: Whether Celery may drop it, as it does with what its worker cannot read.
        is_followed: Whether a good task follows on the same way, which has to run.
    """

    make: Make
    weight: float = 10
    is_refused: bool = False
    is_dropped: bool = False
    is_followed: bool = False


def hostile_messages(topology: Topology, count: int, seed: int) -> Iterator[Hostile]:
    """Yield so many messages; the same ones for the same seed."""
    random = Draw(seed, topology)
    names, weights = list(KINDS), [kind.weight for kind in KINDS.values()]
    # Each kind at least once.
    chosen = [*names, *random.choices(names, weights, k=max(count - len(names), 0))][:count]
    random.shuffle(chosen)
    numbers = itertools.count()
    for name in chosen:
        kind = KINDS[name]
        yield _hostile(random, next(numbers), name)
        if kind.is_followed:
            yield _hostile(random, next(numbers), BEHIND)


def _hostile(random: Draw, number: int, name: str) -> Hostile:
    kind = KINDS[name]
    mark = random.mark = _NUMBER % number
    exchange, key, content, body = kind.make(random)
    if _PLACE in content:
        content = content.replace(_PLACE, mark)
    else:
        body = body.replace(_PLACE, mark) if _PLACE in body else body + mark
    return Hostile(number, name, exchange.encode(), key, content, body, kind.is_refused)


def _checked_in(make: Callable[[Draw], Mapping[bytes, bytes]]) -> Make:
    """A message for check-in and the allowed queue, with these headers."""

    def made(random: Draw) -> Made:
        return random.checkin, random.allowed, properties(make(random)), b"body"

    return made


def _soon(random: Draw) -> bytes:
    return integer(random.randint(0, 2_000))


def _own_headers(random: Draw) -> dict[bytes, bytes]:
    """Forged headers of this package and of the broker, with values of any type."""
    names = OWN_NAMES.split()
    forged = {f"rabbitdelay-{name}".encode() for name in names} | {b"x-delivery-count"}
    chosen = random.sample(sorted(forged), random.randint(1, 6))
    return {name: _forged_value(random) for name in chosen}


def _forged_value(random: Draw) -> bytes:
    choice = random.random()
    if choice < 0.3:
        return field_text(random.forbidden)
    if choice < 0.5:
        return integer(random.choice(DUES))
    if choice < 0.6:
        return field_text(b"celery.pidbox")
    return any_field(random)


def _deaths(random: Draw) -> dict[bytes, bytes]:
    death = {
        b"queue": field_text(random.choice((b"nowhere", b"\xff", random.forbidden))),
        b"reason": field_text(random.choice((b"rejected", b"\xff"))),
        b"exchange": field_text(random.topology.module_queues.meditated.name.encode()),
        b"routing-keys": random.choice((array([field_text(b"\xff")]), any_field(random))),
        b"count": integer(random.choice(DUES)),
        b"time": b"T" + pack(">Q", 2**40),
    }
    return {b"x-delay": _soon(random), b"x-death": array([table(death)])}


def _plain(random: Draw) -> dict[bytes, bytes]:
    return {b"x-delay": _soon(random), b"own": any_field(random)}


def _delay(random: Draw) -> dict[bytes, bytes]:
    texts = (b"1e3", b" 5", b"0x10", b"\xd9\xa3", b"9" * 5_000, b"-1", b"7")
    delays = (field_text(random.choice(texts)), integer(random.choice(DUES)), any_field(random))
    return {b"x-delay": random.choice(delays)}


def _not_allowed(random: Draw) -> Made:
    exchanges: tuple[bytes, ...] = (b"celery.pidbox", b"celeryev", b"amq.fanout", b"reply.celery")
    headers = {b"x-delay": _soon(random)}
    if random.random() < 0.5:
        headers[b"rabbitdelay-exchange"] = field_text(random.choice((*exchanges, random.forbidden)))
    return random.checkin, random.forbidden, properties(headers), b"body"


def _bad_key(random: Draw) -> Made:
    key = random.choice((*BAD_TEXTS, random.allowed + b"\xff", b"\xff" * 255, b"k" * 255))
    return random.checkin, key, properties({b"x-delay": _soon(random)}), b"body"


def _bad_names(random: Draw) -> dict[bytes, bytes]:
    names = (b"\xff", b"rabbitdelay-\xff", b"x-death\xff", b"", b"n" * 128, b"headers")
    return {random.choice(names): any_field(random), b"x-delay": _soon(random)}


def _bad_properties(random: Draw) -> Made:
    names = ("content_type", "content_encoding", "correlation_id", "reply_to", "message_id", "type")
    short: dict[str, bytes] = {random.choice(names): random.choice(BAD_TEXTS)}
    short["priority"] = bytes((random.randint(0, 255),))
    short["delivery_mode"] = random.choice((b"\1", b"\2"))
    short["timestamp"] = pack(">Q", random.choice((0, 2**64 - 1)))
    content = properties({b"x-delay": _soon(random)}, **short)
    return random.checkin, random.allowed, content, b"body"


def _deep(random: Draw) -> dict[bytes, bytes]:
    depth = random.choice((31, 32, 33, 300, 990, 5_000))
    name = random.choice((b"deep", b"headers", b"rabbitdelay-early"))
    return {name: nested(depth, random.random() < 0.5), b"x-delay": _soon(random)}


def _nested_headers(random: Draw) -> dict[bytes, bytes]:
    inner: bytes = table(_own_headers(random))
    for _ in range(random.randint(0, 30)):
        inner = table({b"headers": inner, b"rabbitdelay-due": integer(5)})
    return {b"headers": inner, b"x-delay": _soon(random)}


def _wide(random: Draw) -> dict[bytes, bytes]:
    """Headers as large as a frame, and many times as large once they are read."""
    names = (b"%c%c" % pair for pair in ((a, b) for a in range(33, 127) for b in range(33, 127)))
    choices = (
        lambda: {b"wide": table(dict.fromkeys(names, b"V"))},
        lambda: {b"wide": array([b"F\0\0\0\0"] * 25_000)},
        lambda: {b"wide": field_text(b"x" * random.randint(126_000, 130_800))},
    )
    return random.choice(choices)()


def _large(random: Draw) -> Made:
    size = random.choice((MAX_BODY - 9, MAX_BODY + 1, 2 * MAX_BODY))
    content = properties({b"x-delay": _soon(random)})
    return random.checkin, random.allowed, content, b"\0" * size


def _expiring(random: Draw) -> Made:
    expiration = random.choice((b"0", b"1", b"60000"))
    content = properties({b"x-delay": _soon(random)}, expiration=expiration)
    return random.checkin, random.allowed, content, b"body"


def _sender_selected(random: Draw) -> dict[bytes, bytes]:
    return {random.choice((b"CC", b"BCC")): array([field_text(random.forbidden)])}


def _refused_properties(random: Draw) -> Made:
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
    return random.checkin, random.allowed, random.choice(choices)(), b"body"


def _distributed(make: Callable[[Draw], Distributed]) -> Make:
    """A message for distribution, published as if it had left the levels."""

    def made(random: Draw) -> Made:
        headers, short, body = make(random)
        exchange, key = random.topology.route(0, DISTRIBUTION)[:2]
        return exchange, key.encode(), properties(headers, **short), body

    return made


def _forged_destination(random: Draw) -> Distributed:
    exchange = random.choice((b"", b"", b"celery.pidbox", b"celeryev", b"amq.topic"))
    headers = {
        b"rabbitdelay-exchange": field_text(exchange),
        b"rabbitdelay-routing-key": field_text(random.forbidden),
    }
    if random.random() < 0.3:
        headers[b"rabbitdelay-queue"] = field_text(random.forbidden)
    return headers, {}, b"body"


def _any_headers(random: Draw) -> Distributed:
    return _own_headers(random), {}, b"body"


def _far_due(random: Draw) -> Distributed:
    headers = _to_allowed(random)
    headers[b"rabbitdelay-due"] = random.choice((integer(random.choice(DUES)), any_field(random)))
    headers[b"rabbitdelay-early"] = random.choice(
        (table({b"times": integer(random.choice(DUES))}), any_field(random))
    )
    return headers, {}, b"body"


def _to_allowed(random: Draw) -> dict[bytes, bytes]:
    return {
        b"rabbitdelay-exchange": field_text(b""),
        b"rabbitdelay-routing-key": field_text(random.allowed),
    }


def _envelope(random: Draw) -> Distributed:
    return _to_allowed(random), {"content_type": ENVELOPE.encode()}, _packed(random)


def _packed(random: Draw) -> bytes:
    """The body of an envelope, with something wrong in it."""
    forbidden, mark = random.forbidden.decode(), random.mark
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


def _meditated(random: Draw) -> Made:
    due = random.choice((integer(random.choice(DUES)), any_field(random)))
    content = properties({b"rabbitdelay-due": due, **_own_headers(random)})
    modules = random.topology.module_queues
    return modules.meditated.name, random.choice((b"nowhere", b"\xff")), content, b"body"


def _level(random: Draw) -> Made:
    exchange = random.choice(random.topology.exchanges[1:3]).name
    key = random.choice((b"1.2.nowhere", b"0.0.%nothing", b"9.9.9.9", b"", b"\xff.\xff", b"#.*"))
    return exchange, key, properties(_own_headers(random)), b"body"


def _straight_to_undeliverable(random: Draw) -> Made:
    exchange = random.topology.module_queues.undeliverable.exchange.name
    content = properties({**_own_headers(random), **_deaths(random)})
    return exchange, random.choice(BAD_TEXTS), content, b"body"


def _task(random: Draw) -> Made:
    """A task for the worker's own consumer, which restores it, by distribution."""
    headers = {
        b"task": field_text(b"hostile"),
        b"id": field_text(b"%032x" % random.getrandbits(128)),
        **_own_headers(random),
        **_nested_headers(random),
        b"sentry-task-enqueued-time": any_field(random, 0),
        b"rabbitdelay-exchange": field_text(b""),
        b"rabbitdelay-routing-key": field_text(random.tasks),
        # A due time: distribution leaves it to the worker.
        b"rabbitdelay-due": random.choice((integer(5), field_text(b"soon"), b"t\1", table({}))),
    }
    headers.pop(b"rabbitdelay-queue", None)
    headers.pop(b"rabbitdelay-expiration", None)  # it could expire in its queue
    json_type = {"content_type": b"application/json", "content_encoding": b"utf-8"}
    if random.random() < 0.5:
        headers[b"rabbitdelay-queue"] = headers[b"rabbitdelay-routing-key"]
    exchange, key = random.topology.route(0, DISTRIBUTION)[:2]
    body = b'[["' + _PLACE + b'"], {}, {}]'
    return exchange, key.encode(), properties(headers, **json_type), body


def _following(random: Draw) -> Made:
    """A task for check-in that has a worker publish to the forbidden queue, if it runs."""
    options = {"exchange": "amq.direct", "routing_key": random.forbidden.decode()}
    place = _PLACE.decode()
    evil = {"task": "hostile", "args": [place], "kwargs": {}, "options": options}
    name = random.choice(("callbacks", "errbacks", "chain", "chord", "group", "taskset"))
    following = {name: evil if name == "chord" else [evil]}
    encoding = b"utf-8"
    headers = {b"x-delay": _soon(random)}
    task = {b"task": field_text(b"hostile"), b"id": field_text(b"%x" % random.getrandbits(64))}
    choice = random.random()
    if choice < 0.4:
        body = json.dumps([[place], {}, following]).encode()
        headers |= task
        if name == "group":
            headers[b"group"] = field_text(b"g")
    elif choice < 0.6:
        own = random.choice((b"celery.group", b"celery.chain", b"celery.chord", b"celery.map"))
        body = json.dumps([[[evil], ["0", []], "g", []], {}, {}]).encode()
        headers |= {**task, b"task": field_text(own)}
    else:
        told = {"task": "hostile", "id": "1", "args": [place], "kwargs": {}, **following}
        body = json.dumps(told).encode()
        escaped = (random.choice((each, f"\\u{ord(each):04x}")) for each in "task")
        # py-amqp decodes a body for the worker.
        spelled, encoding = random.choice(
            (("".join(escaped), b"utf-8"), ("+AHQ-ask", b"utf-7"), ("\\x74ask", b"unicode_escape"))
        )
        body = body.replace(b'"task"', f'"{spelled}"'.encode(), 1)
    short = {"content_type": b"application/json", "content_encoding": encoding}
    content = properties(headers, reply_to=random.forbidden, **short)
    return random.checkin, random.tasks, content, body


def _unread(random: Draw) -> Distributed:
    """Headers, properties and body of a task that check-in and Celery do not read."""
    mark = random.mark.decode()
    headers = {b"task": field_text(b"hostile"), b"id": field_text(b"1")}
    body = [[mark], {}, {}]
    kinds = {
        b"application/x-python-serialize": pickle.dumps(body),
        b"application/x-yaml": f"!!python/object/apply:os.system ['true {mark}']".encode(),
        b"application/x-msgpack": b"\x93\x91\xa9" + random.mark + b"\x80\x80",
    }
    content_type = random.choice((*kinds, b"application/json"))
    if content_type == b"application/json":
        name = random.choice((*encoders(), "unknown"))
        headers[b"compression"] = field_text(name.encode())
        kinds[content_type] = random.choice((random.randbytes(50), b""))
        if name != "unknown":
            kinds[content_type] += compress(json.dumps(body).encode(), name)[0][:-5]
    return (
        headers,
        {"content_type": content_type, "content_encoding": b"utf-8"},
        kinds[content_type],
    )


def _unread_by_check_in(random: Draw) -> Made:
    told, short, body = _unread(random)
    headers = {**told, b"x-delay": _soon(random)}
    if short["content_type"] == b"application/x-python-serialize" and random.random() < 0.5:
        del headers[b"task"]
    content = properties(headers, **short)
    return random.checkin, random.tasks, content, body


def _unread_by_worker(random: Draw) -> Made:
    headers, short, body = _unread(random)
    content = properties({**headers, b"rabbitdelay-due": integer(5)}, **short)
    exchange, key = random.topology.route(0, random.tasks.decode())[:2]
    return exchange, key.encode(), content, body


@cache
def _bomb(name: str) -> bytes:
    """Few bytes that take the worker more than it may have, if it decompresses them."""
    return compress(bytes(2 * MAX_GROWTH // 3), name)[0]


def _compressed(random: Draw) -> Made:
    """A compressed task for the worker, of which some run and the others are too large."""
    name = random.choice(encoders())
    topology, tasks = random.topology, random.tasks.decode()
    headers = {
        b"task": field_text(b"hostile"),
        b"id": field_text(b"%x" % random.getrandbits(64)),
        b"compression": field_text(name.encode()),
        b"rabbitdelay-due": integer(5),
    }
    short = {"content_type": b"application/json", "content_encoding": b"utf-8"}
    # Decompressors of these ignore the bytes behind the stream.
    if random.random() < 0.8 and name in ("application/x-gzip", "application/x-bz2"):
        body = compress(json.dumps([[random.mark.decode()], {}, {}]).encode(), name)[0]
    else:
        body = _bomb(name)
    if random.random() < 0.5:
        del headers[b"rabbitdelay-due"]
    choice = random.random()
    if choice < 0.3:
        key = topology.keys.key_without_digits(tasks)
        return topology.delivery.name, key.encode(), properties(headers, **short), body
    if choice < 0.6:
        headers[b"rabbitdelay-exchange"] = field_text(b"")
        headers[b"rabbitdelay-routing-key"] = field_text(random.tasks)
        tasks = DISTRIBUTION
    exchange, key = topology.route(0, tasks)[:2]
    return exchange, key.encode(), properties(headers, **short), body


def _forged_reason(random: Draw) -> Made:
    """A reason that breaks the line of a list, or speaks to a terminal."""
    breaks = (b"\n", b"\r\n", b"\x85", b"\xe2\x80\xa8", b"\x1b[2J\x1b]0;title\x07", b"\x9b2J")
    reason = b"gone" + random.choice(breaks) + b"2026-01-01 forged by me"
    headers = {b"rabbitdelay-reason": field_text(reason), **_to_allowed(random)}
    exchange = random.topology.module_queues.undeliverable.exchange.name
    return exchange, random.choice((b"", reason)), properties(headers), b"body"


def _malformed(random: Draw) -> Made:
    """A task whose fields have any value, by one of the ways that a task reaches a worker."""
    headers, body = malformed.malformed(random)
    return _to_worker(random, random.choice(_WAYS), headers, body)


def _behind(random: Draw) -> Made:
    """A task without a fault, right behind the former message."""
    headers = {
        b"task": field_text(b"hostile"),
        b"id": field_text(b"%032x" % random.getrandbits(128)),
    }
    return _to_worker(random, random.way, headers, b"[[], {}, {}]")


def _to_worker(random: Draw, way: str, headers: Mapping[bytes, bytes], body: bytes) -> Made:
    random.way = way
    topology, tasks = random.topology, random.tasks.decode()
    exchange, key = random.checkin, random.tasks
    own: dict[bytes, bytes] = {}
    if way == "checked in with a delay":
        own = {b"x-delay": integer(200)}
    elif way == "in the levels":
        exchange, written = topology.route(0.2, tasks)[:2]
        key, own = written.encode(), {b"rabbitdelay-due": integer(5)}
    elif way == "delivered":
        exchange, key = topology.delivery.name, topology.keys.key_without_digits(tasks).encode()
    short = {"content_type": b"application/json", "content_encoding": b"utf-8"}
    # The body has to stay as it is.
    content = properties({**headers, **own}, **short, message_id=_PLACE)
    return exchange, key, content, body


#: How a task reaches a worker.
_WAYS: Final = ("checked in", "checked in with a delay", "in the levels", "delivered")

#: The kind of a task that follows another message.
BEHIND: Final = "task behind it"

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
    "forged reason": Kind(_forged_reason, 5),
    "followed by others": Kind(_following, 15),
    "not read by check-in": Kind(_unread_by_check_in, 5),
    "not read by Celery": Kind(_unread_by_worker, 5, is_dropped=True),
    "compressed": Kind(_compressed, 2),
    "malformed task": Kind(_malformed, 60, is_dropped=True, is_followed=True),
    BEHIND: Kind(_behind, 1),
}
