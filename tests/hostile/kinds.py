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
from typing import Final, NamedTuple

from kombu.compression import compress, encoders

from celery_rabbitdelay.levels.headers import ENVELOPE
from celery_rabbitdelay.levels.routing_key import DISTRIBUTION
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.modules.envelope import Envelope, Item, length_prefixed
from tests.hostile.fields import BAD_TEXTS, any_field, array, integer, nested, properties, table
from tests.hostile.fields import text as field_text
from tests.hostile.malformed import malformed

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

#: The headers of this package, and one of a later version.
OWN_NAMES: Final = (
    *(b"due", b"exchange", b"routing-key", b"queue", b"priority", b"expiration", b"early"),
    *(b"reason", b"attempts", b"failed-since", b"first-reason", b"redriven", b"unreadable"),
    *(b"properties", b"copy", b"key", b"job", b"once", b"version", b"later"),
)

#: How a body says which message it is; in a body that has it somewhere, it replaces this.
_NUMBER: Final = b"#%08d"
_PLACE: Final = b"#--------"

JSON: Final = {"content_type": b"application/json", "content_encoding": b"utf-8"}

Headers = Mapping[bytes, bytes]

#: Exchange, key, properties and body of a message.
Made = tuple[str, bytes, bytes, bytes]


class Hostile(NamedTuple):
    """A message, as it is written.

    Attributes:
        number: Which one; its body ends with it.
        kind: The name of its kind.
        exchange: Where it is published.
        key: Its routing key.
        properties: Its properties.
        body: Its body.
    """

    number: int
    kind: str
    exchange: str
    key: bytes
    properties: bytes
    body: bytes


