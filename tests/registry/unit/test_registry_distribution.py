"""What the registry says of envelopes and of notes that distribution has received."""

import logging
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import amqp
import pytest

from celery_rabbitdelay.exceptions import RegistryUnavailable, UnprocessableMessage
from celery_rabbitdelay.levels import headers as header_names
from celery_rabbitdelay.levels.headers import COMMITTED, COPY, ENVELOPE, JOB, JOB_ID, ONCE
from celery_rabbitdelay.levels.routing_key import DISTRIBUTION
from celery_rabbitdelay.modules.distribution import Distribution
from celery_rabbitdelay.modules.envelope import Item
from celery_rabbitdelay.modules.forwarding import Outgoing
from celery_rabbitdelay.publishing.message import WaitingMessage
from celery_rabbitdelay.registry import application
from celery_rabbitdelay.registry.addition import RegistryAddition
from celery_rabbitdelay.registry.decision import Arrival, Decision, Verdict
from celery_rabbitdelay.registry.registry import Breaker
from tests.kernel.unit.clock import frozen
from tests.kernel.unit.test_distribution import DUE, QUEUE, TOPOLOGY, letter, tasks


def distribution_with(**registry: Any) -> Distribution:
    """Return a distribution that asks a registry, of which these methods are faked."""
    return distribution_of(mock.Mock(), **registry)


def distribution_of(delays: mock.Mock, **registry: Any) -> Distribution:
    delays.app.tasks = {"remind": None}
    delays.part.return_value = mock.Mock(breaker=Breaker(), **registry)
    return Distribution(TOPOLOGY, asked=RegistryAddition(delays))


def distributed_by(
    decide: Callable[..., Sequence[Decision]], message: amqp.Message
) -> list[Outgoing]:
    """Distribute a message as a registry decides."""
    return list(distribution_with(decide=decide).receive(message))


RUN = Decision(Verdict.RUN)
EXPIRED = Decision(Verdict.EXPIRED)
CANCELLED = Decision(Verdict.CANCELLED)
ITS_JOB_IS_OPEN = Decision(Verdict.LATER, DUE + 60_000)
POSTPONED = Decision(Verdict.LATER, DUE + 60_000, is_new_due=True)


def ids(outgoing: Sequence[Outgoing]) -> list[str]:
    """The ids of tasks that go to their queue."""
    assert {(each.exchange, each.routing_key) for each in outgoing} <= {("", "queue")}
    return [each.message.headers.to_headers()["id"] for each in outgoing]


def test_the_registry_is_asked_once_for_all_tasks_of_an_envelope_and_they_go_on_without_it() -> (
    None
):
    asked: list[Sequence[Arrival]] = []

    def decide(arrivals: Sequence[Arrival], notes: bool) -> Sequence[Decision]:
        assert not notes
        asked.append(arrivals)
        raise RegistryUnavailable("it is down")

    own = {"id": "1", JOB: "june", COPY: "c", ONCE: True, "retries": 2}
    message = letter(Item(b"", {"id": "0"}), Item(b"", own), **QUEUE)
    assert ids(distributed_by(decide, message)) == ["0", "1"]
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
    recorded: list[str] = []

    def decide(arrivals: Sequence[Arrival], notes: bool) -> Sequence[Decision]:
        recorded.extend(each.task_id for each in arrivals if notes)
        return decisions

    assert ids(distributed_by(decide, tasks(len(decisions)))) == expected
    # No worker will record the end of a task that is dropped here.
    assert recorded == [str(at) for at, one in enumerate(decisions) if one is EXPIRED]


def test_the_tasks_that_are_dropped_with_their_job_are_counted_by_name_and_queue(
    caplog: pytest.LogCaptureFixture,
) -> None:
    delays = mock.Mock()
    named = [Item(b"", {"id": "0", "task": "remind"}), Item(b"", {"id": "1", "task": "remind"})]
    message = letter(*named, Item(b"", {"id": "2", "task": "a stranger's"}), Item(b"", {"id": "3"}))
    message.properties["application_headers"] |= QUEUE
    with caplog.at_level(logging.INFO):
        decisions = [EXPIRED, EXPIRED, EXPIRED, CANCELLED]
        distribution = distribution_of(delays, decide=lambda arrivals, notes: decisions)
        assert ids(list(distribution.receive(message))) == ["3"]
    assert delays.recorder.record.call_args_list == [
        mock.call({application.EXPIRED: 2}, "remind", "queue"),
        mock.call({application.EXPIRED: 1}, "", "queue"),
    ]
    assert "Dropped 3 tasks from an envelope: their job was aborted." in caplog.messages


@frozen(DUE / 1000)
def test_an_envelope_whose_tasks_all_wait_goes_back_whole() -> None:
    message = tasks(3)
    message.properties["application_headers"]["x-death"] = []
    soon = ITS_JOB_IS_OPEN._replace(until_ms=DUE + 30_000)
    (later,) = distributed_by(lambda arrivals, notes: [CANCELLED, ITS_JOB_IS_OPEN, soon], message)
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
    distribution = distribution_with(**{"jobs.confirm": lambda *job: told.append(job)})
    assert (list(distribution.receive(note())), told) == ([], [("june", "1")])
    # Nobody has signed the name of the job, but its id.
    for wrong in ({JOB_ID: "2"}, {JOB: 7}, {JOB_ID: None}):
        with pytest.raises(UnprocessableMessage, match=r"names no valid job|is 7, not a string"):
            list(distribution.receive(note(**wrong)))
    assert len(told) == 1

    def away(*job: str) -> None:
        raise RegistryUnavailable("away")

    (later,) = distribution_with(**{"jobs.confirm": away}).receive(note())
    assert later.exchange == TOPOLOGY.route(5, DISTRIBUTION).exchange
    assert later.message.headers.to_headers()[COMMITTED] is True


def test_a_worker_is_not_ready_while_redis_does_not_answer() -> None:
    def ready(error: Exception | None) -> str:
        delays = mock.Mock()
        delays.part.return_value.store.commands.side_effect = error
        return RegistryAddition(delays).why_not_ready()

    assert ready(None) == ""
    assert ready(RegistryUnavailable("Redis is\naway")).startswith("the registry cannot be used: ")
