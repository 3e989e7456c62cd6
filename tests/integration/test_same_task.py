"""A delayed task is the same task on arrival; only its due time and its queue's name are added."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, NamedTuple
from uuid import uuid4

import pytest
from celery import chain, chord, group
from celery.canvas import StampingVisitor  # type: ignore[attr-defined]
from celery.exceptions import TaskRevokedError
from celery.signals import after_task_publish, before_task_publish
from kombu import Connection, Exchange, Queue

from celery_rabbitdelay import UnknownOption
from celery_rabbitdelay.app.options import OWN_OPTIONS
from celery_rabbitdelay.levels import headers
from celery_rabbitdelay.testing import wait_for
from celery_rabbitdelay.worker.restore import restore
from tests.integration.arrivals import take
from tests.integration.shop import PATIENCE, QUEUES, named
from tests.integration.waited import assert_waited

#: Headers that a delay adds.
ADDED = (headers.DUE, headers.QUEUE)

#: Headers of the caller's.
OWN = {"x-tenant": "shop", "trace": {"id": 7, "tags": ["a", "b"]}, "x-retries": 3}

#: Options, and what a task sees of them.
OPTIONS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"headers": OWN}, {"headers": OWN}),
    ({}, {"delivery_info": {"priority": 0}}),
    *(({"priority": each}, {"delivery_info": {"priority": each}}) for each in (0, 1, 4)),
    ({"time_limit": 60, "soft_time_limit": 50}, {"timelimit": [60, 50]}),
    ({"reply_to": "answers"}, {"reply_to": "answers", "properties": {"reply_to": "answers"}}),
    ({"shadow": "remind"}, {"shadow": "remind"}),
    ({"root_id": "root", "parent_id": "parent"}, {"root_id": "root", "parent_id": "parent"}),
    ({"serializer": "json"}, {"properties": {"content_type": "application/json"}}),
    ({"serializer": "pickle"}, {"properties": {"content_type": "application/x-python-serialize"}}),
    ({"compression": "gzip"}, {"compression": "application/x-gzip"}),
    ({"compression": "bzip2"}, {"compression": "application/x-bz2"}),
]


def alike(send: Callable[..., Any], *different: str) -> dict[str, Any]:
    """Send the task ``request`` with and without a delay, and assert that both saw the same.

    Args:
        send: Sends it; takes ``delay``.
        *different: What may differ.

    Returns:
        All that the delayed one saw of its message but the headers that a delay adds.
    """
    undelayed, delayed = send(), send(delay=0.3)
    expected, seen = undelayed.get(timeout=PATIENCE), delayed.get(timeout=PATIENCE)
    assert headers.DUE in seen["headers"]
    # None is what Celery makes of no headers of the caller's.
    expected["headers"] = expected["headers"] or {}
    expected = _without(json.dumps(expected).replace(undelayed.id, "id"), *different)
    seen = _without(json.dumps(seen).replace(delayed.id, "id"), *ADDED, *different)
    assert seen == expected
    return seen


def _without(text: str, *names: str) -> dict[str, Any]:
    def kept(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        return {name: value for name, value in pairs if name not in names}

    whole: dict[str, Any] = json.loads(text, object_pairs_hook=kept)
    return whole


@pytest.fixture
def send(served_shop: Any) -> Callable[..., Any]:
    """Sends the task ``request``."""
    sent: Callable[..., Any] = served_shop.tasks["request"].apply_async
    return sent


@pytest.mark.parametrize(
    ("name", "exchange", "routing_key"),
    [
        ("default", "", "{prefix}.default"),
        ("second", "", "{prefix}.second"),
        ("topic.reports", "{prefix}.topic", "topic.reports"),
        ("topic.daily.reports", "{prefix}.topic", "topic.daily.reports"),
        ("mirror", "{prefix}.fanout", "{prefix}.default"),
    ],
)
def test_exchange_and_routing_key_are_those_of_the_queue(
    served_shop: Any, send: Callable[..., Any], name: str, exchange: str, routing_key: str
) -> None:
    prefix = served_shop.rabbitdelay.topology.prefix
    info = alike(partial(send, queue=f"{prefix}.{name}"))["delivery_info"]
    assert info["exchange"] == exchange.format(prefix=prefix)
    assert info["routing_key"] == routing_key.format(prefix=prefix)


@pytest.mark.parametrize(
    ("options", "expected"), OPTIONS, ids=[f"{options}" for options, _ in OPTIONS]
)
def test_what_the_caller_says_stays(
    send: Callable[..., Any], options: dict[str, Any], expected: dict[str, Any]
) -> None:
    seen = alike(partial(send, **options))
    for name, value in expected.items():
        assert seen[name] == ({**seen[name], **value} if isinstance(value, dict) else value)


def test_the_task_that_sends_a_delayed_task_is_its_parent(served_shop: Any) -> None:
    sending = served_shop.tasks["send"].apply_async(("request", {"delay": 0.3}), delay=0.2)
    sent = served_shop.AsyncResult(sending.get(timeout=PATIENCE))
    seen = sent.get(timeout=PATIENCE)
    assert seen["parent_id"] == seen["root_id"] == sending.id
    assert seen["headers"].keys() == set(ADDED)


def test_group_and_callbacks_stay(served_shop: Any, send: Callable[..., Any]) -> None:
    link, link_error = served_shop.signature("look"), served_shop.signature("look", ("failed",))
    seen = alike(partial(send, group_id="g", group_index=3, link=link, link_error=link_error))
    assert (seen["group"], seen["group_index"]) == ("g", 3)
    assert [callback["task"] for callback in seen["callbacks"]] == ["look"]
    assert [errback["args"] for errback in seen["errbacks"]] == [["failed"]]


#: Stamps with the names of our options.
STAMPS = dict.fromkeys((*OWN_OPTIONS, "tenant"), "blue")

STAMPED: dict[str, Callable[..., Any]] = {
    "options": lambda app, **given: app.tasks["request"].apply_async(
        stamped_headers=[*STAMPS], **STAMPS, **given
    ),
    "send_task": lambda app, **given: app.send_task(
        "request", stamped_headers=[*STAMPS], **STAMPS, **given
    ),
    "signature": lambda app, **given: _stamped(app.tasks["request"].s()).apply_async(**given),
    "app.signature": lambda app, **given: _stamped(app.signature("request")).apply_async(**given),
    "chain": lambda app, **given: _stamped(
        chain(app.tasks["look"].si(), app.tasks["request"].si().set(**given))
    ).apply_async(),
    "callback": lambda app, **given: _stamped(
        app.tasks["request"].si().on_error(app.tasks["look"].si())
    ).apply_async(**given),
    "group": lambda app, **given: _stamped(group(app.tasks["request"].si())).apply_async(**given)[
        0
    ],
    "chord": lambda app, **given: _stamped(
        chord([app.tasks["look"].si()], app.tasks["request"].si().set(**given))
    ).apply_async(),
    "send_many": lambda app, **given: _sent_many(app, given),
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


def _sent_many(app: Any, given: dict[str, Any]) -> Any:
    task_id = uuid4().hex
    stamps: dict[str, Any] = {name: "blue" for name in STAMPS if name != "tolerance"}
    rows = [{"task_id": task_id, "delay": given.get("countdown", 0.1)}]
    app.rabbitdelay.send_many(app.tasks["request"], rows, stamped_headers=[*stamps], **stamps)
    return app.AsyncResult(task_id)


@pytest.mark.parametrize(
    ("how", "given"),
    [
        *((how, given) for how in STAMPED for given in ({}, {"countdown": 0.3})),
        ("retry", {"delay": 0.3}),
    ],
    ids=str,
)
def test_a_stamp_of_any_name_stays_and_is_no_option(
    served_shop: Any, how: str, given: dict[str, Any]
) -> None:
    seen = STAMPED[how](served_shop, **given).get(timeout=PATIENCE)
    expected = {*STAMPS} - ({"tolerance"} if how == "send_many" else set())
    assert {*seen["stamped_headers"]} == expected
    assert all(seen["stamps"][name] in ("blue", ["blue"]) for name in expected)
    if given:
        assert headers.DUE in seen["headers"]


def test_an_option_that_a_stamp_would_hide_is_refused(served_shop: Any) -> None:
    signature = _stamped(served_shop.tasks["request"].s())
    for send in (signature.set, signature.apply_async):
        with pytest.raises(UnknownOption, match="the signature has a stamp of this name"):
            send(delay=5)


def test_an_ignored_result_is_not_stored(served_shop: Any) -> None:
    key = f"ignored-{uuid4().hex}"
    redis = served_shop.backend.client
    note = served_shop.tasks["note"]
    ignored = note.apply_async(kwargs={"key": key}, delay=0.3, ignore_result=True)
    wait_for(lambda: redis.llen(key) == 1, "the task")
    # The worker runs one task at a time: it is done with the first when this one has run.
    note.apply_async(kwargs={"key": key}).get(timeout=PATIENCE)
    assert served_shop.AsyncResult(ignored.id).state == "PENDING"
    redis.delete(key)


@pytest.mark.parametrize("kind", ["seconds", "datetime"])
def test_an_expiry_after_it_is_due_stays(send: Callable[..., Any], kind: str) -> None:
    instant = datetime.now(UTC) + timedelta(seconds=60)
    # What RabbitMQ would apply to each stop is left to the worker.
    if kind == "datetime":
        seen = alike(partial(send, expires=instant), "expiration")
        assert datetime.fromisoformat(seen["expires"]) == instant
    else:
        alike(partial(send, expires=60), "expiration", "expires")
        seen = send(expires=60, delay=0.1).get(timeout=PATIENCE)
        later = datetime.fromisoformat(seen["expires"]) - instant
        assert timedelta(0) <= later < timedelta(seconds=60)
    assert "expiration" not in seen["properties"]


@pytest.mark.parametrize("kind", ["seconds", "datetime"])
def test_a_task_that_expires_before_it_is_due_never_runs_and_is_revoked(
    served_shop: Any, kind: str
) -> None:
    key = f"expired-{uuid4().hex}"
    expires = 0.2 if kind == "seconds" else datetime.now(UTC) + timedelta(seconds=0.2)
    note = served_shop.tasks["note"]
    result = note.apply_async(kwargs={"key": key}, delay=0.6, expires=expires)
    with pytest.raises(TaskRevokedError, match="expired"):
        result.get(timeout=PATIENCE)
    assert result.state == "REVOKED"
    assert served_shop.backend.client.llen(key) == 0


@pytest.mark.parametrize("name", QUEUES)
def test_signals_see_what_they_see_of_a_task_without_a_delay(shop: Any, name: str) -> None:
    seen: list[dict[str, Any]] = []

    def note(signal: Any, **told: Any) -> None:
        # As it is now: who publishes may change it afterwards.
        told["headers"] = dict(told["headers"])
        seen.append(told)

    before_task_publish.connect(note)
    after_task_publish.connect(note)
    try:
        for delay in ({}, {"delay": 1}):
            shop.tasks["look"].apply_async(task_id="one", queue=named(shop, name), **delay)
    finally:
        before_task_publish.disconnect(note)
        after_task_publish.disconnect(note)

    before, after, delayed_before, delayed_after = seen
    assert delayed_before == before
    assert delayed_after == after
    queue = shop.amqp.queues[named(shop, name)]
    # Celery sends to a direct exchange's queue through the default exchange.
    direct = queue.exchange.type == "direct"
    assert after["exchange"] == ("" if direct else queue.exchange.name)
    assert after["routing_key"] == (queue.name if direct else queue.routing_key)
    assert after["sender"] == "look"


@pytest.mark.parametrize("name", ["second", "topic.reports"])
def test_the_task_sent_event_tells_the_true_queue_and_goes_where_events_go(
    make_shop: Callable[..., Any],
    make_queue: Callable[..., Queue],
    connection: Connection,
    prefix: str,
    name: str,
) -> None:
    shop = make_shop(task_send_sent_event=True, event_exchange=f"{prefix}.events")
    events = make_queue("events", Exchange(f"{prefix}.events", type="topic"), "task.sent")
    events(connection.default_channel).declare()
    for delay in ({}, {"delay": 1}):
        shop.tasks["look"].apply_async(queue=f"{prefix}.{name}", **delay)

    undelayed, delayed = (arrival.body for arrival in take(connection, [events], 2))

    assert delayed["queue"] == f"{prefix}.{name}"
    changing = ("uuid", "root_id", "clock", "timestamp")
    assert _without(json.dumps(delayed), *changing) == _without(json.dumps(undelayed), *changing)


def test_a_retry_has_left_behind_what_the_broker_added(served_shop: Any) -> None:
    elsewhere = Queue(named(served_shop, "elsewhere"), Exchange(named(served_shop, "elsewhere")))
    options = {"countdown": 5.9, "queue": elsewhere.name}
    own = {"x-tenant": "shop"}
    before = time.time()
    with served_shop.connection_for_read() as connection:
        channel: Any = connection.default_channel
        elsewhere(channel).declare()
        try:
            retry = served_shop.tasks["retry"]
            retry.apply_async(([], 1, options), delay=1, headers=own)
            (arrival,) = take(connection, [elsewhere], 1)
        finally:
            elsewhere(channel).delete()
            elsewhere.exchange(channel).delete()

    message = arrival.message
    assert message.headers["retries"] == 1
    assert message.headers["x-tenant"] == "shop"
    # Only the stops of the second delay are in it, of which a slow machine leaves less: never
    # seconds.1, the stop of the first one.
    topology = served_shop.rabbitdelay.topology
    stops = {death["queue"] for death in message.headers["x-death"]}
    left = (tenths / 10 for tenths in range(20, 60))
    assert stops in [{*topology.route(each, elsewhere.name).stops} for each in left]
    assert all(death["count"] == 1 for death in message.headers["x-death"])
    assert message.headers[headers.DUE] / 1000 >= before + 6.9
    (past,) = arrival.body[0][0]
    assert_waited(past, before, 1)
    assert past["headers"].keys() == {*own, *ADDED}


# Where it goes.


def _nothing(prefix: str) -> dict[str, Any]:
    return {}


class Way(NamedTuple):
    """A way to say where a task goes: the queue in question, the caller's options, and settings."""

    to: str
    options: Callable[[str], dict[str, Any]] = _nothing
    settings: Callable[[str], dict[str, Any]] = _nothing


