"""A delayed task is the same task on arrival; only its due time and its queue's name are added."""

import asyncio
import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from itertools import product
from typing import Any

import pytest
from celery import chord
from celery.canvas import StampingVisitor  # type: ignore[attr-defined]
from celery.exceptions import TaskRevokedError
from celery.signals import after_task_publish, before_task_publish
from kombu import Connection, Exchange

from celery_rabbitdelay import UnknownOption
from celery_rabbitdelay.app.options import OWN_OPTIONS
from celery_rabbitdelay.levels import headers
from celery_rabbitdelay.worker.restore import restore
from tests.kernel.integration.arrivals import take
from tests.kernel.integration.notes import Notes, listening
from tests.kernel.integration.shop import PATIENCE, QUEUES, named

#: Headers that a delay adds.
ADDED = (headers.DUE, headers.QUEUE)

#: Headers of the caller's.
OWN = {"x-tenant": "shop", "trace": {"id": 7, "tags": ["a", "b"]}, "x-retries": 3}

#: Options, and what a task sees of them.
OPTIONS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"headers": OWN}, {"headers": OWN}),
    ({}, {"delivery_info": {"priority": 0}}),
    *(({"priority": each}, {"delivery_info": {"priority": each}}) for each in (1, 4)),
    ({"time_limit": 60, "soft_time_limit": 50}, {"timelimit": [60, 50]}),
    ({"reply_to": "answers"}, {"reply_to": "answers", "properties": {"reply_to": "answers"}}),
    ({"shadow": "remind"}, {"shadow": "remind"}),
    ({"root_id": "root", "parent_id": "parent"}, {"root_id": "root", "parent_id": "parent"}),
    ({"group_id": "g", "group_index": 3}, {"group": "g", "group_index": 3}),
    ({"serializer": "pickle"}, {"properties": {"content_type": "application/x-python-serialize"}}),
    ({"compression": "gzip"}, {"compression": "application/x-gzip"}),
]

#: Where the queues of the shop get their tasks from: exchange and routing key.
ROUTES = {
    "default": ("", "{prefix}.default"),
    "second": ("", "{prefix}.second"),
    "topic.daily.reports": ("{prefix}.topic", "topic.daily.reports"),
    "mirror": ("{prefix}.fanout", "{prefix}.default"),
}


