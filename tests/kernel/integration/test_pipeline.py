"""Delayed sends in a ``pipeline()``, and groups: many in flight, and each has its outcome."""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
from celery import chain, chord, group
from celery.exceptions import Ignore, Reject, SoftTimeLimitExceeded
from celery.signals import after_task_publish
from kombu import Connection, Queue

from celery_rabbitdelay import exceptions
from celery_rabbitdelay.app import signals
from celery_rabbitdelay.publishing import publisher
from celery_rabbitdelay.testing import RabbitMQServer, wait_for
from tests.kernel.integration.arrivals import count
from tests.kernel.integration.notes import listening
from tests.kernel.integration.publishing import in_child
from tests.kernel.integration.shop import PATIENCE
from tests.kernel.integration.trouble import resumed, suspended
from tests.node_control import clear_policy, set_policy

#: Seconds; two stops in the levels, where a message waits for longer than a test takes.
DELAY = 330
LEVELS = [("minutes", 6, 60), ("seconds", 60, 1)]

#: Seconds; its first stop is the queue for three minutes, also if some have passed.
REFUSED = 239

#: Tasks of which many are confirmed at once: more than Python nests calls.
MANY = 400


@pytest.fixture
def configuration(configuration: Any) -> dict[str, Any]:
    return {**configuration, "rabbitdelay_layout": LEVELS}


@pytest.fixture
def private_shop(private_rabbitmq: RabbitMQServer, make_shop: Any) -> Any:
    """An application whose broker the test may maltreat."""
    return make_shop(broker_url=private_rabbitmq.url)


@pytest.fixture
def confirmed() -> Iterator[list[str]]:
    """The ids of the tasks of which an application has said that they are confirmed."""
    ids: list[str] = []

    def note(task_id: str, **others: Any) -> None:
        ids.append(task_id)

    with listening(note, signals.delayed):
        yield ids


def waiting(connection: Connection, shop: Any) -> int:
    """Return how many messages are in the levels of an application."""
    return sum(count(connection, queue.name) for queue in shop.rabbitdelay.topology.digit_queues)


def not_confirmed_of(error: BaseException) -> exceptions.TasksNotConfirmed:
    """The end of an error's chain of causes."""
    while error.__cause__ is not None:
        error = error.__cause__
    assert isinstance(error, exceptions.TasksNotConfirmed)
    return error


def confirm(shop: Any) -> None:
    """Confirm what was sent in a block so far: ``send_many`` gets its publisher after that."""
    shop.rabbitdelay.send_many("look", [])


def send_a_group(app: Any) -> Any:
    """Send a group of one task; return the task's result."""
    result: Any = group(app.tasks["look"].si(), app=app).apply_async(countdown=DELAY)
    return result[0]


SENDS: tuple[Callable[[Any], Any], ...] = (
    lambda app: app.tasks["look"].apply_async(delay=DELAY),
    lambda app: app.send_task("look", countdown=DELAY),
    lambda app: app.signature("look").set(delay=DELAY).delay(),
    send_a_group,
    lambda app: chain(app.tasks["look"].si().set(delay=DELAY), app=app).apply_async(),
)


def test_no_send_in_a_block_waits_for_its_confirm_and_its_end_waits_for_all(
    private_rabbitmq: RabbitMQServer,
    private_shop: Any,
    connection: Connection,
    confirmed: list[str],
) -> None:
    with resumed(private_rabbitmq), private_shop.rabbitdelay.pipeline():
        # Celery connects for a group, too.
        connecting = [send(private_shop).id for send in SENDS]
        private_rabbitmq.suspend()
        ids = [send(private_shop).id for send in SENDS * 2]
        assert not {*ids} & {*confirmed}
        private_rabbitmq.resume()
    assert sorted(confirmed) == sorted(connecting + ids)
    assert waiting(connection, private_shop) == len(confirmed)


def test_a_block_in_a_block_is_part_of_it(
    private_rabbitmq: RabbitMQServer, private_shop: Any, confirmed: list[str]
) -> None:
    look = private_shop.tasks["look"]
    with private_shop.rabbitdelay.pipeline():
        ids = [look.apply_async(delay=DELAY).id]
        with suspended(private_rabbitmq), private_shop.rabbitdelay.pipeline():
            ids.append(look.apply_async(delay=DELAY).id)
        assert ids[1] not in confirmed
    assert confirmed == ids


