"""What is published for a message that was undeliverable, and which ones stay; without a broker."""

from collections.abc import Mapping
from typing import Any

import amqp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kombu import Connection, Exchange, Queue

from celery_rabbitdelay.exceptions import UnprocessableMessage
from celery_rabbitdelay.kombu import DelayedProducer, Publisher, SigningKeys, Topology, custom
from celery_rabbitdelay.levels import headers, wall_clock
from celery_rabbitdelay.levels.delay import MAX_DELAY
from celery_rabbitdelay.levels.headers import ENVELOPE, UNREADABLE
from celery_rabbitdelay.levels.routing_key import DISTRIBUTION, encode_destination
from celery_rabbitdelay.modules.checkin import CheckIn
from celery_rabbitdelay.modules.envelope import Item, OpenedEnvelope, packed
from celery_rabbitdelay.modules.forwarding import Outgoing, to_undeliverable
from celery_rabbitdelay.modules.limits import AllowedDestinations
from celery_rabbitdelay.operations.mover import Stay
from celery_rabbitdelay.operations.redriving import Redriving
from tests.kernel.unit.clock import Clock
from tests.kernel.unit.waiting import waiting

TOPOLOGY = Topology("p", custom([("seconds", 6, 1), ("ms", 10, 0.1)]))
CHECKIN = TOPOLOGY.module_queues.checkin

#: The routing key of what is due and goes through distribution.
DISTRIBUTED = "0.0." + encode_destination(DISTRIBUTION)

#: An instant, in milliseconds since 1970.
NOW = 1_800_000_000_000

QUEUES = [Queue("reports"), Queue("daily", Exchange("topic", "topic"), "daily.#")]
ALLOWED = AllowedDestinations.of_queues(QUEUES)

#: The names that are allowed, that are not, and that never are.
NAMES = ["", "reports", "daily", "topic", "other", "amq.topic", "celery.pidbox", CHECKIN.name]


#: It stands still, so that a route does not depend on a busy machine.
CLOCK = Clock(NOW / 1000)


@pytest.fixture(autouse=True, scope="module")
def standstill() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wall_clock, "ns", CLOCK.time_ns)
        yield


def redrive(
    given: Mapping[str, Any],
    *,
    key: str = "",
    body: bytes = b"body",
    properties: Mapping[str, Any] | None = None,
    topology: Topology = TOPOLOGY,
    allowed: AllowedDestinations = ALLOWED,
    modules: tuple[str, ...] = ("check-in", "distribution"),
    may_refuse: tuple[str, ...] = (),
    signing_keys: SigningKeys | None = None,
    **options: Any,
) -> Outgoing:
    message = amqp.Message(body, application_headers=dict(given), **(properties or {}))
    message.delivery_info = {"exchange": "p.undeliverable", "routing_key": key}
    producer = DelayedProducer(
        Publisher(Connection("amqp://")),
        topology,
        modules=modules,
        may_refuse=may_refuse,
        signing_keys=signing_keys,
    )
    return Redriving(producer, allowed, **options).redriven(message)


def told(outgoing: Outgoing) -> dict[str, Any]:
    found: dict[str, Any] = outgoing.message.headers.to_headers()
    return found


def straight(queue: Any = "reports", **more: Any) -> dict[str, Any]:
    return {
        headers.DUE: NOW - 5000,
        headers.EXCHANGE: "",
        headers.ROUTING_KEY: queue,
        headers.QUEUE: queue,
        **more,
    }


def for_exchange(exchange: Any, key: Any, **more: Any) -> dict[str, Any]:
    return {headers.DUE: NOW, headers.EXCHANGE: exchange, headers.ROUTING_KEY: key, **more}


def died(queue: str) -> list[dict[str, Any]]:
    return [{"queue": queue, "reason": "delivery_limit", "count": 1, "routing-keys": ["daily"]}]