def _without(text: str, *names: str) -> dict[str, Any]:
    def kept(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        return {name: value for name, value in pairs if name not in names}

    whole: dict[str, Any] = json.loads(text, object_pairs_hook=kept)
    return whole


def assert_alike(undelayed: Any, delayed: Any, *different: str) -> dict[str, Any]:
    """Assert that two runs of the task ``request`` saw the same.

    Args:
        undelayed: The result of the one without a delay.
        delayed: The result of the other.
        *different: What may differ.

    Returns:
        All that the delayed one saw of its message but the headers that a delay adds.
    """
    expected, seen = undelayed.get(timeout=PATIENCE), delayed.get(timeout=PATIENCE)
    assert headers.DUE in seen["headers"]
    # None is what Celery makes of no headers of the caller's.
    expected["headers"] = expected["headers"] or {}
    expected = _without(json.dumps(expected).replace(undelayed.id, "id"), *different)
    seen = _without(json.dumps(seen).replace(delayed.id, "id"), *ADDED, *different)
    assert seen == expected
    return seen


def test_what_the_caller_says_stays(served_shop: Any) -> None:
    send, prefix = served_shop.tasks["request"].apply_async, served_shop.conf.rabbitdelay_prefix
    routes = [
        ({"queue": f"{prefix}.{name}"}, {"delivery_info": {"exchange": to, "routing_key": key}})
        for name, (to, key) in ROUTES.items()
    ]
    link, link_error = served_shop.signature("look"), served_shop.signature("look", ("failed",))
    callbacks: Any = ({"link": link, "link_error": link_error}, {})
    sent = [
        (options, expected, send(**options), send(**options, delay=0.3))
        for options, expected in (*OPTIONS, *routes, callbacks)
    ]
    for options, expected, undelayed, delayed in sent:
        seen = assert_alike(undelayed, delayed)
        wanted = json.loads(json.dumps(expected).replace("{prefix}", prefix))
        for name, value in wanted.items():
            whole = {**seen[name], **value} if isinstance(value, dict) else value
            assert seen[name] == whole, options
    assert [callback["task"] for callback in seen["callbacks"]] == ["look"]
    assert [errback["args"] for errback in seen["errbacks"]] == [["failed"]]


def test_an_expiry_counts_as_without_a_delay(served_shop: Any) -> None:
    send, instant = served_shop.tasks["request"].apply_async, datetime.now(UTC) + timedelta(60)
    # What RabbitMQ would apply to each stop is left to the worker.
    seen = assert_alike(send(expires=instant), send(expires=instant, delay=0.3), "expiration")
    assert datetime.fromisoformat(seen["expires"]) == instant
    noted, soon = Notes(served_shop), datetime.now(UTC) + timedelta(seconds=0.2)
    for result in [noted.send("late", delay=0.6, expires=each) for each in (0.2, soon)]:
        with pytest.raises(TaskRevokedError, match="expired"):
            result.get(timeout=PATIENCE)
        assert result.state == "REVOKED"
    assert noted() == []


def test_the_task_that_sends_a_delayed_task_is_its_parent(served_shop: Any) -> None:
    sending = served_shop.tasks["send"].apply_async(("request", {"delay": 0.3}), delay=0.2)
    seen = served_shop.AsyncResult(sending.get(timeout=PATIENCE)).get(timeout=PATIENCE)
    assert seen["parent_id"] == seen["root_id"] == sending.id
    assert seen["headers"].keys() == set(ADDED)


def test_an_ignored_result_is_not_stored(served_shop: Any) -> None:
    noted = Notes(served_shop)
    ignored = noted.send("ignored", delay=0.3, ignore_result=True)
    # The worker runs one task at a time: it is done with the first when the last one has run.
    noted.wait(1)
    assert served_shop.AsyncResult(ignored.id).state == "PENDING"
    noted.forget()


#: Stamps with the names of our options.
STAMPS = dict.fromkeys((*OWN_OPTIONS, "tenant"), "blue")

STAMPED: dict[str, Callable[..., Any]] = {
    "send_task": lambda app, **given: app.send_task(
        "request", stamped_headers=[*STAMPS], **STAMPS, **given
    ),
    "chord": lambda app, **given: _stamped(
        chord([app.tasks["look"].si()], app.tasks["request"].si().set(**given))
    ).apply_async(),
    "asyncio": lambda app, **given: asyncio.run(
        app.rabbitdelay.send("request", stamped_headers=[*STAMPS], **STAMPS, **given)
    ),
    "retry": lambda app, **given: app.tasks["request-again"].apply_async(
        (given,), stamped_headers=[*STAMPS], **STAMPS
    ),
}


class Stamping(StampingVisitor):  # type: ignore[misc]
    """Stamps each task of a canvas."""

    def on_signature(self, sig: Any, **headers: Any) -> dict[str, Any]:
        """Return the stamps."""
        return dict(STAMPS)  # Celery changes it


def _stamped(signature: Any) -> Any:
    signature.stamp(Stamping())
    return signature


def test_a_stamp_of_any_name_stays_and_is_no_option(served_shop: Any) -> None:
    sent = [
        (how, given, send(served_shop, **given))
        for how, send in STAMPED.items()
        for given in ({}, {"countdown": 0.3})
    ]
    for how, given, result in sent:
        seen = result.get(timeout=PATIENCE)
        assert {*seen["stamped_headers"]} == {*STAMPS}, how
        assert all(seen["stamps"][name] in ("blue", ["blue"]) for name in STAMPS)
        assert not given or headers.DUE in seen["headers"]


def test_an_option_that_a_stamp_would_hide_is_refused(served_shop: Any) -> None:
    signature = _stamped(served_shop.tasks["request"].s())
    for send in (signature.set, signature.apply_async):
        with pytest.raises(UnknownOption, match="the signature has a stamp with this name"):
            send(delay=5)


def test_signals_and_the_task_sent_event_are_those_of_a_task_without_a_delay(
    make_shop: Any, make_queue: Any, connection: Connection, prefix: str
) -> None:
    shop = make_shop(task_send_sent_event=True, event_exchange=f"{prefix}.events")
    events = make_queue("events", Exchange(f"{prefix}.events", type="topic"), "task.sent")
    events(connection.default_channel).declare()
    seen: list[dict[str, Any]] = []

    def note(signal: Any, **told: Any) -> None:
        # As it is now: who publishes may change it afterwards.
        told["headers"] = dict(told["headers"])
        seen.append(told)

    with listening(note, before_task_publish, after_task_publish):
        for name, delay in product(QUEUES, ({}, {"delay": 1})):
            shop.tasks["look"].apply_async(task_id=name, queue=named(shop, name), **delay)
    for number in range(0, len(seen), 4):
        assert seen[number + 2 : number + 4] == seen[number : number + 2]
    told = [
        _without(json.dumps(arrival.body), "clock", "timestamp")
        for arrival in take(connection, [events], 2 * len(QUEUES))
    ]
    assert told[1::2] == told[::2]
    assert {each["queue"] for each in told} >= {named(shop, "topic.reports")}


# Where it goes.


#: The default queue's exchange is a topic exchange, where a routing key alone decides.
DEFAULT_TOPIC = {"task_default_queue": "{prefix}.topic.reports"}
DAILY_KEY = {"routing_key": "topic.daily.reports"}
REPORTS = {"exchange": "{prefix}.topic", "routing_key": "topic.reports"}

#: Ways to say where a task goes: the queue in question, the caller's options, and settings.
WAYS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # Celery does not let the routing key decide here, but its default queue.
    "default exchange": ("default", {"exchange": "", "routing_key": "{prefix}.second"}, {}),
    "routing key alone": ("topic.daily.reports", DAILY_KEY, DEFAULT_TOPIC),
    "queue as an object": ("topic.daily.reports", {}, {}),
    "route to a queue": ("second", {}, {"task_routes": {"look": {"queue": "{prefix}.second"}}}),
    "route to an exchange": ("topic.reports", {}, {"task_routes": {"look": REPORTS}}),
    "route by a function": ("second", {}, {}),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_task_goes_where_it_would_go_without_a_delay(
    make_shop: Any, connection: Connection, prefix: str, way: str
) -> None:
    to, options, settings = json.loads(json.dumps(WAYS[way]).replace("{prefix}", prefix))
    to = f"{prefix}.{to}"
    if way == "route by a function":
        settings = {"task_routes": [lambda *_, **__: {"queue": to}]}
    shop = make_shop(**settings)
    queues = list(shop.amqp.queues.values())
    if way == "queue as an object":
        options = {"queue": shop.amqp.queues[to]}
    for queue in queues:
        queue(connection.default_channel).declare()
    for delay in ({}, {"delay": 0.2}):
        shop.tasks["look"].apply_async(**options, **delay)
    both = take(connection, queues, 2)
    undelayed, delayed = sorted(both, key=lambda each: headers.DUE in each.message.headers)
    assert undelayed.queue == delayed.queue == delayed.message.headers[headers.QUEUE] == to
    restore(delayed.message)
    for name in ("exchange", "routing_key"):
        assert delayed.message.delivery_info[name] == undelayed.message.delivery_info[name]
    assert delayed.body == undelayed.body