def test_other_threads_and_coroutines_send_as_always(shop: Any, confirmed: list[str]) -> None:
    look = shop.tasks["look"]

    async def send() -> str:
        own = look.apply_async(delay=DELAY).id
        assert confirmed[-1] == own
        result = await shop.rabbitdelay.send("look", delay=DELAY)
        return str(result.id)

    with shop.rabbitdelay.pipeline(), ThreadPoolExecutor(1) as thread:
        look.apply_async(delay=DELAY)
        others = thread.submit(lambda: look.apply_async(delay=DELAY).id).result(PATIENCE)
        assert confirmed[-1] == others
        coroutines = asyncio.run(send())
        assert confirmed[-1] == coroutines
    assert len(confirmed) == 4


@pytest.fixture
def refusing(private_rabbitmq: RabbitMQServer, make_shop: Any, prefix: str) -> Iterator[Any]:
    """An application with a level whose queue for ``REFUSED`` is full, and refuses."""
    shop = make_shop(
        broker_url=private_rabbitmq.url,
        task_publish_retry_policy={"max_retries": 2, "interval_step": 0.05},
    )
    look = shop.tasks["look"]
    look.apply_async(delay=60)
    policy = set_policy(private_rabbitmq, "/", rf"^{prefix}\.minutes\.3$", max_length=1)

    def refuses() -> bool:
        try:
            look.apply_async(delay=REFUSED, retry=False)
        except exceptions.MessageNacked:
            return True
        return False

    wait_for(refuses, "a full queue")
    yield shop
    clear_policy(private_rabbitmq, "/", policy)


def test_a_task_that_is_refused_is_named_and_holds_up_no_other(
    refusing: Any, confirmed: list[str]
) -> None:
    look = refusing.tasks["look"]
    confirmed.clear()
    refused, others = ["3", "4"], [str(each) for each in range(5, 20)]

    def block() -> None:
        with refusing.rabbitdelay.pipeline():
            for task_id in (*refused, *others):
                look.apply_async(delay=REFUSED if task_id in refused else 60, task_id=task_id)

    with pytest.raises(exceptions.TasksNotConfirmed) as caught:
        block()
    assert {*caught.value.errors} == {*refused}
    assert all(isinstance(each, exceptions.MessageNacked) for each in caught.value.errors.values())
    assert caught.value.uncertain == ()
    assert not caught.value.may_have_arrived
    assert refused[0] in str(caught.value)
    assert sorted(confirmed) == sorted(others)