def test_a_task_goes_straight_to_its_queue_with_its_own_headers() -> None:
    own = {"id": "4d5e", "x-own": 1, "x-delay": 9, "rabbitdelay-key": "k", "rabbitdelay-once": True}
    left = {
        "x-death": died("p.ms.500"),
        "x-delivery-count": 3,
        headers.REASON: "full",
        headers.ATTEMPTS: 9,
        headers.FAILED_SINCE: 5,
        headers.FIRST_REASON: "gone",
        "rabbitdelay-later": "of a version to come",
    }
    outgoing = redrive(straight(**own, **left), properties={"priority": 3, "reply_to": "r"})
    assert (outgoing.exchange, outgoing.routing_key) == ("p.delivery", "0.0.reports")
    early = {headers.EARLY: {"times": 0, "until": NOW}}
    assert told(outgoing) == straight(**own, **{headers.REDRIVEN: 1}, **early)
    properties = outgoing.message.amqp().properties
    assert (properties["priority"], properties["reply_to"]) == (3, "r")
    assert (properties["delivery_mode"], outgoing.message.body) == (2, b"body")


def test_it_waits_until_it_is_due() -> None:
    for due_ms, delay_ms, header, key in (
        (NOW - 5, None, NOW - 5, "0.0.reports"),
        (NOW + 2500, None, NOW + 2500, "2.5.reports"),
        (NOW - 5, 1200, NOW + 1200, "1.2.reports"),
        (NOW + 2500, 1200, NOW + 2500, "2.5.reports"),
        ("soon", None, NOW, "0.0.reports"),
    ):
        outgoing = redrive(straight(**{headers.DUE: due_ms}), delay_ms=delay_ms)
        assert (told(outgoing)[headers.DUE], outgoing.routing_key) == (header, key)


def test_what_only_an_exchange_can_route_or_a_queue_may_refuse_goes_through_distribution() -> None:
    early = {"times": 3, "exchange": "topic", "routing-key": "daily.x"}
    more = {headers.PRIORITY: 9, headers.EXPIRATION: "700", headers.EARLY: early}
    given = for_exchange("topic", "daily.x", **more)
    outgoing = redrive(given, properties={"priority": 4})
    assert outgoing.routing_key == DISTRIBUTED
    assert told(outgoing) == {**given, headers.EARLY: {**early, "times": 0}, headers.REDRIVEN: 1}
    refused = redrive(straight(), may_refuse=("reports",))
    assert (refused.routing_key, told(refused)[headers.QUEUE]) == (DISTRIBUTED, "reports")
    without = redrive(straight(), may_refuse=("*",), modules=())
    assert without.routing_key == "0.0.reports"
    # A high priority, in quorum queues alone.
    for kind, priority, noted, key in (
        ("quorum", 4, 9, DISTRIBUTED),
        ("classic", 9, None, "0.0.reports"),
    ):
        topology = Topology("p", TOPOLOGY.layout, kind)  # type: ignore[arg-type]
        outgoing = redrive(straight(), properties={"priority": 9}, topology=topology)
        assert outgoing.message.amqp().properties["priority"] == priority
        assert (told(outgoing).get(headers.PRIORITY), outgoing.routing_key) == (noted, key)


@pytest.mark.parametrize(
    ("given", "key", "exchange", "queue", "delay_ms"),
    [
        ({}, "1.2.reports", "", "reports", 0),
        ({"x-death": died("p.ms.500")}, "0.0.daily", "", "daily", 0),
        ({"x-death": died("p.meditation")}, "daily", "", "daily", 0),
        # Those that check-in has not accepted.
        ({"x-death": died(CHECKIN.name), "x-delay": "900"}, "daily", "", None, 900),
        ({headers.EXCHANGE: CHECKIN.exchange.name, "x-delay": 900.0}, "daily", "", None, 900),
        ({headers.EXCHANGE: CHECKIN.exchange.name, headers.ROUTING_KEY: "daily"}, "", "", None, 0),
    ],
)
def test_a_client_s_message_goes_where_it_says(
    given: dict[str, Any], key: str, exchange: str, queue: str | None, delay_ms: int
) -> None:
    noted = told(redrive(given, key=key))
    due = noted[headers.DUE], noted[headers.EXCHANGE], noted.get(headers.QUEUE)
    assert due == (NOW + delay_ms, exchange, queue)
    assert noted[headers.ROUTING_KEY] == (queue or "daily")
    longer = redrive(given, key=key, delay_ms=1000)
    assert told(longer)[headers.DUE] == NOW + 1000


