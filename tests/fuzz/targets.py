"""What is fuzzed: each target takes bytes, and asserts what must hold for any of them."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from struct import pack, unpack_from
from types import SimpleNamespace
from typing import Any, Final, cast

import amqp
from kombu import Connection
from kombu.compression import compress, decompress, encoders
from kombu.serialization import loads

from celery_rabbitdelay import Celery
from celery_rabbitdelay.exceptions import InvalidEnvelope, LaterVersion, UnprocessableMessage
from celery_rabbitdelay.kombu import DelayedProducer, Publisher
from celery_rabbitdelay.levels.headers import ENVELOPE
from celery_rabbitdelay.levels.layout import custom
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.modules import forwarding
from celery_rabbitdelay.modules.checkin import CANVAS, CheckIn
from celery_rabbitdelay.modules.distribution import Distribution
from celery_rabbitdelay.modules.envelope import Item, OpenedEnvelope, compressed, packed
from celery_rabbitdelay.modules.limits import MAX_DEPTH, AllowedDestinations
from celery_rabbitdelay.operations.reasons import examine
from celery_rabbitdelay.operations.redriving import Redriving
from celery_rabbitdelay.publishing.kombu_internals import decompressed_size
from celery_rabbitdelay.publishing.message import headers_of
from celery_rabbitdelay.publishing.wire import _frame_handler
from celery_rabbitdelay.worker.celery_requests import CeleryRequests
from tests.hostile.kinds import ALLOWED as ALLOWED_QUEUE
from tests.hostile.kinds import TASKS, hostile_messages
from tests.kernel.unit.waiting import waiting

TOPOLOGY: Final = Topology("f", custom([("seconds", 6, 1), ("ms", 10, 0.1)]))
MODULES: Final = TOPOLOGY.module_queues
UNDELIVERABLE: Final = MODULES.undeliverable.exchange.name
FRAME_MAX: Final = 131_072

#: Bytes of a body that is read; the fuzzer's own are below it.
MAX_MESSAGE_BYTES: Final = 2**16

#: Bytes of the largest input.
LARGEST: Final = 8192

#: The exchanges that a message may have been published to; each target takes one or two.
CHECKED_IN: Final = (MODULES.checkin.exchange.name, MODULES.meditated.name)
DELIVERED: Final = (TOPOLOGY.delivery.name, MODULES.unrouted.name)

#: Where messages may go, besides the levels and ``undeliverable``.
QUEUES: Final = frozenset(f"{TOPOLOGY.prefix}.{name}" for name in (ALLOWED_QUEUE, TASKS))
ALLOWED: Final = AllowedDestinations(QUEUES, frozenset({"news"}))
OWN: Final = frozenset(each.name for each in TOPOLOGY.exchanges)

#: Checks tasks as a worker does that serves check-in.
CELERY: Final = CeleryRequests(Celery("fuzzed", set_as_current=False))

#: Bytes to which the fuzzer's own bodies are decompressed at most.
MOST_DECOMPRESSED: Final = 2**24


def received(given: bytes, exchanges: tuple[str, ...]) -> amqp.Message | None:
    """Return the message that some bytes are, read as a connection reads it.

    Byte 0 chooses the exchange, then come the routing key (a byte for its length), the length of
    the properties (two bytes), the properties, and the body.
    """
    if len(given) < 4:
        return None
    key = given[2 : 2 + given[1]]
    begin = 2 + len(key)
    if len(given) < begin + 2:
        return None
    (length,) = unpack_from(">H", given, begin)
    content, body = given[begin + 2 : begin + 2 + length], given[begin + 2 + length :]
    exchange = exchanges[given[0] % len(exchanges)].encode()
    took: list[tuple[Any, Any]] = []
    handle = _frame_handler(
        SimpleNamespace(bytes_recv=0), lambda *arguments: took.append(arguments[2:]), 2**16
    )
    names = bytes((len(exchange),)) + exchange + bytes((len(key),)) + key
    handle((1, 1, pack(">HHB", 60, 60, 1) + b"t" + pack(">QB", 1, 0) + names))
    handle((2, 1, pack(">HHQ", 60, 0, len(body)) + content))
    if body:
        handle((3, 1, body))
    ((arguments, message),) = took
    begin = 16 + arguments[4] + len(exchange)
    read = arguments[begin : begin + arguments[begin - 1]].decode("utf-8", "surrogatepass")
    message.delivery_info = {"exchange": exchange.decode(), "routing_key": read}
    return message  # type: ignore[no-any-return]


def _check(outgoing: Iterable[forwarding.Outgoing], allowed: AllowedDestinations | None) -> None:
    """Assert that messages can be written, or are refused; and where they go."""
    for each in outgoing:
        try:
            content = forwarding.encoded(each, FRAME_MAX)
        except UnprocessableMessage:
            continue
        read = content.message()
        if each.exchange != UNDELIVERABLE:  # which no worker reads
            assert _depth(headers_of(read)) <= MAX_DEPTH + 2, "nested deeper than workers read"
        own = each.reroute is not None or each.exchange in OWN
        assert own or allowed is None or allowed.includes(each.exchange, each.routing_key), each


def _depth(value: Any) -> int:
    if not isinstance(value, dict | list):
        return 0
    return 1 + max(map(_depth, value.values() if isinstance(value, dict) else value), default=0)


def _refused(message: amqp.Message, reason: str) -> None:
    """Assert that a refused message gets to ``undeliverable``, as it is or bare."""
    info: Any = message.delivery_info
    outgoing = forwarding.Outgoing(info["exchange"], info["routing_key"], waiting(message))
    _check([forwarding.to_undeliverable(TOPOLOGY, outgoing, reason)], None)


def _handled(module: CheckIn | Distribution, message: amqp.Message) -> list[forwarding.Outgoing]:
    """Return what a module makes of a message: nothing, if it refuses it."""
    try:
        outgoing = list(module.receive(message))
    except LaterVersion as later:
        _check([forwarding.Redelivery(TOPOLOGY, 60).until_upgraded(message, str(later))], None)
    except UnprocessableMessage as refused:
        _refused(message, refused.reason)
    else:
        _check(outgoing, ALLOWED)
        return outgoing
    return []


def check_in(message: amqp.Message) -> None:
    """Whatever a client checks in, or comes back from meditation."""
    if cast(Any, message).rabbitdelay_seen.skipped_bytes is not None:
        return
    module = CheckIn(TOPOLOGY, ALLOWED.includes, check_task=CELERY.check)
    is_client = message.delivery_info["exchange"] == MODULES.checkin.exchange.name
    module.admit(message)
    for each in _handled(module, message) if is_client else ():
        _follows_nothing(each.message.amqp())


def _follows_nothing(message: amqp.Message) -> None:
    """Assert that a worker of Celery that reads JSON publishes nothing after a message."""
    headers, properties = headers_of(message), cast(Any, message.properties)
    body: Any = message.body
    content_type, encoding = map(properties.get, ("content_type", "content_encoding"))
    with suppress(Exception):  # as py-amqp reads a body for a worker
        body = body.decode(encoding)
    try:
        read = loads(body, content_type, encoding, accept={"application/json"})
    except Exception:  # noqa: BLE001 - the worker cannot read it
        return
    named: Any = headers if "task" in headers else read if isinstance(read, dict) else {}
    if "task" in headers and isinstance(read, list) and len(read) == 3:
        assert not (isinstance(read[2], dict) and any(read[2].values())), read
    if "task" not in named:
        return
    assert not str(named["task"]).startswith("celery."), named
    assert not [name for name in CANVAS if named.get(name) is not None], named
    assert not properties.get("reply_to")


def decompression(given: bytes) -> None:
    """What a worker counts of a body is what kombu decompresses it to, of each compression."""
    for name in encoders():
        size, kombus = 0, None
        with suppress(Exception):  # most bodies are none of this compression
            size = decompressed_size(given, name, MOST_DECOMPRESSED)
            if size > MOST_DECOMPRESSED:
                return
            kombus = len(decompress(given, name))
        assert kombus in (None, size), name


def distribution(message: amqp.Message) -> None:
    """Whatever leaves the levels for distribution, envelopes among it."""
    if cast(Any, message).rabbitdelay_seen.skipped_bytes is not None:
        return
    early, reach = (
        forwarding.EarlyMessages(TOPOLOGY, 1000).put_back,
        ALLOWED,
    )
    _handled(
        Distribution(TOPOLOGY, early, reach=reach, max_message_bytes=MAX_MESSAGE_BYTES), message
    )


def envelope(given: bytes) -> None:
    """The body of an envelope; also one that is compressed well, around whatever is given."""
    for body in (given, compressed(given)):
        try:
            for item in OpenedEnvelope(body, MAX_MESSAGE_BYTES):
                assert len(item.body) <= MAX_MESSAGE_BYTES
                assert _depth(item.headers) <= MAX_DEPTH
        except InvalidEnvelope:
            pass


def undeliverable(message: amqp.Message) -> None:
    """Whatever lies in ``undeliverable``: its reason, and what a redrive makes of it."""
    info: Any = message.delivery_info
    assert examine(headers_of(message), TOPOLOGY, info["routing_key"]).reason
    publisher = Publisher(Connection("amqp://"))
    producer = DelayedProducer(publisher, TOPOLOGY, modules=("check-in", "distribution"))
    redriving = Redriving(producer, ALLOWED)
    try:
        redriven = redriving.redriven(message)
    except UnprocessableMessage:
        return
    assert redriven.reroute is not None
    _check([redriven], ALLOWED)
    headers = redriven.message.headers.to_headers()
    if message.properties.get("content_type") != ENVELOPE:
        exchange, key = headers["rabbitdelay-exchange"], headers["rabbitdelay-routing-key"]
        assert ALLOWED.includes(exchange, key)
        assert headers.get("rabbitdelay-queue", min(QUEUES)) in QUEUES


def _of_message(target: Callable[[amqp.Message], None], *exchanges: str) -> Callable[[bytes], None]:
    """Return a target that takes the message that bytes are."""

    def run(given: bytes) -> None:
        if (message := received(given, exchanges)) is not None:
            target(message)

    return run


TARGETS: Final[dict[str, Callable[[bytes], None]]] = {
    "check_in": _of_message(check_in, *CHECKED_IN),
    "decompression": decompression,
    "distribution": _of_message(distribution, *DELIVERED),
    "envelope": envelope,
    "undeliverable": _of_message(undeliverable, UNDELIVERABLE),
}


def _seeds() -> Iterator[bytes]:
    """A hostile message of each kind, of some with many faces several; and bodies of their own."""
    for each in hostile_messages(TOPOLOGY, 300, seed=1):
        if len(each.body) + len(each.properties) <= LARGEST:
            which = int(each.exchange in (CHECKED_IN[1], DELIVERED[1]))
            size = pack(">H", len(each.properties))
            yield bytes((which, len(each.key))) + each.key + size + each.properties + each.body
    item = Item(b"body", {"id": "a"}, {"priority": 1})
    yield packed((item,), {"lang": "py"}, {"type": "t"})
    yield from (compress(bytes(2**12), name)[0] for name in encoders())


#: What the fuzzer begins with: messages and envelopes.
SEEDS: Final = [*_seeds()]
