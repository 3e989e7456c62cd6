"""Tasks of the registry in trouble: on real servers, with a worker of their own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from celery import chain, chord, group
from celery.exceptions import TaskRevokedError
from kombu import Connection

from celery_rabbitdelay import JobClosed, Outcome, RegistryUnavailable, UnknownOption
from celery_rabbitdelay.testing import RedisServer, wait_for
from celery_rabbitdelay.testing.servers import free_port
from tests.integration.arrivals import count
from tests.integration.conftest import small_configuration
from tests.integration.notes import Notes
from tests.integration.shop import PATIENCE, make_app
from tests.integration.worker import Worker
from tests.redis_servers import ConfiguredRedis

#: Seconds; long enough for a test to do something before a task is due.
DELAY = 2.0


class SavedRedis(ConfiguredRedis):
    """A Redis that starts with what it had when it was told to save."""

    def _command(self) -> list[str]:
        return [*super()._command(), "--dbfilename", "saved.rdb"]


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    """The registry's Redis, for one test to stop and start."""
    with SavedRedis() as server:
        yield server


@pytest.fixture
def settings(broker_url: str, redis_url: str, redis: RedisServer) -> dict[str, Any]:
    return {
        **small_configuration(broker_url, redis_url, f"test-{uuid4().hex[:8]}"),
        "task_acks_late": True,
        "rabbitdelay_registry_url": redis.url,
    }


@pytest.fixture
def shop(settings: dict[str, Any]) -> Iterator[Any]:
    app = make_app(settings)
    yield app
    app.close()


@pytest.fixture
def worker(settings: dict[str, Any]) -> Iterator[Worker]:
    with Worker(settings) as worker:
        yield worker


def send(shop: Any, noted: Notes, *given: Any, **options: Any) -> Any:
    return shop.tasks["note"].apply_async(given, {"key": noted.key}, **options)


def wait_until_passed(shop: Any, noted: Notes, delay: float) -> list[Any]:
    """Wait until a task that is due later has run; return what else has."""
    word = uuid4().hex
    send(shop, noted, word, delay=delay)
    wait_for(lambda: word in noted(), "a later task", PATIENCE)
    return [given for given in noted() if given != word]


def first_word(shop: Any, key: str) -> None:
    """Wait until the task ``retry-when`` runs."""
    wait_for(lambda: shop.backend.client.get(key) == b"first", "the task", PATIENCE)


def test_a_task_that_is_moved_to_earlier_twice_runs_once_and_redis_answers(
    shop: Any, worker: Worker, noted: Notes, redis: ConfiguredRedis
) -> None:
    result = send(shop, noted, "moved", delay=5.5, track=True)
    for delay in (4, 1.5):
        assert shop.rabbitdelay.postpone(result, delay=delay) is Outcome.DONE
    assert wait_until_passed(shop, noted, 5.8) == ["moved"]
    assert redis.ask("ping") == "PONG"
    assert result.state == "SUCCESS"


def test_a_moved_task_whose_worker_is_killed_runs_again(
    shop: Any, worker: Worker, settings: dict[str, Any]
) -> None:
    key = uuid4().hex
    result = shop.tasks["retry-when"].apply_async((key,), delay=5, track=True)
    assert shop.rabbitdelay.postpone(result, delay=0.5) is Outcome.DONE
    first_word(shop, key)
    worker.kill()
    worker.start()
    redis = shop.backend.client
    wait_for(lambda: redis.get(key) == b"again", "the redelivered task", PATIENCE)
    redis.set(key, "go on")
    assert result.get(timeout=PATIENCE) == "done"


@pytest.mark.timeout(300)
def test_a_task_that_runs_once_is_not_lost_if_redis_is_away_when_it_is_redelivered(
    shop: Any, worker: Worker, redis: RedisServer
) -> None:
    key, results = uuid4().hex, shop.backend.client
    result = shop.tasks["retry-when"].apply_async((key,), delay=0.5, once=True)
    first_word(shop, key)
    worker.kill()
    redis.suspend()
    worker.start()
    # It is put back at least once, and is not RabbitMQ's own redelivery any more.
    wait_for(lambda: "go back into the levels" in worker.log, "the worker's warning", PATIENCE)
    redis.resume()
    wait_for(lambda: results.get(key) == b"again", "the task", PATIENCE)
    results.set(key, "go on")
    assert result.get(timeout=PATIENCE) == "done"


def test_a_task_that_runs_once_is_replaced_by_one_with_a_delay(
    settings: dict[str, Any], noted: Notes
) -> None:
    settings = {**settings, "task_annotations": {"*": {"once": True}}}
    app: Any = make_app(settings)
    with Worker(settings):
        after = app.tasks["note"].si("replaced", key=noted.key).set(countdown=0.3)
        result = app.tasks["replace"].apply_async((dict(after),), delay=0.3)
        result.get(timeout=PATIENCE)
    assert noted() == ["replaced"]
    app.close()