@pytest.mark.parametrize(
    ("client", "key"),
    [
        ({"x-own": 1}, "daily"),
        ({headers.EXCHANGE: "topic", "x-delay": 900}, "daily.1"),
    ],
)
def test_what_check_in_refused_goes_nowhere_unless_an_operator_says(client: Any, key: str) -> None:
    """Not to what the application names elsewhere, and it gets no signature."""
    keys, public = SigningKeys("k" * 32), AllowedDestinations(queues=frozenset({"reports"}))
    check_in = CheckIn(TOPOLOGY, public.includes, keys)
    message = amqp.Message(b"body", application_headers=client)
    message.delivery_info = {"exchange": CHECKIN.exchange.name, "routing_key": key}
    check_in.admit(message)
    with pytest.raises(UnprocessableMessage) as refused:
        list(check_in.receive(message))
    outgoing = Outgoing(CHECKIN.exchange.name, key, waiting(message))
    given = told(to_undeliverable(TOPOLOGY, outgoing, refused.value.reason))
    options: dict[str, Any] = {"key": key, "signing_keys": keys}
    with pytest.raises(UnprocessableMessage, match="not a destination that check-in may reach"):
        redrive(given, checkin_allowed=public, **options)
    # By what it says, as check-in does; and by what the operator says.
    for more in ({"checkin_allowed": ALLOWED}, {"checkin_allowed": public, "to": "reports"}):
        redriven = redrive(given, **more, **options)
        assert keys.verifies(*redriven.message)


def test_a_client_s_task_with_a_callback_stays_unless_clients_are_trusted() -> None:
    def again(**options: Any) -> Outgoing:
        return redrive(
            {"x-death": died(CHECKIN.name), "x-delay": 900, "task": "remind", "id": "a"},
            key="reports",
            body=b'[[], {}, {"callbacks": [{"task": "other"}]}]',
            properties={"content_type": "application/json", "content_encoding": "utf-8"},
            checkin_allowed=ALLOWED,
            **options,
        )

    assert again(trusts_clients=True).message.properties
    with pytest.raises(UnprocessableMessage, match="callbacks"):
        again()


def refuse(queue: str) -> None:
    raise amqp.AccessRefused("no right")


def in_envelope(*items: Item, **shared: Any) -> dict[str, Any]:
    """Return the options of a message that is an envelope."""
    return {
        "body": packed(items, shared),
        "properties": {"content_type": ENVELOPE, "priority": 0},
    }


#: A user's pattern that allows everything.
OPEN: dict[str, Any] = {
    "allowed": AllowedDestinations(
        patterns=("*",), never=frozenset({"p.delivery"}), never_patterns=("amq.*",)
    )
}


LATEST = NOW + int(MAX_DELAY * 1000)
FINE = Item(b"", {headers.EXCHANGE: "", headers.ROUTING_KEY: "reports"})
ELSEWHERE = Item(b"", {headers.EXCHANGE: "other"})
EARLY = {headers.EARLY: {"exchange": "amq.x", "routing-key": ""}}
TO_TOPIC = straight("other", **{headers.EXCHANGE: "topic", headers.ROUTING_KEY: "daily"})
LATER = {headers.VERSION: headers.MESSAGE_VERSION + 1}
NO_MODULES: dict[str, Any] = {"modules": ()}