class Draw(Random):
    """Random numbers, the same ones for the same seed, and where messages may be for.

    Attributes:
        mark: What tells the message that is made from all others.
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
        self.modules = topology.module_queues
        self.checkin = self.modules.checkin.exchange.name
        self.allowed, self.forbidden, self.tasks = (
            f"{topology.prefix}.{name}".encode() for name in (ALLOWED, FORBIDDEN, TASKS)
        )

    def soon(self) -> bytes:
        """A delay."""
        return integer(self.randint(0, 2_000))

    def due(self) -> bytes:
        """A due time, or any other value."""
        return self.choice((integer(self.choice(DUES)), any_field(self)))

    def own(self) -> dict[bytes, bytes]:
        """Forged headers of this package and of the broker, with values of any type."""
        values = (
            *(field_text(self.forbidden),) * 3,
            *(integer(self.choice(DUES)),) * 2,
            field_text(b"celery.pidbox"),
            *(any_field(self) for _ in range(4)),
        )
        names = (*(b"rabbitdelay-" + name for name in OWN_NAMES), b"x-delivery-count")
        return {name: self.choice(values) for name in self.sample(names, self.randint(1, 6))}

    def to_allowed(self) -> dict[bytes, bytes]:
        """The headers by which distribution passes a message on to the allowed queue."""
        key = field_text(self.allowed)
        return {b"rabbitdelay-exchange": field_text(b""), b"rabbitdelay-routing-key": key}

    def task(self) -> dict[bytes, bytes]:
        """The headers of a task."""
        return {b"task": field_text(b"hostile"), b"id": field_text(b"%x" % self.getrandbits(64))}

    def checked_in(self, headers: Headers, **short: bytes) -> Made:
        """A message for check-in and the allowed queue."""
        return self.checkin, self.allowed, properties(headers, **short), b"body"

    def routed(self, to: str, headers: Headers, body: bytes = b"body", **short: bytes) -> Made:
        """A message that leaves the levels at once, for a queue or for distribution."""
        exchange, key, _ = self.topology.route(0, to)
        return exchange, key.encode(), properties(headers, **short), body


class Kind(NamedTuple):
    """A kind of hostile messages.

    Attributes:
        make: Makes one.
        weight: How often, compared with the others.
        is_refused: Whether the broker may refuse it.
        is_dropped: Whether Celery may drop it, as it does with what its worker cannot read.
        is_followed: Whether a good task follows on the same way, which has to run.
    """

    make: Callable[[Draw], Made]
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
        for each in (name, *([BEHIND] if KINDS[name].is_followed else [])):
            number = next(numbers)
            mark = random.mark = _NUMBER % number
            exchange, key, content, body = KINDS[each].make(random)
            if _PLACE in content:
                content = content.replace(_PLACE, mark)
            else:
                body = body.replace(_PLACE, mark) if _PLACE in body else body + mark
            yield Hostile(number, each, exchange, key, content, body)


def _delay(random: Draw) -> Made:
    texts = (b"1e3", b" 5", b"0x10", b"\xd9\xa3", b"9" * 5_000, b"-1", b"7")
    return random.checked_in(
        {b"x-delay": random.choice((field_text(random.choice(texts)), random.due()))}
    )


def _not_allowed(random: Draw) -> Made:
    exchanges: tuple[bytes, ...] = (b"celery.pidbox", b"celeryev", b"amq.fanout", b"reply.celery")
    headers = {b"x-delay": random.soon()}
    if random.random() < 0.5:
        headers[b"rabbitdelay-exchange"] = field_text(random.choice((*exchanges, random.forbidden)))
    return random.checkin, random.forbidden, properties(headers), b"body"


def _bad_key(random: Draw) -> Made:
    key = random.choice((*BAD_TEXTS, random.allowed + b"\xff", b"\xff" * 255, b"k" * 255))
    return random.checkin, key, properties({b"x-delay": random.soon()}), b"body"


def _bad_names(random: Draw) -> Made:
    names = (b"\xff", b"rabbitdelay-\xff", b"x-death\xff", b"", b"n" * 128, b"headers")
    return random.checked_in({random.choice(names): any_field(random), b"x-delay": random.soon()})


def _bad_properties(random: Draw) -> Made:
    names = ("content_type", "content_encoding", "correlation_id", "reply_to", "message_id", "type")
    short: dict[str, bytes] = {random.choice(names): random.choice(BAD_TEXTS)}
    short["priority"] = bytes((random.randint(0, 255),))
    short["delivery_mode"] = random.choice((b"\1", b"\2"))
    short["timestamp"] = pack(">Q", random.choice((0, 2**64 - 1)))
    return random.checked_in({b"x-delay": random.soon()}, **short)


def _deep(random: Draw) -> Made:
    depth = random.choice((31, 32, 33, 300, 990, 5_000))
    name = random.choice((b"deep", b"headers", b"rabbitdelay-early"))
    deep = nested(depth, random.random() < 0.5)
    return random.checked_in({name: deep, b"x-delay": random.soon()})


def _nested_headers(random: Draw) -> dict[bytes, bytes]:
    inner: bytes = table(random.own())
    for _ in range(random.randint(0, 30)):
        inner = table({b"headers": inner, b"rabbitdelay-due": integer(5)})
    return {b"headers": inner, b"x-delay": random.soon()}


def _wide(random: Draw) -> Made:
    """Headers as large as a frame, and many times as large once they are read."""
    names = (b"%c%c" % pair for pair in itertools.product(range(33, 127), repeat=2))
    choices = (
        lambda: table(dict.fromkeys(names, b"V")),
        lambda: array([b"F\0\0\0\0"] * 25_000),
        lambda: field_text(b"x" * random.randint(126_000, 130_800)),
    )
    return random.checked_in({b"wide": random.choice(choices)()})


def _large(random: Draw) -> Made:
    size = random.choice((MAX_BODY - 9, MAX_BODY + 1, 2 * MAX_BODY))
    return (*random.checked_in({b"x-delay": random.soon()})[:3], b"\0" * size)


def _deaths(random: Draw) -> dict[bytes, bytes]:
    checkin = random.checkin
    queues = [queue.name.encode() for queue in random.modules.queues]
    death = {
        b"queue": field_text(random.choice((b"nowhere", b"\xff", random.forbidden, *queues))),
        b"reason": field_text(random.choice((b"rejected", b"expired", b"\xff"))),
        b"exchange": field_text(random.choice((random.modules.meditated.name, checkin)).encode()),
        b"routing-keys": random.choice((array([field_text(b"\xff")]), any_field(random))),
        b"count": integer(random.choice(DUES)),
        b"time": b"T" + pack(">Q", 2**40),
    }
    return {b"x-delay": random.soon(), b"x-death": array([table(death)])}


def _expiring(random: Draw) -> Made:
    expiration = random.choice((b"0", b"1", b"60000"))
    return random.checked_in({b"x-delay": random.soon()}, expiration=expiration)


def _refused_properties(random: Draw) -> Made:
    not_finite = random.choice((float("nan"), float("inf")))  # Erlang has no such numbers
    choices = (
        lambda: pack(">H", random.getrandbits(16)) + random.randbytes(random.randint(0, 60)),
        lambda: pack(">HI", 0x2000, random.choice((2**32 - 1, 1_000))) + b"\1aV",
        lambda: properties({b"a": b"?" + random.randbytes(4)}),
        lambda: properties({b"CC": any_field(random)}),
        lambda: properties({}, expiration=b"soon"),
        lambda: properties({}, delivery_mode=b"\7"),
        lambda: properties({}, user_id=b"somebody"),
        lambda: properties({b"nan": b"d" + pack(">d", not_finite)}),
    )
    return random.checkin, random.allowed, random.choice(choices)(), b"body"


def _forged_destination(random: Draw) -> Made:
    exchange = random.choice((b"", b"", b"celery.pidbox", b"celeryev", b"amq.topic"))
    forbidden = field_text(random.forbidden)
    headers = {b"rabbitdelay-exchange": field_text(exchange), b"rabbitdelay-routing-key": forbidden}
    if random.random() < 0.3:
        headers[b"rabbitdelay-queue"] = forbidden
    return random.routed(DISTRIBUTION, headers)


def _far_due(random: Draw) -> Made:
    times = {b"times": integer(random.choice(DUES)), b"until": integer(random.choice(DUES))}
    early = (table(times), any_field(random))
    own = {b"rabbitdelay-due": random.due(), b"rabbitdelay-early": random.choice(early)}
    return random.routed(DISTRIBUTION, {**random.to_allowed(), **own})


def _envelope(random: Draw) -> Made:
    """An envelope with something wrong in it."""
    forbidden, mark = random.forbidden.decode(), random.mark
    items = (
        Item(mark, {"rabbitdelay-routing-key": forbidden}),
        Item(mark, {"CC": [forbidden]}),
        Item(mark, {}, {"body": "y", "self": 1, "channel": {}}),
        Item(mark, {}, {"priority": "high", "content_type": 7}),
        Item(b"\0" * (MAX_BODY + 1) + mark),
        Item(mark, {}, {"content_type": ENVELOPE}),
        Item(mark, {"n": 10**300}),
        Item(mark, {"rabbitdelay-routing-key": "\ud800"}),
    )
    block = length_prefixed
    blocks = (
        lambda: block(b'{"headers":{"a":' + b"[" * 2_000 + b"]" * 2_000 + b"}}"),
        lambda: block(b'{"headers":{"a":NaN}}') + block(mark),
        lambda: block(b'{"headers":{"a":1e999}}') + block(mark),
        lambda: pack(">I", 2**32 - 1) + b"{}",  # a length that lies
        lambda: block(random.randbytes(20)),
        lambda: block(b'{"headers":{"a":' + b"9" * 5_000 + b"}}"),
        lambda: block(json.dumps({"headers": {"a": "x" * 2**20}}).encode()),
        lambda: (block(b"{}") + block(b"\0" * (MAX_BODY - 9) + mark)) * 4,
    )
    choice = random.random()
    if choice < 0.5:
        body = Envelope((random.choice(items),)).pack()
    elif choice < 0.9:
        body = zlib.compress(block(b"{}") + random.choice(blocks)())
    else:
        body = random.choice((random.randbytes(50), Envelope((Item(mark),)).pack()[:-5]))
    return random.routed(DISTRIBUTION, random.to_allowed(), body, content_type=ENVELOPE.encode())


def _meditated(random: Draw) -> Made:
    content = properties({b"rabbitdelay-due": random.due(), **random.own()})
    return random.modules.meditated.name, random.choice((b"nowhere", b"\xff")), content, b"body"


def _level(random: Draw) -> Made:
    exchange = random.choice(random.topology.exchanges[1:3]).name
    key = random.choice((b"1.2.nowhere", b"0.0.%nothing", b"9.9.9.9", b"", b"\xff.\xff", b"#.*"))
    return exchange, key, properties(random.own()), b"body"


def _straight_to_undeliverable(random: Draw) -> Made:
    content = properties({**random.own(), **_deaths(random)})
    return random.modules.undeliverable.exchange.name, random.choice(BAD_TEXTS), content, b"body"


def _forged_reason(random: Draw) -> Made:
    """A reason that breaks the line of a list, or speaks to a terminal."""
    breaks = (b"\n", b"\r\n", b"\x85", b"\xe2\x80\xa8", b"\x1b[2J\x1b]0;title\x07", b"\x9b2J")
    reason = b"gone" + random.choice(breaks) + b"2026-01-01 forged by me"
    content = properties({b"rabbitdelay-reason": field_text(reason), **random.to_allowed()})
    exchange = random.modules.undeliverable.exchange.name
    return exchange, random.choice((b"", reason)), content, b"body"


def _task(random: Draw) -> Made:
    """A task for the worker's own consumer, which restores it, by distribution."""
    headers = {
        **random.task(),
        **random.own(),
        **_nested_headers(random),
        b"sentry-task-enqueued-time": any_field(random, 0),
        b"rabbitdelay-exchange": field_text(b""),
        b"rabbitdelay-routing-key": field_text(random.tasks),
        # A due time: distribution leaves it to the worker.
        b"rabbitdelay-due": random.choice((integer(5), field_text(b"soon"), b"t\1", table({}))),
    }
    headers.pop(b"rabbitdelay-expiration", None)  # it could expire in its queue
    headers.pop(b"rabbitdelay-queue", None)
    if random.random() < 0.5:
        headers[b"rabbitdelay-queue"] = headers[b"rabbitdelay-routing-key"]
    return random.routed(DISTRIBUTION, headers, b'[["' + _PLACE + b'"], {}, {}]', **JSON)


