"""The table of what a hostile client publishes: each kind, how often, and where it may end."""

import itertools
import json
import pickle
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from random import Random
from struct import pack
from typing import Any, Final, NamedTuple, TypeAlias

from kombu.compression import compress, encoders

from celery_rabbitdelay.levels.headers import ENVELOPE
from celery_rabbitdelay.levels.routing_key import DISTRIBUTION
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.modules.envelope import Item, length_prefixed, packed
from tests.hostile.fields import BAD_TEXTS, Field, any_field, nested, properties
from tests.hostile.malformed import malformed

#: The queue that check-in may reach, and nobody consumes; the queue of a Celery worker; a queue
#: that nothing may reach.
ALLOWED: Final = "allowed"
TASKS: Final = "tasks"
FORBIDDEN: Final = "forbidden"

#: The largest body that the worker takes in a campaign.
MAX_BODY: Final = 2**20

#: Bytes that the worker's main process may grow by: two modules hold 64 MiB each and have as much
#: in flight at most, the largest message, and what Python does not give back.
MAX_GROWTH: Final = 384 * 2**20

#: A day before 1970, and a million years after.
DUES: Final = (-86_400_000, 0, 5, 2**62, 2**63 - 1, -(2**63))

#: Delays in texts.
DELAYS: Final = ("1e3", " 5", "0x10", "\u0663", "9" * 5_000, "-1", "7")

#: The headers of this package, and one of a later version.
OWN_NAMES: Final = (
    *("due", "exchange", "routing-key", "queue", "priority", "expiration", "early"),
    *("reason", "attempts", "failed-since", "first-reason", "redriven", "unreadable"),
    *("properties", "copy", "key", "job", "once", "version", "later"),
)

#: What ends the line of a list, or speaks to a terminal.
BREAKS: Final = (b"\n", b"\r\n", b"\x85", b"\xe2\x80\xa8", b"\x1b[2J\x1b]0;title\x07", b"\x9b2J")

#: How a body says which message it is; in a body that has it somewhere, it replaces this.
_NUMBER: Final = b"#%08d"
_PLACE: Final = "#--------"

JSON: Final = {"content_type": "application/json", "content_encoding": "utf-8"}

#: The body of a task.
_PLAIN: Final = b"[[], {}, {}]"

#: How a task goes to the worker.
_WAYS: Final = ("checked in", "checked in with a delay", "in levels", "delivered", "distributed")

Headers: TypeAlias = Mapping[Any, Any]

#: Exchange, key, properties and body of a message.
Made: TypeAlias = tuple[str, str | bytes, bytes, bytes]


class Hostile(NamedTuple):
    """A message of a kind, as it is written; its number is in it."""

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

    def aim(self, topology: Topology) -> None:
        """Let messages be for a topology and the queues beside it."""
        self.topology, self.modules = topology, topology.module_queues
        self.checkin = self.modules.checkin.exchange.name
        names = (ALLOWED, FORBIDDEN, TASKS)
        self.allowed, self.forbidden, self.tasks = (f"{topology.prefix}.{name}" for name in names)

    def soon(self) -> int:
        """A delay."""
        return self.randint(0, 2_000)

    def due(self) -> Any:
        """A due time, or any other value."""
        return self.choice((self.choice(DUES), any_field(self)))

    def own(self) -> dict[str, Any]:
        """Forged headers of this package and of the broker, with values of any type."""
        values: list[Any] = [*(self.forbidden,) * 3, *(self.choice(DUES),) * 2, "celery.pidbox"]
        values += [any_field(self) for _ in range(4)]
        names = (*(f"rabbitdelay-{name}" for name in OWN_NAMES), "x-delivery-count")
        return {name: self.choice(values) for name in self.sample(names, self.randint(1, 6))}

    def passed_on(self, key: str, exchange: str = "") -> dict[str, Any]:
        """The headers by which distribution passes a message on."""
        return {"rabbitdelay-exchange": exchange, "rabbitdelay-routing-key": key}

    def task(self) -> dict[str, Any]:
        """The headers of a task."""
        return {"task": "hostile", "id": f"{self.getrandbits(64):x}"}

    def checked_in(
        self, headers: Headers, body: bytes = b"body", to: str | bytes | None = None, **short: Any
    ) -> Made:
        """A message for check-in, and by default for the allowed queue."""
        content = properties({"x-delay": self.soon(), **headers}, **short)
        return self.checkin, self.allowed if to is None else to, content, body

    def routed(self, to: str, headers: Headers, body: bytes = b"body", **short: Any) -> Made:
        """A message that leaves the levels at once, for a queue or for distribution."""
        exchange, key, _ = self.topology.route(0, to)
        return exchange, key, properties(headers, **short), body