def test_a_task_that_is_ignored_fails_if_what_it_has_sent_instead_is_not_confirmed(
    refusing: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def block(error: Exception) -> None:
        with refusing.rabbitdelay.pipeline():
            refusing.tasks["look"].apply_async(delay=REFUSED, task_id="instead")
            raise error

    for error in (Ignore(), Reject("no use", requeue=False)):
        with pytest.raises(exceptions.TasksNotConfirmed) as caught:
            block(error)
        assert caught.value.__cause__ is error
    assert not caplog.records
    for other in (KeyError("order"), Reject("later", requeue=True)):
        with pytest.raises(type(other)):
            block(other)
    # Where another error is raised, nobody may look at the end of its chain.
    assert "instead" in caplog.text


def test_who_is_interrupted_at_the_end_of_a_block_learns_what_is_not_confirmed(
    private_shop: Any, private_rabbitmq: RabbitMQServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = private_shop.tasks["look"]
    look.apply_async(delay=DELAY)

    def block() -> None:
        with private_shop.rabbitdelay.pipeline(), suspended(private_rabbitmq):
            look.apply_async(delay=DELAY, task_id="unknown")
            interrupted = mock.Mock(side_effect=SoftTimeLimitExceeded)
            monkeypatch.setattr(publisher.Run, "go_on", interrupted)

    with pytest.raises(SoftTimeLimitExceeded) as caught:
        block()
    assert not_confirmed_of(caught.value).uncertain == ("unknown",)


def test_a_receiver_may_send_for_each_of_many_tasks_that_are_confirmed_at_once(
    shop: Any, confirmed: list[str]
) -> None:
    look = shop.tasks["look"]
    look.apply_async(delay=DELAY)

    def send(task_id: str, **others: Any) -> None:
        if task_id.startswith("first"):
            look.apply_async(delay=DELAY, task_id=task_id.replace("first", "second"))

    with listening(send, signals.delayed), shop.rabbitdelay.pipeline():
        for number in range(MANY):
            look.apply_async(delay=DELAY, task_id=f"first-{number}")
    expected = {f"{each}-{number}" for each in ("first", "second") for number in range(MANY)}
    assert expected <= {*confirmed}


def test_a_retry_is_confirmed_when_its_send_returns(shop: Any, confirmed: list[str]) -> None:
    """Otherwise the worker would acknowledge the task before its retry is confirmed."""
    with shop.rabbitdelay.pipeline():
        ids = [shop.tasks["look"].apply_async(delay=DELAY).id]
        ids.append(shop.tasks["look"].apply_async(delay=DELAY, retries=1).id)
        assert confirmed == ids


def test_a_group_raises_the_error_of_its_member_and_the_others_are_sent(
    refusing: Any, confirmed: list[str]
) -> None:
    look = refusing.tasks["look"]
    members = [look.si().set(delay=delay) for delay in (60, REFUSED, 60)]
    confirmed.clear()
    with pytest.raises(exceptions.MessageNacked) as caught:
        group(members, app=refusing).apply_async()
    assert [*not_confirmed_of(caught.value).errors.values()] == [caught.value]
    assert len(confirmed) == 2


def test_a_queue_that_cannot_be_declared_fails_the_send_and_no_other(
    shop: Any, connection: Connection, confirmed: list[str], make_queue: Any
) -> None:
    other = make_queue("other", queue_arguments={"x-queue-type": "quorum"})
    other(connection.default_channel).declare()
    look, differing = shop.tasks["look"], Queue(other.name, durable=False)
    with shop.rabbitdelay.pipeline():
        ids = [look.apply_async(delay=DELAY).id]
        with pytest.raises(exceptions.DeclarationRefused):
            look.apply_async(delay=DELAY, queue=differing)
        ids.append(look.apply_async(delay=DELAY).id)
    assert confirmed == ids


def test_the_members_of_a_group_are_written_before_the_first_confirm(
    private_rabbitmq: RabbitMQServer, private_shop: Any, confirmed: list[str]
) -> None:
    published: list[str] = []

    def note(headers: Any, **others: Any) -> None:
        published.append(headers["id"])
        if len(published) == 1:
            private_rabbitmq.suspend()

    with (
        listening(note, after_task_publish),
        resumed(private_rabbitmq),
        ThreadPoolExecutor(1) as thread,
    ):
        look = private_shop.tasks["look"]
        whole: Any = chord([look.si() for _ in range(10)], look.si())
        # Before 5.6, a chord takes a countdown to be for its unlocking.
        sending = thread.submit(whole.apply_async, delay=DELAY)
        wait_for(lambda: len(published) == 10, "all members", PATIENCE)
        assert not sending.done()
        private_rabbitmq.resume()
        sending.result(PATIENCE)
    assert confirmed == published


def test_a_child_that_is_forked_in_a_block_has_a_connection_of_its_own(
    shop: Any, connection: Connection, confirmed: list[str]
) -> None:
    look = shop.tasks["look"]

    def send() -> None:
        look.apply_async(delay=DELAY)
        assert len(confirmed) == 1

    with shop.rabbitdelay.pipeline():
        look.apply_async(delay=DELAY)
        confirm(shop)
        confirmed.clear()
        assert in_child(send)() == 0
        ids = [look.apply_async(delay=DELAY).id]
    assert confirmed == ids
    assert waiting(connection, shop) == 3


def test_a_tracked_task_is_confirmed_and_registered_when_its_send_returns(
    make_shop: Any, redis_url: str, confirmed: list[str]
) -> None:
    shop = make_shop(rabbitdelay_registry_url=redis_url, broker_pool_limit=1)
    look = shop.tasks["look"]
    with shop.rabbitdelay.pipeline():
        ids = [look.apply_async(delay=DELAY).id]
        for options in ({"track": True}, {"key": "order:7", "track": True}):
            ids.append(look.apply_async(delay=DELAY, **options).id)
            assert confirmed == ids
            assert ids[-1] in [each.task_id for each in shop.rabbitdelay.pending()]
        # The only connection of the pool is the block's.
        shop.rabbitdelay.send_many("look", [{"delay": DELAY}])
        ids.append(look.apply_async(delay=DELAY).id)
    assert confirmed == ids
