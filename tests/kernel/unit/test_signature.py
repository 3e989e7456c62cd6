"""What a signature covers, and that a key shows nowhere."""

from typing import Any

import amqp
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from celery_rabbitdelay.app.settings import Settings, read_settings
from celery_rabbitdelay.exceptions import InvalidSetting, InvalidSigningKey, UnprocessableMessage
from celery_rabbitdelay.kombu import Topology
from celery_rabbitdelay.levels import headers as header_names
from celery_rabbitdelay.levels.headers import ENVELOPE, DelayHeaders
from celery_rabbitdelay.modules.distribution import Distribution
from celery_rabbitdelay.modules.envelope import Item, packed
from celery_rabbitdelay.modules.forwarding import EarlyMessages, Redelivery
from celery_rabbitdelay.publishing.message import Content, WaitingMessage, headers_of
from celery_rabbitdelay.publishing.signature import MIN_KEY_BYTES, NOT_SIGNED, SigningKeys
from tests.kernel.unit.clock import frozen
from tests.kernel.unit.waiting import signed, verifies

KEY = "k" * MIN_KEY_BYTES
OTHER = "o" * MIN_KEY_BYTES
KEYS = SigningKeys(KEY)
TOPOLOGY = Topology()
DUE = 1_700_000_000_000

texts = st.text(max_size=12)

#: A message with everything that is signed, and something that is not.
messages = st.fixed_dictionaries(
    {
        header_names.EXCHANGE: texts,
        header_names.ROUTING_KEY: texts,
        header_names.QUEUE: st.none() | texts.filter(bool),
        header_names.DUE: st.none() | st.integers(0, 2**62),
        header_names.PRIORITY: st.none() | st.integers(5, 255),
        header_names.EXPIRATION: st.none() | st.integers(0, 2**32 - 1).map(str),
        header_names.ONCE: st.none() | st.just(True) | texts.filter(bool),
        header_names.KEY: st.none() | texts,
        "early": st.none() | st.tuples(texts, texts),
        "correlation_id": st.none() | texts,
        "message_id": st.none() | texts,
        "content_type": st.sampled_from(["application/json", ENVELOPE]),
        "body": st.binary(max_size=20),
    }
)
#: The signature of a message with this key.
RECORDED = "1:79c629a2b9606b8ef21cf43b8c5486a05b1c2815664804ee9c823fc52350b0db"

RECORDED_WITH_OPTIONS = "1:d9ff90542c54960df2017df40b8dddbd1e26eccb8c39c49ce05703cb7e85f151"

PROPERTIES = ("correlation_id", "message_id", "content_type")


def made(fields: dict[str, Any], **unsigned: Any) -> amqp.Message:
    headers = {
        name: value
        for name, value in fields.items()
        if name.startswith(header_names.OWN_PREFIX) and value is not None
    }
    if fields["early"] is not None:
        early = dict(zip(("exchange", "routing-key"), fields["early"], strict=True))
        headers[header_names.EARLY] = {**early, "times": unsigned.pop("times", 1)}
    properties = {name: fields[name] for name in PROPERTIES if fields[name] is not None}
    return amqp.Message(fields["body"], application_headers={**headers, **unsigned}, **properties)


def with_signature_of(message: amqp.Message, signed: amqp.Message) -> amqp.Message:
    name = header_names.SIGNATURE
    message.properties["application_headers"][name] = headers_of(signed)[name]
    return message


@settings(max_examples=50)
@given(messages, st.data())
def test_no_signature_verifies_what_was_changed(fields: Any, data: st.DataObject) -> None:
    message = signed(KEYS, made(fields))
    assert verifies(KEYS, message)
    names = sorted(fields)
    if fields["content_type"] != ENVELOPE:
        names.remove("body")
    changed_name = data.draw(st.sampled_from(names))
    changed = {**fields, changed_name: data.draw(messages)[changed_name]}
    assume(changed != fields)
    assert not verifies(KEYS, with_signature_of(made(changed), message))


@settings(max_examples=50)
@given(messages, st.integers(2, 9))
def test_a_signature_outlives_what_changes_on_the_way(fields: dict[str, Any], times: int) -> None:
    message = signed(KEYS, made(fields))
    later = made(fields, times=times, **{header_names.ATTEMPTS: 3, "x-death": [], "mine": 1})
    assert verifies(KEYS, with_signature_of(later, message))
    assert verifies(KEYS, Content.of(message).message())


def test_the_names_of_a_task_are_signed_if_the_registry_is_asked_about_it() -> None:
    for name in ("id", "retries", "replaced_task_nesting"):
        for more, covers in (({}, False), ({header_names.COPY: "c"}, True)):
            headers = {header_names.DUE: DUE, name: 1, **more}
            message = signed(KEYS, amqp.Message(b"", application_headers=headers))
            message.properties["application_headers"][name] = 2
            assert verifies(KEYS, message) is not covers


