"""What is stripped from a message before it is published again, and what is restored."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from kombu import Message

from celery_rabbitdelay.levels import headers
from celery_rabbitdelay.levels import headers as header_names
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.publishing import wire
from celery_rabbitdelay.registry import decision as registry_headers
from celery_rabbitdelay.worker.restore import SENTRY_ENQUEUED, RestoringStrategies, restore

ADDED_BY_THE_BROKER: dict[str, Any] = {
    "x-death": [{"queue": "rabbitdelay.seconds.1"}],
    "x-first-death-queue": "rabbitdelay.seconds.1",
    "x-last-death-exchange": "rabbitdelay.seconds.x1",
    "x-delivery-count": 2,
    "x-acquired-count": 2,
}

DELAYED: dict[str, Any] = {
    headers.DUE: 1_900_000_000_000,
    headers.EXCHANGE: "topic",
    headers.ROUTING_KEY: "daily.reports",
    headers.QUEUE: "daily.reports",
}


def test_headers_are_called_as_in_the_messages_that_wait_on_brokers_already() -> None:
    # A message may wait for years, and the worker that gets it may be of any later version; while
    # workers are updated, also of an earlier one. None of them knows another name.
    assert (headers.DUE, headers.QUEUE) == ("rabbitdelay-due", "rabbitdelay-queue")
    assert headers.EXCHANGE == "rabbitdelay-exchange"
    assert headers.ROUTING_KEY == "rabbitdelay-routing-key"
    assert headers.PRIORITY == "rabbitdelay-priority"
    assert headers.EXPIRATION == "rabbitdelay-expiration"
    assert header_names.EARLY == "rabbitdelay-early"
    assert header_names.ATTEMPTS == "rabbitdelay-attempts"
    assert header_names.FAILED_SINCE == "rabbitdelay-failed-since"
    assert header_names.FIRST_REASON == "rabbitdelay-first-reason"
    assert header_names.REASON == "rabbitdelay-reason"
    assert registry_headers.COPY == "rabbitdelay-copy"
    assert registry_headers.KEY == "rabbitdelay-key"
    assert registry_headers.JOB == "rabbitdelay-job"
    assert registry_headers.ONCE == "rabbitdelay-once"
    assert wire.UNREADABLE == "rabbitdelay-unreadable"
    assert wire.UNREADABLE_PROPERTIES == "rabbitdelay-properties"


def test_the_delay_s_header_is_that_of_the_delayed_message_exchange_plugin() -> None:
    assert header_names.X_DELAY == "x-delay"


def test_nested_headers_are_called_as_celery_reads_them() -> None:
    assert headers.NESTED_HEADERS == "headers"


@pytest.mark.parametrize(
    "name",
    [
        *("x-death", "x-delivery-count", "x-acquired-count"),
        *("x-first-death-exchange", "x-first-death-queue", "x-first-death-reason"),
        *("x-last-death-exchange", "x-last-death-queue", "x-last-death-reason"),
    ],
)
def test_each_header_that_rabbitmq_adds_is_stripped(name: str) -> None:
    assert headers.strip({name: "anything", "task": "t"}) == {"task": "t"}


def test_a_nested_header_that_is_not_a_table_stays_as_it_is() -> None:
    assert headers.strip({headers.NESTED_HEADERS: "none"}) == {headers.NESTED_HEADERS: "none"}


def test_the_users_own_headers_stay() -> None:
    own = {"x-tenant": "shop", "traceparent": "00-ab", "x-deathly": 1}
    assert headers.strip({**own, **ADDED_BY_THE_BROKER, **DELAYED}) == own


def test_a_delayed_message_arrives_as_if_it_had_not_been_delayed() -> None:
    message = Message(
        headers={"task": "t", "x-tenant": "shop", **ADDED_BY_THE_BROKER, **DELAYED},
        delivery_info={"exchange": "rabbitdelay.delivery", "routing_key": "0.0.reports"},
    )
    restore(message)
    assert message.delivery_info == {"exchange": "topic", "routing_key": "daily.reports"}
    assert message.headers == {
        "task": "t",
        "x-tenant": "shop",
        headers.DUE: 1_900_000_000_000,
        headers.QUEUE: "daily.reports",
    }


def test_a_message_that_was_not_delayed_is_left_alone() -> None:
    found: dict[str, Any] = {"task": "t", **ADDED_BY_THE_BROKER}
    message = Message(headers=dict(found), delivery_info={"exchange": "", "routing_key": "q"})
    restore(message)
    assert message.headers == found
    assert message.delivery_info == {"exchange": "", "routing_key": "q"}


def test_a_message_with_some_of_our_headers_only_is_left_alone() -> None:
    # For example one that a task of plain Celery has forwarded with headers=self.request.headers.
    found: dict[str, Any] = {"task": "t", headers.DUE: 1_900_000_000_000, headers.QUEUE: "q"}
    message = Message(headers=dict(found), delivery_info={"exchange": "", "routing_key": "q"})
    restore(message)
    assert message.headers == found
    assert message.delivery_info == {"exchange": "", "routing_key": "q"}


def test_headers_that_a_tracer_has_nested_are_stripped_as_well() -> None:
    nested = {"sentry-trace": "00-ab", "x-tenant": "shop"}
    found = {headers.NESTED_HEADERS: {**nested, **DELAYED}, **DELAYED}
    assert headers.strip(found) == {headers.NESTED_HEADERS: nested}


def test_what_celery_shows_as_the_task_s_headers_says_when_it_was_due() -> None:
    # Copied there by Sentry from the headers of an earlier delay, which a retry carries on.
    stale: dict[str, Any] = {headers.DUE: 1, headers.QUEUE: "elsewhere"}
    found: dict[str, Any] = {headers.NESTED_HEADERS: {"x-tenant": "shop", **stale}, **DELAYED}
    message = Message(
        headers=found,
        delivery_info={"exchange": "rabbitdelay.delivery", "routing_key": "0.0.reports"},
    )
    restore(message)
    kept = {headers.DUE: DELAYED[headers.DUE], headers.QUEUE: DELAYED[headers.QUEUE]}
    assert message.headers == {headers.NESTED_HEADERS: {"x-tenant": "shop", **kept}, **kept}


def test_for_sentry_the_time_in_the_queue_begins_when_the_task_is_due() -> None:
    published: dict[str, Any] = {SENTRY_ENQUEUED: 1_800_000_000.25}
    found: dict[str, Any] = {**published, headers.NESTED_HEADERS: dict(published), **DELAYED}
    message = Message(
        headers=found,
        delivery_info={"exchange": "rabbitdelay.delivery", "routing_key": "0.0.reports"},
    )
    restore(message)
    for shown in (found, found[headers.NESTED_HEADERS]):
        assert shown[SENTRY_ENQUEUED] == 1_900_000_000.0


def test_a_task_that_was_not_delayed_keeps_the_time_at_which_sentry_saw_it() -> None:
    published: dict[str, Any] = {SENTRY_ENQUEUED: 1.5}
    found = {**published, headers.NESTED_HEADERS: dict(published)}
    message = Message(headers=dict(found), delivery_info={"exchange": "", "routing_key": "q"})
    restore(message)
    assert message.headers == found


@pytest.mark.parametrize("name", [headers.EXCHANGE, headers.ROUTING_KEY, headers.QUEUE])
@pytest.mark.parametrize("value", [None, 7, b"\xff", ["q"], {"a": 1}])
def test_a_destination_of_another_type_is_none_that_we_have_written(name: str, value: Any) -> None:
    found = {**DELAYED, name: value}
    info = {"exchange": "", "routing_key": "q"}
    message = Message(headers=dict(found), delivery_info=dict(info))
    assert restore(message) is None
    assert message.headers == found
    assert message.delivery_info == info


@pytest.mark.parametrize("due", [None, "soon", b"\xff", {}, [], 1.5, True, -(2**63)])
def test_a_due_time_of_any_type_is_restored(due: Any) -> None:
    found = {**DELAYED, headers.DUE: due, SENTRY_ENQUEUED: 1.5}
    message = Message(headers=found, delivery_info={"exchange": "", "routing_key": "0.q"})
    waited = restore(message)
    assert waited is not None
    assert waited.due_ms == due


def test_headers_nested_a_thousand_deep_and_names_in_bytes_are_stripped() -> None:
    found: dict[Any, Any] = {}
    for _ in range(5_000):
        found = {headers.NESTED_HEADERS: found, headers.DUE: 5, b"rabbitdelay-\xff": 1, b"\xff": 2}
    stripped: Any = headers.strip(found)
    for _ in range(5_000):
        assert stripped.keys() == {headers.NESTED_HEADERS, b"\xff"}
        stripped = stripped[headers.NESTED_HEADERS]
    assert stripped == {}


def test_a_message_that_we_cannot_read_is_left_to_celery() -> None:
    seen = []
    delays = SimpleNamespace(active_metrics=None, topology=Topology())
    app = SimpleNamespace(tasks={"one": object()}, rabbitdelay=delays)
    strategies = RestoringStrategies(
        SimpleNamespace(app=app, strategies={"one": lambda message, *rest: seen.append(message)})
    )
    message: Any = Message(headers=dict(DELAYED))
    message.delivery_info = None
    strategies["one"](message, None, None)
    assert seen == [message]


def test_a_strategy_receives_restored_messages_whenever_celery_sets_it() -> None:
    seen = []

    def strategy(message: Message, *rest: Any) -> None:
        seen.append(message.delivery_info["routing_key"])

    # A fake: the attributes of a worker's consumer that are read.
    delays = SimpleNamespace(active_metrics=None, topology=Topology())
    app = SimpleNamespace(tasks={"one": object(), "two": object()}, rabbitdelay=delays)
    strategies = RestoringStrategies(SimpleNamespace(app=app, strategies={"one": strategy}))
    strategies["two"] = strategy
    for name in ("one", "two"):
        message = Message(headers=dict(DELAYED), delivery_info={"routing_key": "0.1.q"})
        strategies[name](message, None, None)
    assert seen == ["daily.reports", "daily.reports"]
