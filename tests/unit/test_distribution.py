"""What distribution makes of a message that is due; that it arrives, test_modules.py shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

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
from celery_rabbitdelay.modules.envelope import Envelope, Item
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


def distributed_by(
    look: Callable[[Sequence[Arrival]], Sequence[Decision]], message: amqp.Message
) -> list[Outgoing]:
    """Distribute a message as a registry decides."""
    return list(Distribution(TOPOLOGY, look=look).receive(message))


RUN = Decision(Verdict.RUN)
EXPIRED = Decision(Verdict.EXPIRED)
CANCELLED = Decision(Verdict.CANCELLED)
ITS_JOB_IS_OPEN = Decision(Verdict.LATER, DUE + 60_000)
POSTPONED = Decision(Verdict.LATER, DUE + 60_000, is_new_due=True)


def tasks(number: int) -> amqp.Message:
    """An envelope with tasks whose ids are numbers from 0."""
    return letter(*(Item(b"", {"id": str(each)}) for each in range(number)), **QUEUE)


def ids(outgoing: Sequence[Outgoing]) -> list[str]:
    """The ids of tasks that go to their queue."""
    assert {(each.exchange, each.routing_key) for each in outgoing} <= {("", "queue")}
    return [each.message.headers.to_headers()["id"] for each in outgoing]


def test_the_registry_is_asked_once_for_all_tasks_of_an_envelope_and_they_go_on_without_it() -> (
    None
):
    asked: list[Sequence[Arrival]] = []

    def look(arrivals: Sequence[Arrival]) -> Sequence[Decision]:
        asked.append(arrivals)
        raise RegistryUnavailable("it is down")

    own = {"id": "1", JOB: "june", COPY: "c", ONCE: True, "retries": 2}
    message = letter(Item(b"", {"id": "0"}), Item(b"", own), **QUEUE)
    assert ids(distributed_by(look, message)) == ["0", "1"]
    # Nothing is a duplicate here: which of two messages arrives first, their worker finds out. So
    # each counts as one that has arrived before.
    tasks = [
        Arrival("0", DUE, redelivered=True),
        Arrival("1", DUE, "2.0", copy="c", job="june", once="-", redelivered=True),
    ]
    assert asked == [tasks]


@pytest.mark.parametrize(
    ("decisions", "expected"),
    [
        # Only the tasks of an aborted job end here.
        ([EXPIRED, RUN, EXPIRED], ["1"]),
        ([EXPIRED, CANCELLED], ["1"]),
        ([POSTPONED, POSTPONED], ["0", "1"]),
        # It is opened if one need not wait, and the workers ask again.
        ([ITS_JOB_IS_OPEN, POSTPONED], ["0", "1"]),
        ([], []),
    ],
)
def test_the_messages_of_an_envelope_go_on_as_the_registry_says(
    decisions: list[Decision], expected: list[str]
) -> None:
    found = distributed_by(lambda arrivals: decisions, tasks(len(decisions)))
    assert ids(found) == expected


@frozen(DUE / 1000)
def test_an_envelope_whose_tasks_all_wait_goes_back_whole() -> None:
    message = tasks(3)
    message.properties["application_headers"]["x-death"] = []
    soon = ITS_JOB_IS_OPEN._replace(until_ms=DUE + 30_000)
    (later,) = distributed_by(lambda arrivals: [CANCELLED, ITS_JOB_IS_OPEN, soon], message)
    route = TOPOLOGY.route(30, DISTRIBUTION, WaitingMessage.unopened(message).task_id)
    assert (later.exchange, later.routing_key) == (route.exchange, route.routing_key)
    # While the levels do not take it, its route is computed anew.
    assert later.reroute is not None
    assert (later.message.body, later.message.properties["content_type"]) == (
        message.body,
        ENVELOPE,
    )
    assert later.message.headers.to_headers() == {header_names.DUE: DUE, **QUEUE}


def note(**changed: Any) -> amqp.Message:
    """Return a message that says that a job was committed."""
    headers = {header_names.DUE: DUE, JOB: "june", JOB_ID: "1", COMMITTED: True, **changed}
    return amqp.Message(b"", application_headers=headers, message_id="1")


@frozen(DUE / 1000)
def test_the_registry_is_told_of_a_job_that_was_committed_and_without_it_the_note_waits() -> None:
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

    def away(*job: str) -> None:
        raise RegistryUnavailable("away")

    (later,) = Distribution(TOPOLOGY, confirm=away).receive(note())
    assert later.exchange == TOPOLOGY.route(5, DISTRIBUTION).exchange
    assert later.message.headers.to_headers()[COMMITTED] is True


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
    with pytest.raises(UnprocessableMessage, match="the longest delay"):
        receive(longest_ms + day_ms + 1)
