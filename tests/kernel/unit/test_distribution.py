"""What distribution makes of a message that is due; that it arrives, test_modules.py shows."""

from typing import Any

import amqp
import pytest

from celery_rabbitdelay.exceptions import UnprocessableMessage
from celery_rabbitdelay.levels import headers as header_names
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.delay import MAX_DELAY
from celery_rabbitdelay.levels.headers import COMMITTED, ENVELOPE, JOB
from celery_rabbitdelay.levels.routing_key import DISTRIBUTION
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.modules.distribution import Distribution
from celery_rabbitdelay.modules.envelope import Item, packed
from celery_rabbitdelay.modules.forwarding import EarlyMessages, Outgoing
from celery_rabbitdelay.publishing.message import WaitingMessage
from tests.kernel.unit.clock import frozen
from tests.kernel.unit.waiting import waiting

TOPOLOGY = Topology()
distributed = Distribution(TOPOLOGY).receive

DUE = 1_800_000_000_000

#: Where the tasks of an envelope go that the registry is asked about.
QUEUE = {header_names.EXCHANGE: "", header_names.ROUTING_KEY: "queue"}


def letter(*items: Item, **told: str) -> amqp.Message:
    headers = {header_names.DUE: DUE, **told}
    return amqp.Message(packed(items), content_type=ENVELOPE, application_headers=headers)


def test_the_messages_of_an_envelope_go_where_it_says_and_where_each_says_itself() -> None:
    own = {header_names.EXCHANGE: "posts", header_names.ROUTING_KEY: "airmail", "id": "2"}
    told = {header_names.DUE: 1, header_names.PRIORITY: 7}
    one, two = distributed(
        letter(Item(b"one", {"id": "1"}), Item(b"two", {**own, **told}), **QUEUE)
    )
    assert (one.exchange, one.routing_key, one.message.body) == ("", "queue", b"one")
    assert (two.exchange, two.routing_key, two.message.body) == ("posts", "airmail", b"two")
    # All of them were due together.
    assert one.message.headers.to_headers() == {"id": "1", header_names.DUE: DUE}
    assert two.message.headers.to_headers() == {"id": "2", header_names.DUE: DUE}
    assert two.message.properties["priority"] == 7


def test_an_envelope_with_one_message_that_cannot_go_is_refused_whole() -> None:
    second = Item(b"two", {header_names.EXCHANGE: ""})
    with pytest.raises(UnprocessableMessage, match="destination is missing"):
        next(distributed(letter(Item(b"one", QUEUE), second)))


def waited(headers: dict[str, Any], **properties: Any) -> amqp.Message:
    where = {header_names.EXCHANGE: "office", header_names.ROUTING_KEY: "paper"}
    return amqp.Message(b"body", application_headers={**where, **headers}, **properties)


HIGH = {header_names.PRIORITY: 9, header_names.EXPIRATION: "60"}


@pytest.mark.parametrize(
    ("headers", "given", "restored"),
    [
        (HIGH, {"priority": 4}, {"priority": 9, "expiration": "60"}),
        # A priority that could wait as it was stays. An expiration that is not the sender's would
        # have the levels drop it.
        (
            {},
            {"priority": 3, "expiration": "5", "app_id": "shop"},
            {"priority": 3, "app_id": "shop"},
        ),
    ],
)
def test_priority_and_expiration_are_restored(headers: Any, given: Any, restored: Any) -> None:
    (outgoing,) = distributed(waited({**headers, header_names.REASON: "full"}, **given))
    assert (outgoing.exchange, outgoing.routing_key) == ("office", "paper")
    properties = outgoing.message.amqp().properties
    expected = {"application_headers": {}, "delivery_mode": 2, **restored}
    assert {name: value for name, value in properties.items() if value is not None} == expected


@pytest.mark.parametrize(
    ("headers", "why"),
    [
        ({header_names.EXCHANGE: 5, header_names.DUE: "soon"}, "its header rabbitdelay-due is"),
        ({header_names.ROUTING_KEY: None}, "its destination is missing: rabbitdelay-exchange is"),
    ],
)
def test_without_exchange_key_or_valid_headers_it_is_refused(headers: Any, why: str) -> None:
    with pytest.raises(UnprocessableMessage, match=why):
        list(distributed(waited(headers)))


def tasks(number: int) -> amqp.Message:
    """An envelope with tasks whose ids are numbers from 0."""
    return letter(*(Item(b"", {"id": str(each)}) for each in range(number)), **QUEUE)


class Asked:
    """Answers in place of an addition.

    Args:
        answer: What becomes of envelopes.
    """

    def __init__(self, answer: int | list[bool] | None) -> None:
        self.answer = answer

    def envelope_arrived(self, inner: Any, due_ms: int) -> int | list[bool] | None:
        assert [each.others["id"] for each in inner] == ["0", "1"]
        assert due_ms == DUE
        return self.answer

    def note_arrived(self, note: WaitingMessage) -> None:
        assert note.headers.registry[JOB] == "june"


@pytest.mark.parametrize(
    ("answer", "expected"), [(None, ["0", "1"]), ([False, True], ["1"]), ([False, False], [])]
)
def test_the_messages_of_an_envelope_go_on_as_an_addition_says(answer: Any, expected: Any) -> None:
    found = Distribution(TOPOLOGY, asked=Asked(answer)).receive(tasks(2))
    assert [each.message.headers.to_headers()["id"] for each in found] == expected


@frozen(DUE / 1000)
def test_an_envelope_that_waits_goes_back_whole() -> None:
    message = tasks(2)
    (later,) = Distribution(TOPOLOGY, asked=Asked(DUE + 30_000)).receive(message)
    assert later.exchange == TOPOLOGY.route(30, DISTRIBUTION).exchange
    assert later.message.body == message.body


def test_a_note_is_given_to_the_addition_and_refused_where_there_is_none() -> None:
    headers = {header_names.DUE: DUE, JOB: "june", COMMITTED: True}
    note = amqp.Message(b"", application_headers=headers)
    assert list(Distribution(TOPOLOGY, asked=Asked(None)).receive(note)) == []
    with pytest.raises(UnprocessableMessage, match="this worker has no registry"):
        list(distributed(note))


def test_an_early_envelope_goes_back_unopened() -> None:
    back = Outgoing("levels", "key", waiting(amqp.Message(b"")))
    (outgoing,) = Distribution(TOPOLOGY, lambda message: back).receive(tasks(1))
    assert outgoing.message is back.message


@frozen(1_900_000_000)
def test_a_wrong_clock_is_tolerated_and_a_forged_due_time_is_not() -> None:
    now_ms, day_ms, longest_ms = wall_clock.ms(), 86_400_000, int(MAX_DELAY * 1000)
    distribution = Distribution(TOPOLOGY, EarlyMessages(TOPOLOGY, 0).put_back)

    def receive(ahead_ms: int) -> Outgoing:
        own = {header_names.EXCHANGE: "", header_names.ROUTING_KEY: "q"}
        (outgoing,) = distribution.receive(waited({**own, header_names.DUE: now_ms + ahead_ms}))
        return outgoing

    # It was sent with the longest delay, by a clock that is two hours ahead of this one.
    assert receive(longest_ms + 2 * 3_600_000).reroute is not None
    assert receive(longest_ms + day_ms).reroute is not None
    with pytest.raises(UnprocessableMessage, match="the delay exceeds the maximum"):
        receive(longest_ms + day_ms + 1)