@pytest.mark.parametrize(
    ("given", "options", "reason"),
    [
        ({}, {}, "destination is unknown"),
        (straight("other"), {}, "queue 'other' is not a destination that the application allows"),
        (TO_TOPIC, {}, "queue 'other' is not a destination"),
        (straight(**{headers.QUEUE: 7}), {}, "rabbitdelay-queue is 7"),
        (straight(**{headers.EXCHANGE: 7}), {}, "rabbitdelay-exchange is 7"),
        (for_exchange("other", "reports"), {}, "exchange 'other' is not a destination"),
        (for_exchange("topic", "x", CC=["other"]), {}, "header CC"),
        (straight(**{UNREADABLE: "year 55840"}), {}, "cannot be read"),
        (for_exchange("topic", "x", **EARLY), {}, "exchange 'amq.x' is not a destination"),
        (straight(**{headers.REDRIVEN: True}), {}, "not a count"),
        (straight(**{headers.REDRIVEN: -1}), {}, "not a count"),
        (straight(**{headers.REDRIVEN: 3}), {}, "it was redriven 3 times already"),
        (straight(**{headers.REDRIVEN: 1}), {"max_attempts": 1}, "redriven 1 times already"),
        ({"x-death": died(CHECKIN.name), "x-delay": "soon"}, {}, "pass a delay"),
        (straight(**{headers.DUE: LATEST + 1}), {}, r"its due time is .*exceeds the maximum"),
        (straight("p.delivery"), OPEN, "is reserved for the delay levels"),
        ({}, {**OPEN, "to": "amq.gen-1"}, "is reserved for the delay levels"),
        (straight(), {"ensure": refuse}, "the queue 'reports' cannot be bound to the delay levels"),
        (for_exchange("topic", "x"), NO_MODULES, "needs distribution"),
        (straight(**{headers.PRIORITY: 9}), NO_MODULES, "needs distribution"),
        (straight(**{headers.DUE: NOW + 60_000}), NO_MODULES, 'add "check-in"'),
        (straight(), {"properties": {"content_type": f"{ENVELOPE[:-1]}2"}}, "version"),
        (straight(), {"properties": {"content_type": ENVELOPE}}, "cannot be opened"),
        ({"x-delay": 5}, in_envelope(FINE), "clients may not send envelopes"),
        (
            for_exchange("topic", "x"),
            in_envelope(FINE, ELSEWHERE),
            "exchange 'other' is not a destination",
        ),
        (
            for_exchange("topic", "x"),
            in_envelope(Item(b"", {headers.ROUTING_KEY: 5})),
            "rabbitdelay-routing-key is 5",
        ),
        (for_exchange("topic", "x"), in_envelope(Item(b"", {"BCC": ["x"]})), "header BCC"),
        (for_exchange("topic", "x"), in_envelope(Item(b"", LATER)), "needs a later version"),
    ],
)
def test_messages_stay_with_the_reason(
    given: dict[str, Any], options: dict[str, Any], reason: str
) -> None:
    with pytest.raises((UnprocessableMessage, Stay), match=reason):
        redrive(given, **options)


def test_what_is_just_within_the_bounds_goes() -> None:
    assert told(redrive(straight(**{headers.REDRIVEN: 2})))[headers.REDRIVEN] == 3
    assert redrive(straight(**{headers.DUE: LATEST})).exchange == "p.meditation"
    assert redrive(straight("other"), **OPEN).routing_key == "0.0.other"


def test_with_a_queue_to_go_to_the_headers_of_the_destination_do_not_count() -> None:
    expected = {headers.EXCHANGE: "", headers.ROUTING_KEY: "aside"}
    for told_by in ({}, straight("other", **{headers.EXCHANGE: 7}), for_exchange("amq.x", "y")):
        outgoing = redrive(told_by, to="aside")
        assert told(outgoing).items() >= {**expected, headers.QUEUE: "aside"}.items()
        assert outgoing.routing_key == "0.0.aside"
    first = Item(b"1", {"id": "1", headers.EXCHANGE: "other"})
    options = in_envelope(first, Item(b"2", {"id": "2"}), **{headers.ROUTING_KEY: "x"})
    outgoing = redrive({}, to="aside", **options)
    assert told(outgoing).items() >= expected.items()
    read = OpenedEnvelope(outgoing.message.body)
    assert (read.headers, [*read]) == ({}, [Item(b"1", {"id": "1"}), Item(b"2", {"id": "2"})])