def _following(random: Draw) -> Made:
    """A task for check-in that has a worker publish to the forbidden queue, if it runs."""
    options = {"exchange": "amq.direct", "routing_key": random.forbidden.decode()}
    place, short = _PLACE.decode(), dict(JSON)
    evil = {"task": "hostile", "args": [place], "kwargs": {}, "options": options}
    name = random.choice(("callbacks", "errbacks", "chain", "chord", "group", "taskset"))
    following = {name: evil if name == "chord" else [evil]}
    headers = {b"x-delay": random.soon()}
    choice = random.random()
    if choice < 0.4:
        body = json.dumps([[place], {}, following]).encode()
        headers |= random.task() | ({b"group": field_text(b"g")} if name == "group" else {})
    elif choice < 0.6:
        own = random.choice((b"celery.group", b"celery.chain", b"celery.chord", b"celery.map"))
        body = json.dumps([[[evil], ["0", []], "g", []], {}, {}]).encode()
        headers |= {**random.task(), b"task": field_text(own)}
    else:
        told = {"task": "hostile", "id": "1", "args": [place], "kwargs": {}, **following}
        escaped = (random.choice((each, f"\\u{ord(each):04x}")) for each in "task")
        # py-amqp decodes a body for the worker.
        spelled, short["content_encoding"] = random.choice(
            (("".join(escaped), b"utf-8"), ("+AHQ-ask", b"utf-7"), ("\\x74ask", b"unicode_escape"))
        )
        body = json.dumps(told).encode().replace(b'"task"', f'"{spelled}"'.encode(), 1)
    return (
        random.checkin,
        random.tasks,
        properties(headers, reply_to=random.forbidden, **short),
        body,
    )