class Kind(NamedTuple):
    """A kind of hostile messages.

    Attributes:
        make: Makes one; if it makes headers alone, they are checked in for the allowed queue.
        weight: How often, compared with the others.
        is_refused: Whether the broker may refuse it.
        is_dropped: Whether Celery may drop it, as it does with what its worker cannot read.
        is_followed: Whether a good task follows on the same way, which has to run.
    """

    make: Callable[[Draw], Made | Headers]
    weight: float = 10
    is_refused: bool = False
    is_dropped: bool = False
    is_followed: bool = False


def hostile_messages(topology: Topology, count: int, seed: int) -> Iterator[Hostile]:
    """Yield so many messages; the same ones for the same seed."""
    draw = Draw(seed)
    draw.aim(topology)
    names, weights = list(KINDS), [kind.weight for kind in KINDS.values()]
    # Each kind at least once.
    chosen = [*names, *draw.choices(names, weights, k=max(count - len(names), 0))][:count]
    draw.shuffle(chosen)
    numbers, place = itertools.count(), _PLACE.encode()
    for name in chosen:
        for each in (name, *([BEHIND] if KINDS[name].is_followed else [])):
            number = next(numbers)
            mark = draw.mark = _NUMBER % number
            made = KINDS[each].make(draw)
            exchange, key, content, body = (
                made if isinstance(made, tuple) else draw.checked_in(made)
            )
            if place not in content + body:
                body += mark
            content, body = (part.replace(place, mark) for part in (content, body))
            key = key if isinstance(key, bytes) else key.encode()
            yield Hostile(number, each, exchange, key, content, body)


def _not_allowed(draw: Draw) -> Made:
    exchanges = ("celery.pidbox", "celeryev", "amq.fanout", "reply.celery", draw.forbidden)
    own = {"rabbitdelay-exchange": draw.choice(exchanges)} if draw.random() < 0.5 else {}
    return draw.checked_in(own, to=draw.forbidden)


def _bad_key(draw: Draw) -> Made:
    keys = (*BAD_TEXTS, draw.allowed.encode() + b"\xff", b"\xff" * 255, b"k" * 255)
    return draw.checked_in({}, to=draw.choice(keys))


def _odd_properties(draw: Draw) -> Made:
    names = ("content_type", "content_encoding", "correlation_id", "reply_to", "message_id", "type")
    short: dict[str, Any] = {draw.choice(names): draw.choice(BAD_TEXTS)}
    short |= {"priority": draw.randint(0, 255), "timestamp": draw.choice((0, 2**64 - 1))}
    return draw.checked_in({}, delivery_mode=draw.choice((1, 2)), **short)


def _deep(draw: Draw) -> Headers:
    depth = draw.choice((31, 32, 33, 300, 990, 5_000))
    name = draw.choice(("deep", "headers", "rabbitdelay-early"))
    return {name: nested(depth, draw.random() < 0.5)}


def _nested_headers(draw: Draw) -> dict[str, Any]:
    inner = draw.own()
    for _ in range(draw.randint(0, 30)):
        inner = {"headers": inner, "rabbitdelay-due": 5}
    return {"headers": inner}