@pytest.mark.timeout(300)
def test_a_commit_that_redis_loses_is_made_again(
    shop: Any, worker: Worker, noted: Notes, redis: ConfiguredRedis
) -> None:
    shop.rabbitdelay.open_job("import", expires=12)
    for number in range(3):
        send(shop, noted, number, delay=0.2, job="import", track=True)
    redis.ask("save")
    shop.rabbitdelay.commit_job("import")
    redis.kill()
    redis.start()
    with pytest.raises(JobClosed, match="is open"):
        shop.rabbitdelay.open_job("import", expires=12)
    wait_for(lambda: len(noted()) == 3, "the tasks of the job", PATIENCE)
    assert sorted(noted()) == [0, 1, 2]


def test_a_task_that_is_older_than_the_registrys_memory_is_undeliverable(
    settings: dict[str, Any], noted: Notes, broker_url: str
) -> None:
    short = {**settings, "rabbitdelay_registry_keep": 1.0, "rabbitdelay_retry_for": 0}
    app: Any = make_app(short)
    with Worker(short), Connection(broker_url) as connection:
        send(app, noted, "old", eta=datetime.now(UTC) - timedelta(hours=2), once=True)
        undeliverable = app.rabbitdelay.topology.module_queues.undeliverable.name
        wait_for(lambda: count(connection, undeliverable) == 1, "the task", PATIENCE)
        channel: Any
        with connection.channel() as channel:
            message = channel.basic_get(undeliverable, no_ack=True)
        reason = message.headers["rabbitdelay-reason"]
        assert "older than the registry's memory" in reason
        assert wait_until_passed(app, noted, 0.1) == []
    app.close()


@pytest.mark.timeout(300)
def test_what_celery_sends_for_a_task_goes_out_while_redis_is_away(
    shop: Any, worker: Worker, redis: RedisServer, noted: Notes
) -> None:
    key = uuid4().hex
    retried = shop.tasks["retry-when"].apply_async((key,), delay=0.3, track=True, key=key)
    first_word(shop, key)
    redis.kill()
    with pytest.raises(RegistryUnavailable):
        send(shop, noted, "not sent", delay=0.1, track=True)
    note = shop.tasks["note"]
    step = note.si("step", key=noted.key).set(countdown=0.3, track=True)
    called = note.si("callback", key=noted.key).set(countdown=0.3, key="order")
    chained = chain(shop.tasks["look"].si(), step).apply_async(link=called)
    shop.backend.client.set(key, "go on")
    wait_for(lambda: worker.log.count("is sent although") >= 1, "a chain's step", PATIENCE)
    wait_for(lambda: retried.state == "RETRY", "the retry", PATIENCE)
    redis.start()
    assert retried.get(timeout=PATIENCE) == "done"
    chained.get(timeout=PATIENCE)
    wait_for(lambda: sorted(noted()) == ["callback", "step"], "the callback", PATIENCE)


def test_a_cancel_while_a_task_runs_stops_its_retry(shop: Any, worker: Worker) -> None:
    key = uuid4().hex
    result = shop.tasks["retry-when"].apply_async((key,), delay=0.2, track=True)
    first_word(shop, key)
    assert shop.rabbitdelay.registry.cancel([result.id]) == [Outcome.RELEASED]
    shop.backend.client.set(key, "go on")
    with pytest.raises(TaskRevokedError):
        result.get(timeout=PATIENCE)


def test_a_key_is_of_one_task_and_a_job_of_a_whole_chord(
    shop: Any, worker: Worker, noted: Notes
) -> None:
    note, look = shop.tasks["note"], shop.tasks["look"]
    members = [note.si(number, key=noted.key) for number in range(3)]
    sends = (
        group(members).apply_async,
        chord(members, look.si()).apply_async,
        chain(*members).apply_async,
    )
    for each in sends:
        with pytest.raises(UnknownOption, match=r"give it to one of their tasks"):
            each(delay=0.3, key="order")
    keyed = group(member.set(key=f"order-{n}") for n, member in enumerate(members))
    keyed.apply_async(delay=0.3)
    wait_for(lambda: sorted(noted()) == [0, 1, 2], "the group", PATIENCE)
    with shop.rabbitdelay.job("import", expires=60):
        result = chord([look.si(n) for n in range(3)], look.si("body")).apply_async(
            delay=0.3, job="import"
        )
    assert result.get(timeout=PATIENCE)["given"] == ["body"]


