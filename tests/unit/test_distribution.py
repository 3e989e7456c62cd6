"""What distribution makes of a message that is due; that it arrives, test_modules.py shows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import amqp
import pytest

from celery_rabbitdelay.exceptions import RegistryUnavailable, UnprocessableMessage
from celery_rabbitdelay.levels import headers as header_names
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.delay import MAX_DELAY
from celery_rabbitdelay.levels.headers import COMMITTED, COPY, ENVELOPE, JOB, JOB_ID, ONCE
from celery_rabbitdelay.levels.routing_key import DISTRIBUTION
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.modules.distribution import Distribution
from celery_rabbitdelay.modules.envelope import Envelope, Item, OpenedEnvelope
from celery_rabbitdelay.modules.forwarding import EarlyMessages, Outgoing
from celery_rabbitdelay.publishing.message import WaitingMessage
from celery_rabbitdelay.registry.decision import Arrival, Decision, Verdict
from tests.unit.clock import frozen
from tests.unit.waiting import waiting

TOPOLOGY = Topology()
distributed = Distribution(TOPOLOGY).receive

DUE = 1_800_000_000_000

#: Where the tasks of an envelope go that the registry is asked about.
QUEUE = {header_names.EXCHANGE: "", header_names.ROUTING_KEY: "queue"}


def letter(*items: Item, **told: str) -> amqp.Message:
    headers = {header_names.DUE: DUE, **told}
    return amqp.Message(Envelope(items).pack(), content_type=ENVELOPE, application_headers=headers)


def test_the_messages_of_an_envelope_go_where_it_says_and_where_each_says_itself() -> None:
    own = {header_names.EXCHANGE: "posts", header_names.ROUTING_KEY: "airmail", "id": "2"}
    envelope = letter(
        Item(b"one", {"id": "1"}),
        Item(b"two", own),
        **QUEUE,
    )

    one, two = distributed(envelope)

    assert (one.exchange, one.routing_key, one.message.body) == ("", "queue", b"one")
    assert (two.exchange, two.routing_key, two.message.body) == ("posts", "airmail", b"two")
    assert one.message.headers.to_headers() == {"id": "1", header_names.DUE: DUE}


def test_an_envelope_with_a_message_above_the_largest_is_refused_whole() -> None:
    distribution = Distribution(TOPOLOGY, max_message_bytes=3)
    assert len(list(distribution.receive(letter(Item(b"one"), Item(b"two"), **QUEUE)))) == 2
    with pytest.raises(UnprocessableMessage, match="a message of 5 bytes is in it, more than 3"):
        next(distribution.receive(letter(Item(b"one"), Item(b"three"), **QUEUE)))


def test_an_envelope_of_which_one_message_goes_nowhere_is_refused_whole() -> None:
    envelope = letter(Item(b"one", QUEUE), Item(b"two", {header_names.EXCHANGE: ""}))
    outgoing = distributed(envelope)

    with pytest.raises(UnprocessableMessage, match="destination is missing"):
        next(outgoing)


def waited(headers: dict[str, Any], **properties: Any) -> amqp.Message:
    where = {header_names.EXCHANGE: "office", header_names.ROUTING_KEY: "paper"}
    return amqp.Message(
        b"body", application_headers={**where, **headers}, delivery_mode=2, **properties
    )


def properties_of(message: amqp.Message) -> dict[str, Any]:
    (outgoing,) = distributed(message)
    return {
        k: value for k, value in outgoing.message.amqp().properties.items() if value is not None
    }


def test_a_message_arrives_as_it_was_sent_but_for_its_due_time() -> None:
    told = {header_names.DUE: DUE, header_names.REASON: "full", "x-death": [], "x-mine": 1}
    message = waited(told, app_id="shop")
    (outgoing,) = distributed(message)
    assert (outgoing.exchange, outgoing.routing_key) == ("office", "paper")
    assert outgoing.message.body == b"body"
    assert properties_of(message) == {
        "application_headers": {header_names.DUE: DUE, "x-mine": 1},
        "app_id": "shop",
        "delivery_mode": 2,
    }


HIGH = {header_names.PRIORITY: 9, header_names.EXPIRATION: "60"}


@pytest.mark.parametrize(
    ("headers", "priority", "restored"),
    [
        # Without a due time, it gets none.
        ({}, None, {}),
        (HIGH, 4, {"priority": 9, "expiration": "60"}),
        # A priority that could wait as it was stays, and no expiration appears.
        ({}, 3, {"priority": 3}),
    ],
)
def test_priority_and_expiration_are_restored(headers: Any, priority: Any, restored: Any) -> None:
    expected = {"application_headers": {}, "delivery_mode": 2, **restored}
    assert properties_of(waited(headers, priority=priority)) == expected


def test_an_expiration_that_is_not_the_senders_is_removed() -> None:
    """A message in the levels would be dropped by it before it is due."""
    assert "expiration" not in properties_of(waited({}, expiration="5"))


MISSING = "its destination is missing"
NO_NAME = "its header rabbitdelay-exchange is 5, not an exchange's name"
NO_TIME = "its header rabbitdelay-due is 'soon', not milliseconds since 1970"


@pytest.mark.parametrize(
    ("headers", "why"),
    [
        ({header_names.EXCHANGE: 5}, NO_NAME),
        ({header_names.EXCHANGE: 5, header_names.DUE: "soon"}, f"{NO_TIME}; {NO_NAME}"),
        ({header_names.QUEUE: 5}, "its header rabbitdelay-queue is 5, not a queue's name"),
        (
            {header_names.ROUTING_KEY: None},
            f"{MISSING}: rabbitdelay-exchange is 'office', rabbitdelay-routing-key is None",
        ),
    ],
)
def test_without_exchange_key_or_valid_headers_it_is_refused(headers: Any, why: str) -> None:
    with pytest.raises(UnprocessableMessage) as caught:
        list(distributed(waited(headers)))
    assert caught.value.reason == why


def test_the_due_time_of_an_envelope_is_that_of_each_message_in_it() -> None:
    item = Item(b"one", {**QUEUE, header_names.DUE: 1, header_names.PRIORITY: 7})
    (outgoing,) = distributed(letter(item))
    assert outgoing.message.headers.to_headers() == {header_names.DUE: DUE}
    assert outgoing.message.amqp().properties["priority"] == 7


def test_a_message_for_a_known_queue_goes_to_it_and_keeps_what_a_worker_restores() -> None:
    told = {header_names.DUE: DUE, header_names.QUEUE: "letters", "mine": 1}
    own = {header_names.PRIORITY: 9, header_names.ATTEMPTS: 3, "x-death": []}
    (outgoing,) = distributed(waited({**told, **own}, priority=4))
    assert (outgoing.exchange, outgoing.routing_key) == ("", "letters")
    where = {header_names.EXCHANGE: "office", header_names.ROUTING_KEY: "paper"}
    assert outgoing.message.headers.to_headers() == {**told, **where}
    assert outgoing.message.amqp().properties["priority"] == 9


@pytest.mark.parametrize(
    ("key", "queue"),
    [
        ("0.0.0.0.0.0.1.0.daily%2Ereports", "daily.reports"),
        ("0.0.0.0.0.0.1.0.%distribution", None),
        ("0.0.0.0.0.0.1.0.%~1a2b", None),
        ("1.0.reports", None),
        ("", None),
    ],
)
def test_without_our_headers_a_message_is_for_the_queue_in_its_key(key: str, queue: Any) -> None:
    message = amqp.Message(b"body", application_headers={"mine": 1})
    message.delivery_info = {"exchange": "rabbitdelay.delivery", "routing_key": key}
    if queue is None:
        with pytest.raises(UnprocessableMessage, match="destination is missing"):
            list(distributed(message))
        return
    (outgoing,) = distributed(message)
    assert (outgoing.exchange, outgoing.routing_key) == ("", queue)
    assert outgoing.message.headers.to_headers() == {"mine": 1}


class Registry:
    """A fake: it decides what a test tells it, and keeps what it was asked."""

    def __init__(self, *decisions: Decision) -> None:
        self.decisions = decisions
        self.asked: list[Sequence[Arrival]] = []

    def look(self, arrivals: Sequence[Arrival]) -> Sequence[Decision]:
        self.asked.append(arrivals)
        if not self.decisions:
            raise RegistryUnavailable("it is down")
        return self.decisions

    def distributed(self, message: amqp.Message) -> list[Outgoing]:
        return list(Distribution(TOPOLOGY, look=self.look).receive(message))


RUN = Decision(Verdict.RUN)
EXPIRED = Decision(Verdict.EXPIRED)
ITS_JOB_IS_OPEN = Decision(Verdict.LATER, DUE + 60_000)
POSTPONED = Decision(Verdict.LATER, DUE + 60_000, is_new_due=True)


def tasks(number: int) -> amqp.Message:
    """An envelope with tasks whose ids are numbers from 0."""
    return letter(*(Item(b"", {"id": str(each)}) for each in range(number)), **QUEUE)


def ids(outgoing: Sequence[Outgoing]) -> list[str]:
    """The ids of tasks that go to their queue."""
    assert {(each.exchange, each.routing_key) for each in outgoing} <= {("", "queue")}
    return [each.message.headers.to_headers()["id"] for each in outgoing]


def test_the_registry_is_asked_once_for_all_tasks_of_an_envelope() -> None:
    registry = Registry(RUN, RUN)
    own = {"id": "1", JOB: "june", COPY: "c", ONCE: True, "retries": 2}
    registry.distributed(letter(Item(b"", {"id": "0"}), Item(b"", own), **QUEUE))
    # Nothing is a duplicate here: which of two messages arrives first, their worker finds out. So
    # each counts as one that has arrived before.
    assert registry.asked == [
        [
            Arrival("0", DUE, redelivered=True),
            Arrival("1", DUE, "2.0", copy="c", job="june", once="-", redelivered=True),
        ]
    ]


@pytest.mark.parametrize("registry", [None, Registry(RUN, RUN, RUN), Registry()])
def test_envelopes_are_read_twice(
    monkeypatch: pytest.MonkeyPatch, registry: Registry | None
) -> None:
    read = 0
    items_of = OpenedEnvelope.__iter__

    def counted(opened: OpenedEnvelope) -> Iterator[Item]:
        nonlocal read
        read += 1
        return items_of(opened)

    monkeypatch.setattr(OpenedEnvelope, "__iter__", counted)
    look = None if registry is None else registry.look
    assert ids(list(Distribution(TOPOLOGY, look=look).receive(tasks(3)))) == ["0", "1", "2"]
    assert read == 2


def test_what_the_messages_of_an_envelope_share_is_checked_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check = mock.Mock()
    monkeypatch.setattr(Distribution, "_check", check)
    own = Item(b"", {"id": "2", header_names.ROUTING_KEY: "other"})
    items = [Item(b"", {"id": "0"}), Item(b"", {"id": "1"}), own, Item(b"", {"id": "3"})]
    assert len(list(distributed(letter(*items, **QUEUE)))) == 4
    assert [each.args[2].headers["id"] for each in check.mock_calls] == ["0", "2"]


def test_no_task_ends_silently_because_the_registry_says_too_little() -> None:
    with pytest.raises(ValueError, match="shorter"):
        Registry(RUN).distributed(tasks(2))


def test_a_due_time_that_is_missing_is_zero_for_the_registry() -> None:
    registry = Registry(RUN)
    message = tasks(1)
    del message.properties["application_headers"][header_names.DUE]
    assert ids(registry.distributed(message)) == ["0"]
    assert registry.asked == [[Arrival("0", 0, redelivered=True)]]


def test_the_registry_is_not_asked_about_a_task_outside_of_an_envelope() -> None:
    registry = Registry(RUN)
    (outgoing,) = registry.distributed(waited({"id": "1"}))
    assert (outgoing.exchange, registry.asked) == ("office", [])


@pytest.mark.parametrize("decision", [RUN, POSTPONED, Decision(Verdict.CANCELLED)])
def test_of_an_envelope_only_the_tasks_of_an_aborted_job_end_here(decision: Decision) -> None:
    assert ids(Registry(EXPIRED, decision, EXPIRED).distributed(tasks(3))) == ["1"]
    assert ids(Registry(decision, decision).distributed(tasks(2))) == ["0", "1"]
    assert ids(Registry(EXPIRED, EXPIRED).distributed(tasks(2))) == []


@frozen(DUE / 1000)
def test_an_envelope_whose_tasks_all_wait_goes_back_whole() -> None:
    for number in (1, 2):
        message = tasks(number)
        message.properties["application_headers"]["x-death"] = []
        registry = Registry(*[ITS_JOB_IS_OPEN] * number)
        (later,) = registry.distributed(message)
        route = TOPOLOGY.route(60, DISTRIBUTION, WaitingMessage.unopened(message).task_id)
        assert (later.exchange, later.routing_key) == (route.exchange, route.routing_key)
        # While the levels do not take it, its route is computed anew.
        assert later.reroute is not None
        assert later.message.body == message.body
        assert later.message.amqp().properties["content_type"] == ENVELOPE
        assert later.message.headers.to_headers() == {header_names.DUE: DUE, **QUEUE}


def test_cancelled_tasks_wait_in_their_envelope_with_those_whose_job_is_open() -> None:
    registry = Registry(Decision(Verdict.CANCELLED), ITS_JOB_IS_OPEN, Decision(Verdict.SUPERSEDED))
    (later,) = registry.distributed(tasks(3))
    assert later.message.amqp().properties["content_type"] == ENVELOPE


@frozen(DUE / 1000)
def test_an_envelope_waits_for_the_first_of_its_tasks() -> None:
    message = tasks(2)
    registry = Registry(ITS_JOB_IS_OPEN, ITS_JOB_IS_OPEN._replace(until_ms=DUE + 30_000))
    (later,) = registry.distributed(message)
    route = TOPOLOGY.route(30, DISTRIBUTION, WaitingMessage.unopened(message).task_id)
    assert (later.exchange, later.routing_key) == (route.exchange, route.routing_key)


def note(**changed: Any) -> amqp.Message:
    """Return a message that says that a job was committed."""
    headers = {header_names.DUE: DUE, JOB: "june", JOB_ID: "1", COMMITTED: True, **changed}
    return amqp.Message(b"", application_headers=headers, message_id="1")


def test_the_registry_is_told_of_a_job_that_was_committed() -> None:
    told: list[tuple[str, str]] = []
    distribution = Distribution(TOPOLOGY, confirm=lambda *job: told.append(job))
    assert (list(distribution.receive(note())), told) == ([], [("june", "1")])
    # Nobody has signed the name of the job, but its id.
    for wrong in ({JOB_ID: "2"}, {JOB: 7}, {JOB_ID: None}):
        with pytest.raises(UnprocessableMessage, match=r"it names no job|job is 7, not a text"):
            list(distribution.receive(note(**wrong)))
    assert len(told) == 1
    with pytest.raises(UnprocessableMessage, match="there is no registry"):
        list(Distribution(TOPOLOGY).receive(note()))


@frozen(DUE / 1000)
def test_without_the_registry_the_note_of_a_commit_waits() -> None:
    def away(*job: str) -> None:
        raise RegistryUnavailable("away")

    (later,) = Distribution(TOPOLOGY, confirm=away).receive(note())
    assert later.exchange == TOPOLOGY.route(5, DISTRIBUTION).exchange
    assert later.message.headers.to_headers()[COMMITTED] is True


def test_an_envelope_without_tasks_becomes_nothing() -> None:
    message = letter(**QUEUE)
    assert list(Distribution(TOPOLOGY, look=lambda arrivals: []).receive(message)) == []


def test_an_envelope_of_which_one_task_need_not_wait_is_opened_and_the_workers_ask_again() -> None:
    for decision in (RUN, POSTPONED):
        registry = Registry(ITS_JOB_IS_OPEN, decision, ITS_JOB_IS_OPEN)
        assert ids(registry.distributed(tasks(3))) == ["0", "1", "2"]


def test_while_the_registry_is_away_all_tasks_go_on_to_workers_who_know_what_to_do() -> None:
    registry = Registry()
    assert (ids(registry.distributed(tasks(2))), len(registry.asked)) == (["0", "1"], 1)


def test_an_early_envelope_goes_back_unopened_and_the_registry_is_not_asked() -> None:
    registry = Registry(RUN)
    back = Outgoing("levels", "key", waiting(amqp.Message(b"")))
    distribution = Distribution(TOPOLOGY, lambda message: back, registry.look)
    (outgoing,) = distribution.receive(tasks(1))
    assert outgoing.message is back.message
    assert registry.asked == []


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
    with pytest.raises(UnprocessableMessage, match="the longest delay"):
        receive(longest_ms + day_ms + 1)