def _wide(draw: Draw) -> Headers:
    """Headers as large as a frame, and many times as large once they are read."""
    names = (b"%c%c" % pair for pair in itertools.product(range(33, 127), repeat=2))
    text = "x" * draw.randint(126_000, 130_800)
    return {"wide": draw.choice((dict.fromkeys(names), [{}] * 25_000, text))}


def _large(draw: Draw) -> Made:
    return draw.checked_in({}, b"\0" * draw.choice((MAX_BODY - 9, MAX_BODY + 1, 2 * MAX_BODY)))


def _deaths(draw: Draw) -> Headers:
    queues = [queue.name for queue in draw.modules.queues]
    death = {
        "queue": draw.choice(("nowhere", b"\xff", draw.forbidden, *queues)),
        "reason": draw.choice(("rejected", "expired", b"\xff")),
        "exchange": draw.choice((draw.modules.meditated.name, draw.checkin)),
        "routing-keys": draw.choice(([b"\xff"], any_field(draw))),
        "count": draw.choice(DUES),
        "time": Field(b"T" + pack(">Q", 2**40)),
    }
    return {"x-death": [death]}


def _refused(draw: Draw) -> Made:
    choices = (
        pack(">H", draw.getrandbits(16)) + draw.randbytes(draw.randint(0, 60)),
        pack(">HI", 0x2000, draw.choice((2**32 - 1, 1_000))) + b"\1aV",
        properties({"a": Field(b"?" + draw.randbytes(4))}),
        properties({"CC": any_field(draw)}, expiration="soon", user_id="somebody"),
        properties({"nan": Field(b"d" + pack(">d", float("nan")))}),  # Erlang has no such number
    )
    return draw.checkin, draw.allowed, draw.choice(choices), b"body"


def _distributed(draw: Draw) -> Made:
    """Forged headers, destinations, or due times of a message for the allowed queue."""
    times = {"times": draw.choice(DUES), "until": draw.choice(DUES)}
    early = {"rabbitdelay-early": draw.choice((times, any_field(draw)))}
    dues = {**draw.passed_on(draw.allowed), "rabbitdelay-due": draw.due(), **early}
    exchange = draw.choice(("", "", "celery.pidbox", "celeryev", "amq.topic"))
    own = {"rabbitdelay-queue": draw.forbidden} if draw.random() < 0.3 else {}
    forged = {**draw.passed_on(draw.forbidden, exchange), **own}
    return draw.routed(DISTRIBUTION, draw.choice((dues, forged, draw.own())))


def _envelope(draw: Draw) -> Made:
    """An envelope with something wrong in it."""
    mark, block = draw.mark, length_prefixed
    items: tuple[tuple[Any, ...], ...] = (
        (mark, {"rabbitdelay-routing-key": draw.forbidden}),
        (mark, {"CC": [draw.forbidden]}),
        (mark, {}, {"priority": "high", "self": 1, "channel": {}}),
        (b"\0" * (MAX_BODY + 1) + mark,),
        (mark, {}, {"content_type": ENVELOPE}),
        (mark, {"n": 10**300}),
        (mark, {"rabbitdelay-routing-key": "\ud800"}),
    )
    blocks = (
        lambda: block(b'{"headers":{"a":' + b"[" * 2_000 + b"]" * 2_000 + b"}}"),
        lambda: block(b'{"headers":{"a":1e999,"b":NaN}}') + block(mark),
        lambda: pack(">I", 2**32 - 1) + b"{}",  # a length that lies
        lambda: block(json.dumps({"headers": {"a": "x" * 2**20}}).encode()),
        lambda: (block(b"{}") + block(b"\0" * (MAX_BODY - 9) + mark)) * 4,
    )
    choice = draw.random()
    if choice < 0.5:
        body = packed((Item(*draw.choice(items)),))
    elif choice < 0.9:
        body = zlib.compress(block(b"{}") + draw.choice(blocks)())
    else:
        body = draw.choice((draw.randbytes(50), packed((Item(mark),))[:-5]))
    return draw.routed(DISTRIBUTION, draw.passed_on(draw.allowed), body, content_type=ENVELOPE)