def _topic(prefix: str) -> Exchange:
    return Exchange(f"{prefix}.topic", type="topic")


def _daily(prefix: str) -> Queue:
    name, arguments = "topic.daily.reports", {"x-queue-type": "quorum"}
    return Queue(f"{prefix}.{name}", _topic(prefix), name, queue_arguments=arguments)


def _default_topic(prefix: str) -> dict[str, Any]:
    """The default queue's exchange is a topic exchange, where a routing key alone decides."""
    return {"task_default_queue": f"{prefix}.topic.reports"}


def _by_key(exchange: Any) -> dict[str, Any]:
    return {"exchange": exchange, "routing_key": "topic.reports"}


DAILY_KEY = {"routing_key": "topic.daily.reports"}

WAYS = {
    "nothing": Way("default"),
    "queue by name": Way("second", lambda prefix: {"queue": f"{prefix}.second"}),
    "queue as an object": Way("topic.daily.reports", lambda prefix: {"queue": _daily(prefix)}),
    "exchange by name": Way(
        "second", lambda prefix: {"exchange": f"{prefix}.direct", "routing_key": "second"}
    ),
    "exchange as an object": Way("topic.reports", lambda prefix: _by_key(_topic(prefix))),
    # Celery does not let the routing key decide here, but its default queue.
    "default exchange": Way(
        "default", lambda prefix: {"exchange": "", "routing_key": f"{prefix}.second"}
    ),
    "routing key alone": Way("topic.daily.reports", lambda _: DAILY_KEY, _default_topic),
    "route to a queue": Way(
        "second",
        settings=lambda prefix: {"task_routes": {"look": {"queue": f"{prefix}.second"}}},
    ),
    "route to an exchange": Way(
        "topic.reports",
        settings=lambda prefix: {"task_routes": {"look": _by_key(f"{prefix}.topic")}},
    ),
    "route with only a routing key": Way(
        "topic.daily.reports",
        settings=lambda prefix: {**_default_topic(prefix), "task_routes": {"look": DAILY_KEY}},
    ),
    "route that is a function": Way(
        "second",
        settings=lambda prefix: {"task_routes": [lambda *_, **__: {"queue": f"{prefix}.second"}]},
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_task_goes_where_it_would_go_without_a_delay(
    make_shop: Callable[..., Any], connection: Connection, prefix: str, way: str
) -> None:
    to, options, settings = WAYS[way]
    shop = make_shop(**settings(prefix))
    queues = list(shop.amqp.queues.values())
    for queue in queues:
        queue(connection.default_channel).declare()
    given = options(prefix)

    shop.tasks["look"].apply_async(**given)
    shop.tasks["look"].apply_async(**given, delay=0.2)
    both = take(connection, queues, 2)
    undelayed, delayed = sorted(both, key=lambda each: headers.DUE in each.message.headers)

    assert undelayed.queue == delayed.queue == f"{prefix}.{to}"
    assert headers.DUE not in undelayed.message.headers
    assert delayed.message.headers[headers.QUEUE] == f"{prefix}.{to}"
    restore(delayed.message)
    for name in ("exchange", "routing_key"):
        assert delayed.message.delivery_info[name] == undelayed.message.delivery_info[name]
    assert delayed.body == undelayed.body