def test_an_envelope_goes_back_as_a_whole() -> None:
    options = in_envelope(Item(b"1", {"id": "1"}), Item(b"2", {"id": "2"}), task="t")
    outgoing = redrive(for_exchange("topic", "daily.x"), **options)
    assert (outgoing.routing_key, outgoing.message.body) == (DISTRIBUTED, options["body"])
    assert told(outgoing) == for_exchange("topic", "daily.x", **{headers.REDRIVEN: 1})


def claimed(*usual: Any) -> st.SearchStrategy[Any]:
    """What a stranger may write into a header: one of the usual values, or anything."""
    anything = st.none() | st.booleans() | st.integers() | st.text(max_size=9)
    return st.sampled_from(usual) | st.sampled_from(usual) | anything | st.lists(anything)


claims = st.fixed_dictionaries(
    {},
    optional={
        headers.DUE: claimed(NOW, 0),
        headers.EXCHANGE: claimed(*NAMES),
        headers.ROUTING_KEY: claimed(*NAMES),
        headers.QUEUE: claimed(*NAMES),
        headers.PRIORITY: claimed(9, 255),
        headers.EXPIRATION: claimed("700"),
        headers.EARLY: claimed({"exchange": "topic"})
        | st.fixed_dictionaries(
            {"exchange": st.sampled_from(NAMES), "routing-key": st.sampled_from(NAMES)}
        ),
        headers.REDRIVEN: claimed(1, 2, 3),
        headers.X_DELAY: claimed(500, "500"),
        "x-death": claimed(*map(died, [*NAMES, "p.ms.500", "p.meditation"])),
        "id": claimed("4d5e"),
    },
)


@settings(max_examples=300)
@given(
    given_headers=claims,
    key=st.sampled_from(NAMES) | st.sampled_from([f"0.0.{name}" for name in NAMES]),
    inner=st.none() | st.none() | claims,
    selected=st.sampled_from([{}] * 9 + [{"CC": ["other"]}, {"BCC": ["other"]}]),
)
def test_no_header_reaches_too_far(given_headers: Any, key: str, inner: Any, selected: Any) -> None:
    properties, body = dict[str, Any](), b""
    if inner is not None:
        body = packed((Item(b"", inner),))
        properties = {"content_type": ENVELOPE}
    try:
        outgoing = redrive({**given_headers, **selected}, key=key, body=body, properties=properties)
    except UnprocessableMessage:
        return
    sent = told(outgoing)
    assert not selected
    assert 1 <= sent[headers.REDRIVEN] <= 3
    word = outgoing.routing_key.split(".")[-1]
    if outgoing.exchange == TOPOLOGY.module_queues.meditation.exchange.name:
        word = encode_destination(outgoing.routing_key)
    else:
        assert outgoing.exchange in ("p.delivery", "p.seconds.x1", "p.ms.x100")
    if headers.QUEUE in sent:
        assert ALLOWED.includes("", sent[headers.QUEUE])
        assert word in (sent[headers.QUEUE], encode_destination(DISTRIBUTION))
    else:
        assert word == encode_destination(DISTRIBUTION)
    effective = {**sent, **(inner or {})}
    assert ALLOWED.includes(effective[headers.EXCHANGE], effective[headers.ROUTING_KEY])
    if inner is None and headers.EARLY in sent:
        early = sent[headers.EARLY]
        assert ALLOWED.includes(early["exchange"], early["routing-key"])


def test_what_a_client_wrote_is_not_believed_if_the_broker_took_it_from_check_in() -> None:
    death = {"queue": "p.checkin", "exchange": "p.checkin", "reason": "expired"}
    forged = {
        **straight("secret", **{headers.DUE: 2**62, headers.PRIORITY: 255}),
        "rabbitdelay-key": "another's",
        "x-delay": 5000,
        "x-own": 1,
    }
    del forged[headers.EXCHANGE]
    outgoing = redrive(
        {**forged, "x-death": [{**death, "routing-keys": ["reports"]}]}, key="reports"
    )
    expected = for_exchange("", "reports", **{headers.REDRIVEN: 1, "x-own": 1})
    assert told(outgoing) == {**expected, headers.DUE: NOW + 5000}