def _level(draw: Draw) -> Made:
    """Straight into the levels, or to meditation."""
    exchanges = [*draw.topology.exchanges[1:3], draw.modules.meditated]
    key = draw.choice((b"1.2.nowhere", b"0.0.%nothing", b"9.9.9.9", b"", b"\xff.\xff", b"#.*"))
    content = properties({"rabbitdelay-due": draw.due(), **draw.own()})
    return draw.choice(exchanges).name, key, content, b"body"


def _undeliverable(draw: Draw) -> Made:
    """Anything, straight to ``undeliverable``, perhaps with a reason that breaks its line."""
    reason = b"gone" + draw.choice(BREAKS) + b"2026-01-01 forged by me"
    forged = {"rabbitdelay-reason": reason, **draw.passed_on(draw.allowed)}
    content = properties(draw.choice((forged, {**draw.own(), **_deaths(draw)})))
    key = draw.choice((*BAD_TEXTS, reason))
    return draw.modules.undeliverable.exchange.name, key, content, b"body"


def _task(draw: Draw) -> Made:
    """A task for the worker's own consumer, which restores it."""
    headers = {**draw.task(), **draw.own(), **_nested_headers(draw)}
    for name in ("expiration", "queue"):  # it could expire in its queue
        headers.pop(f"rabbitdelay-{name}", None)
    headers["sentry-task-enqueued-time"] = any_field(draw, 0)
    headers |= {"rabbitdelay-queue": draw.tasks} if draw.random() < 0.5 else {}
    draw.way = "distributed"
    body = f'[["{_PLACE}"], {{}}, {{}}]'.encode()  # it may lose its properties
    # A due time: distribution leaves it to the worker.
    return _to_worker(draw, headers, body, draw.choice((5, "soon", True, {})))


def _following(draw: Draw) -> Made:
    """A task for check-in that has a worker publish to the forbidden queue, if it runs."""
    options = {"exchange": "amq.direct", "routing_key": draw.forbidden}
    evil = {"task": "hostile", "args": [], "kwargs": {}, "options": options}
    name = draw.choice(("callbacks", "errbacks", "chain", "chord", "group", "taskset"))
    following = {name: evil if name == "chord" else [evil]}
    headers, encoding, choice = draw.task(), "utf-8", draw.random()
    if choice < 0.4:
        body = json.dumps([[], {}, following])
        headers |= {"group": "g"} if name == "group" else {}
    elif choice < 0.6:
        headers["task"] = draw.choice(("celery.group", "celery.chain", "celery.chord"))
        body = json.dumps([[[evil], ["0", []], "g", []], {}, {}])
    else:
        escaped = (draw.choice((each, f"\\u{ord(each):04x}")) for each in "task")
        # py-amqp decodes a body for the worker.
        spelled, encoding = draw.choice(
            (("".join(escaped), "utf-8"), ("+AHQ-ask", "utf-7"), ("\\x74ask", "unicode_escape"))
        )
        headers, told = {}, {"task": "hostile", "id": "1", "args": [], "kwargs": {}, **following}
        body = json.dumps(told).replace('"task"', f'"{spelled}"', 1)
    draw.way = "checked in"
    short = {"content_encoding": encoding, "reply_to": draw.forbidden}
    return _to_worker(draw, headers, body.encode(), **short)