@pytest.mark.parametrize("keys", [[], "", "k" * (MIN_KEY_BYTES - 1), [KEY, "short"], [5]])
def test_a_key_has_a_least_length_and_shows_in_no_error(keys: Any) -> None:
    with pytest.raises(InvalidSigningKey) as caught:
        SigningKeys(keys)
    with pytest.raises(
        InvalidSetting, match=r"rabbitdelay_signing_key.*at least 32 bytes"
    ) as refused:
        Settings(signing_key=keys)
    assert "short" not in f"{caught.value}{refused.value!s}{refused.value!r}"


def test_a_key_shows_nowhere() -> None:
    settings = Settings(signing_key=[KEY, OTHER])
    shown = [repr(settings), str(settings), repr(settings.signing_keys)]
    with pytest.raises(InvalidSetting) as caught:
        read_settings({"rabbitdelay_signing_keys": KEY})
    shown.append(f"{caught.value!s}{caught.value!r}")
    assert not [text for text in shown if KEY in text or OTHER in text]


def delayed(*items: Item, sign: Any = True, **headers: Any) -> amqp.Message:
    where = {header_names.EXCHANGE: "", header_names.ROUTING_KEY: "letters"}
    told = {header_names.DUE: DUE, **where, **headers}
    message = amqp.Message(b"body", application_headers=told, correlation_id="id")
    if items:
        body = packed(items)
        message = amqp.Message(body, application_headers=told, content_type=ENVELOPE)
    return signed(KEYS, message) if sign else message


def distribution(**options: Any) -> Distribution:
    return Distribution(TOPOLOGY, signing_keys=KEYS, **options)


def test_distribution_opens_nothing_that_is_not_signed() -> None:
    assert list(distribution().receive(delayed()))
    assert list(distribution().receive(delayed(Item(b"x"))))
    unsigned = delayed(sign=False)
    unrouted = amqp.Message(b"x", application_headers={header_names.DUE: DUE})
    unrouted.delivery_info = {"routing_key": TOPOLOGY.route(0, "letters").routing_key}
    put_back: list[WaitingMessage] = []
    for message in (unsigned, delayed(Item(b"x"), sign=False), unrouted):
        with pytest.raises(UnprocessableMessage, match=NOT_SIGNED):
            list(distribution(put_back=put_back.append).receive(message))
    # Not even before it is due.
    assert put_back == []
    assert list(distribution(is_signing_required=False).receive(unsigned))
    assert list(Distribution(TOPOLOGY).receive(unsigned))


@pytest.mark.parametrize("sign", [True, False])
@pytest.mark.parametrize("queue", [None, "letters"])
def test_what_is_let_through_without_a_signature_gets_none(queue: str | None, sign: bool) -> None:
    """Otherwise, a stranger would have valid ones when signatures are required."""
    lenient = distribution(is_signing_required=False)
    redelivery = Redelivery(TOPOLOGY, 60, signing_keys=KEYS)
    told = {header_names.EXCHANGE: "billing", header_names.QUEUE: queue}
    for message in (delayed(sign=sign, **told), delayed(Item(b"x", {"id": "1"}), sign=sign)):
        (outgoing,) = lenient.receive(message)
        assert sign or outgoing.message.headers.signature is None
        later = redelivery.after_failure(outgoing, DelayHeaders(), "full")
        assert verifies(KEYS, later.message) is sign
        assert sign or later.message.headers.signature is None


@pytest.mark.parametrize("item", [(), (Item(b"x", {"id": "1"}),)], ids=["one", "envelope"])
@frozen(DUE / 1000 - 60)
def test_what_waits_again_is_signed_again(item: tuple[Item, ...]) -> None:
    redelivery = Redelivery(TOPOLOGY, 60, signing_keys=KEYS)
    message = delayed(*item)
    for _ in range(2):
        # Once it is early, and once its queue is full.
        early = distribution(put_back=EarlyMessages(TOPOLOGY, 1000).put_back)
        (back,) = early.receive(message)
        assert back.reroute is not None
        (outgoing,) = distribution().receive(back.message.amqp())
        later = redelivery.after_failure(outgoing, back.message.headers, "full")
        message = later.message.amqp()
    (outgoing,) = distribution().receive(message)
    assert (outgoing.exchange, outgoing.routing_key) == ("", "letters")
    # No consumer sees it.
    assert outgoing.message.headers.signature is None


def test_a_recorded_signature_verifies_in_every_version() -> None:
    """Messages wait for years, so what is signed, and how, is fixed."""
    told: dict[str, Any] = {header_names.PRIORITY: 9, header_names.EXPIRATION: "60"}
    message = delayed(**{header_names.QUEUE: "letters", **told})
    assert headers_of(message)[header_names.SIGNATURE] == RECORDED
    asked = {header_names.ONCE: True, header_names.KEY: "order:7", "id": "1", "retries": 0}
    message = delayed(**{header_names.QUEUE: "letters", **asked})
    assert headers_of(message)[header_names.SIGNATURE] == RECORDED_WITH_OPTIONS