def test_what_cannot_be_read_in_redis_holds_up_no_other_task(
    shop: Any, worker: Worker, noted: Notes
) -> None:
    registry = shop.rabbitdelay.registry
    bad = send(shop, noted, "bad", delay=1, once=True)
    record = registry.names.task(bad.id)
    registry.store.commands(lambda pipeline: pipeline.set(record, "garbage"))
    send(shop, noted, "good", delay=1, once=True)
    wait_for(lambda: "cannot be read" in worker.log, "an error in the log", PATIENCE)
    wait_for(lambda: noted() == ["good"], "the other task", PATIENCE)
    registry.store.commands(lambda pipeline: pipeline.delete(record))
    wait_for(lambda: noted() == ["good", "bad"], "the task", PATIENCE)


def test_a_wrong_option_of_redis_ends_the_worker_before_it_is_ready(
    settings: dict[str, Any],
) -> None:
    worker = Worker({**settings, "rabbitdelay_registry_options": {"socket_timeot": 1}})
    with pytest.raises(Exception, match="rabbitdelay_registry_options"):
        worker.start()
    assert " ready." not in worker.log


def test_a_full_redis_lets_tasks_run(
    shop: Any, worker: Worker, noted: Notes, redis: ConfiguredRedis
) -> None:
    send(shop, noted, "tracked", delay=DELAY, track=True)
    cancelled = send(shop, noted, "cancelled", delay=DELAY, track=True)
    redis.ask("config", "set", "maxmemory", "1")
    assert shop.rabbitdelay.cancel(cancelled) is Outcome.DONE
    send(shop, noted, "sent when full", delay=DELAY, track=True)
    assert sorted(wait_until_passed(shop, noted, DELAY + 0.5)) == ["sent when full", "tracked"]


def test_a_task_may_be_postponed_by_more_than_the_levels_take_at_once(
    shop: Any, worker: Worker, noted: Notes
) -> None:
    capacity = shop.rabbitdelay.topology.layout.capacity_ms / 1000
    result = send(shop, noted, "postponed", delay=0.5)
    due = time.time() + capacity + 2
    shop.rabbitdelay.postpone(result, delay=capacity + 2)
    wait_for(noted, "the task", PATIENCE)
    assert time.time() >= due
    assert "left the delay levels" not in worker.log


def test_several_tasks_are_cancelled_in_any_form(shop: Any, noted: Notes) -> None:
    results = [send(shop, noted, number, delay=60, track=True) for number in range(6)]
    cancel = shop.rabbitdelay.cancel
    assert cancel([results[0]]) is Outcome.DONE
    assert cancel({results[1].id}) is Outcome.DONE
    assert cancel(UUID(results[2].id)) is Outcome.DONE
    assert cancel(each for each in results[3:5]) is Outcome.DONE
    assert cancel(results[:5]) is Outcome.CANCELLED
    assert cancel([]) is Outcome.UNKNOWN
    for wrong in (7, b"bytes", {"id": results[5].id}):
        with pytest.raises(TypeError, match="takes the id or the result"):
            cancel(wrong)
    assert [each.task_id for each in shop.rabbitdelay.pending()] == [results[5].id]


def test_a_cancel_counts_while_rabbitmq_is_away(
    settings: dict[str, Any], shop: Any, noted: Notes
) -> None:
    result = send(shop, noted, "cancelled", delay=60, track=True)
    away = f"amqp://127.0.0.1:{free_port()}//"
    app: Any = make_app({**settings, "broker_url": away, "broker_connection_timeout": 1})
    assert app.rabbitdelay.cancel(result.id) is Outcome.DONE
    assert shop.rabbitdelay.cancel(result.id) is Outcome.CANCELLED
    app.close()


def test_an_early_task_that_the_worker_holds_asks_when_it_is_due(
    settings: dict[str, Any], noted: Notes, broker_url: str
) -> None:
    # It came through distribution, which nobody serves any more, so that it cannot go back.
    settings = {**settings, "rabbitdelay_modules": []}
    app: Any = make_app(settings)
    with Worker(settings) as worker, Connection(broker_url) as connection:
        queue = app.conf.task_default_queue
        ids = [uuid4().hex for _ in range(2)]
        for number, task_id in enumerate(ids):
            message = app.amqp.create_task_message(task_id, "note", (number,), {"key": noted.key})
            due_ms = int((time.time() + DELAY) * 1000)
            connection.Producer().publish(
                message.body,
                headers={**message.headers, "rabbitdelay-due": due_ms},
                routing_key=queue,
                serializer="json",
                **message.properties,
            )
        wait_for(lambda: worker.log.count("so the worker holds it") == 2, "both", PATIENCE)
        app.rabbitdelay.registry.cancel([ids[0]])
        wait_for(lambda: noted() == [1], "the task that was not cancelled", PATIENCE)
        with pytest.raises(TaskRevokedError):
            app.AsyncResult(ids[0]).get(timeout=PATIENCE)
        assert noted() == [1]
    app.close()