def _unread(draw: Draw) -> Made:
    """A task that check-in and Celery do not read."""
    content_type, body = draw.choice(
        (
            ("application/x-python-serialize", pickle.dumps([[], {}, {}])),
            ("application/x-yaml", b"!!python/object/apply:os.system [true]"),
            ("application/x-msgpack", b"\x93\x90\x80\x80"),
            ("application/json", draw.choice((draw.randbytes(50), b""))),
        )
    )
    draw.way = draw.choice(_WAYS)
    return _to_worker(draw, draw.task(), body, content_type=content_type)


@cache
def _bomb(name: str) -> bytes:
    """Few bytes that take the worker more than it may have, if it decompresses them."""
    return compress(bytes(2 * MAX_GROWTH // 3), name)[0]


def _compressed(draw: Draw) -> Made:
    """A compressed task for the worker: some run, and the others are too large."""
    name, draw.way = draw.choice(encoders()), draw.choice(_WAYS)
    body = draw.choice((_bomb(name), compress(_PLAIN, name)[0]))
    return _to_worker(draw, {**draw.task(), "compression": name}, body)


def _malformed(draw: Draw) -> Made:
    """A task whose fields have any value, by one of the ways that a task reaches a worker."""
    draw.way = draw.choice(_WAYS[:-1])
    return _to_worker(draw, *malformed(draw))


def _behind(draw: Draw) -> Made:
    """A task without a fault, right behind the former message."""
    return _to_worker(draw, draw.task(), _PLAIN)


def _to_worker(draw: Draw, headers: Headers, body: bytes, due: Any = 5, **short: str) -> Made:
    topology, own = draw.topology, dict[str, Any]()
    address = draw.checkin, draw.tasks
    if draw.way == "checked in with a delay":
        own = {"x-delay": 200}
    elif draw.way == "in levels":
        address, own = topology.route(0.2, draw.tasks)[:2], {"rabbitdelay-due": 5}
    elif draw.way == "delivered":
        address = topology.delivery.name, topology.keys.key_without_digits(draw.tasks)
    elif draw.way == "distributed":
        address = topology.route(0, DISTRIBUTION)[:2]
        own = {**draw.passed_on(draw.tasks), "rabbitdelay-due": due}
    # The body has to stay as it is.
    content = properties({**headers, **own}, message_id=_PLACE, **{**JSON, **short})
    return *address, content, body


#: The kind of a task that follows another message.
BEHIND: Final = "task behind it"

KINDS: Final[dict[str, Kind]] = {
    "plain": Kind(lambda draw: {"own": any_field(draw)}, 20),
    "delay of any type": Kind(
        lambda draw: {"x-delay": draw.choice((draw.choice(DELAYS), draw.due()))}, 15
    ),
    "not allowed": Kind(_not_allowed),
    "key not UTF-8": Kind(_bad_key),
    "header name not UTF-8": Kind(
        lambda draw: {draw.choice((b"\xff", b"rabbitdelay-\xff", b"", b"n" * 128)): draw.due()}
    ),
    "property not UTF-8": Kind(_odd_properties, 15),
    "deep": Kind(_deep, 2),
    "nested headers": Kind(_nested_headers),
    "as large as a frame": Kind(_wide, 0.5),
    "large body": Kind(_large, 0.1),
    "forged headers": Kind(Draw.own, 20),
    "forged x-death": Kind(_deaths),
    "sender-selected": Kind(lambda draw: {draw.choice(("CC", "BCC")): [draw.forbidden]}, 5),
    "refused by the broker": Kind(_refused, 0.2, is_refused=True),
    "distributed with forged headers": Kind(_distributed, 30),
    "envelope": Kind(_envelope),
    "task": Kind(_task),
    "levels": Kind(_level),
    "undeliverable": Kind(_undeliverable),
    "followed by others": Kind(_following, 15),
    "not read": Kind(_unread, 5, is_dropped=True),
    "compressed": Kind(_compressed, 2),
    "malformed task": Kind(_malformed, 60, is_dropped=True, is_followed=True),
    BEHIND: Kind(_behind, 1),
}