def _unread(random: Draw) -> tuple[dict[bytes, bytes], dict[str, bytes], bytes]:
    """Headers, properties and body of a task that check-in and Celery do not read."""
    mark, headers = random.mark.decode(), random.task()
    body = [[mark], {}, {}]
    kinds = {
        b"application/x-python-serialize": pickle.dumps(body),
        b"application/x-yaml": f"!!python/object/apply:os.system ['true {mark}']".encode(),
        b"application/x-msgpack": b"\x93\x91\xa9" + random.mark + b"\x80\x80",
        b"application/json": random.choice((random.randbytes(50), b"")),
    }
    content_type, written = random.choice(list(kinds.items()))
    if content_type == b"application/json":
        name = random.choice((*encoders(), "unknown"))
        headers[b"compression"] = field_text(name.encode())
        if name != "unknown":
            written += compress(json.dumps(body).encode(), name)[0][:-5]
    return headers, {"content_type": content_type, "content_encoding": b"utf-8"}, written


def _unread_by_check_in(random: Draw) -> Made:
    told, short, body = _unread(random)
    headers = {**told, b"x-delay": random.soon()}
    if short["content_type"] == b"application/x-python-serialize" and random.random() < 0.5:
        del headers[b"task"]
    return random.checkin, random.tasks, properties(headers, **short), body


def _unread_by_worker(random: Draw) -> Made:
    headers, short, body = _unread(random)
    return random.routed(
        random.tasks.decode(), {**headers, b"rabbitdelay-due": integer(5)}, body, **short
    )


@cache
def _bomb(name: str) -> bytes:
    """Few bytes that take the worker more than it may have, if it decompresses them."""
    return compress(bytes(2 * MAX_GROWTH // 3), name)[0]


def _compressed(random: Draw) -> Made:
    """A compressed task for the worker, of which some run and the others are too large."""
    name, tasks = random.choice(encoders()), random.tasks.decode()
    headers = {**random.task(), b"compression": field_text(name.encode())}
    # Decompressors of these ignore the bytes behind the stream.
    if random.random() < 0.8 and name in ("application/x-gzip", "application/x-bz2"):
        body = compress(json.dumps([[random.mark.decode()], {}, {}]).encode(), name)[0]
    else:
        body = _bomb(name)
    if random.random() < 0.5:
        headers[b"rabbitdelay-due"] = integer(5)
    choice = random.random()
    if choice < 0.3:
        key = random.topology.keys.key_without_digits(tasks).encode()
        return random.topology.delivery.name, key, properties(headers, **JSON), body
    if choice < 0.6:
        return random.routed(tasks, headers, body, **JSON)
    headers |= {**random.to_allowed(), b"rabbitdelay-routing-key": field_text(random.tasks)}
    return random.routed(DISTRIBUTION, headers, body, **JSON)


def _malformed(random: Draw) -> Made:
    """A task whose fields have any value, by one of the ways that a task reaches a worker."""
    random.way = random.choice(("checked in", "checked in with a delay", "in levels", "delivered"))
    return _to_worker(random, *malformed(random))


def _behind(random: Draw) -> Made:
    """A task without a fault, right behind the former message."""
    return _to_worker(random, random.task(), b"[[], {}, {}]")


def _to_worker(random: Draw, headers: Headers, body: bytes) -> Made:
    topology, tasks = random.topology, random.tasks.decode()
    exchange, key = random.checkin, random.tasks
    own: dict[bytes, bytes] = {}
    if random.way == "checked in with a delay":
        own = {b"x-delay": integer(200)}
    elif random.way == "in levels":
        exchange, written = topology.route(0.2, tasks)[:2]
        key, own = written.encode(), {b"rabbitdelay-due": integer(5)}
    elif random.way == "delivered":
        exchange, key = topology.delivery.name, topology.keys.key_without_digits(tasks).encode()
    # The body has to stay as it is.
    return exchange, key, properties({**headers, **own}, **JSON, message_id=_PLACE), body


#: The kind of a task that follows another message.
BEHIND: Final = "task behind it"

KINDS: Final[dict[str, Kind]] = {
    "plain": Kind(
        lambda random: random.checked_in({b"x-delay": random.soon(), b"own": any_field(random)}), 20
    ),
    "delay of any type": Kind(_delay, 15),
    "not allowed": Kind(_not_allowed),
    "key not UTF-8": Kind(_bad_key),
    "header name not UTF-8": Kind(_bad_names),
    "property not UTF-8": Kind(_bad_properties),
    "deep": Kind(_deep, 2),
    "nested headers": Kind(lambda random: random.checked_in(_nested_headers(random))),
    "as large as a frame": Kind(_wide, 0.5),
    "large body": Kind(_large, 0.1),
    "forged headers": Kind(lambda random: random.checked_in(random.own()), 20),
    "forged x-death": Kind(lambda random: random.checked_in(_deaths(random))),
    "expiring": Kind(_expiring, 5),
    "sender-selected": Kind(
        lambda random: random.checked_in(
            {random.choice((b"CC", b"BCC")): array([field_text(random.forbidden)])}
        ),
        5,
    ),
    "refused by the broker": Kind(_refused_properties, 0.2, is_refused=True),
    "forged destination": Kind(_forged_destination, 15),
    "distributed with forged headers": Kind(
        lambda random: random.routed(DISTRIBUTION, random.own())
    ),
    "forged due time": Kind(_far_due, 5),
    "envelope": Kind(_envelope),
    "task": Kind(_task),
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
