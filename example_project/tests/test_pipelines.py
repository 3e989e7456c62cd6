"""The pipelines, on some of the orders: real Spark, a worker, RabbitMQ and Redis.

Reminders are due either at once or after half an hour and more, so the tests do not depend on the
speed of the machine.
"""

import csv
import gzip
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import pytest
from amqp.exceptions import NotFound
from kombu import Connection
from pyspark.sql import SparkSession

from celery_rabbitdelay.spark import task_id
from celery_rabbitdelay.testing import RabbitMQServer, RedisServer, wait_for
from example_project import shop as record_shop
from example_project import spark_job
from example_project.demonstration.gateway import MailGateway
from example_project.demonstration.processes import ChildProcess
from example_project.pipelines import forecast, lateness, reconciliation, reminders
from tests.spark.integration.spark import QUICK_JAVA, spark_session

#: The tasks' queue: Celery's default.
TASKS = "celery"

DAY = timedelta(days=1)

pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("spark")]

#: Writes the orders of some days to a file; returns the day of each order by its id.
OrdersOf: TypeAlias = Callable[..., dict[str, str]]


def reminder_of(order: str) -> str:
    """Return the id of an order's task."""
    return task_id(spark_job.JOB_ID, {"order_id": order})


class Shop(NamedTuple):
    """The shop, with all its servers.

    Attributes:
        gateway: The mail gateway.
        worker: The worker.
        log: The folder of the log of delivered reminders.
    """

    gateway: MailGateway
    worker: ChildProcess
    log: Path

    def delivered(self, orders: Mapping[str, str]) -> Counter[str]:
        """Return how often each of these orders' reminders was delivered, according to the log."""
        lines = "".join(file.read_text() for file in self.log.glob("*.jsonl")).splitlines()
        return Counter(
            entry["order_id"]
            for entry in map(json.loads, lines)
            if entry["order_id"] in orders and entry["task_id"] == reminder_of(entry["order_id"])
        )

    def wait_for(self, orders: Mapping[str, str]) -> None:
        """Wait until all of these orders' reminders are delivered."""
        wait_for(lambda: len(self.delivered(orders)) == len(orders), "the reminders")


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    folder = tmp_path_factory.mktemp("shop")
    log = folder / "delivered"
    gateway = MailGateway()
    with ExitStack() as stack:
        broker = stack.enter_context(RabbitMQServer())
        redis = stack.enter_context(RedisServer())
        environment = {
            "CELERY_BROKER_URL": broker.url,
            "SHOP_REDIS_URL": redis.url,
            "MAIL_GATEWAY_URL": stack.enter_context(gateway.served()),
            "SHOP_DELIVERED_LOG": str(log),
            "no_proxy": "127.0.0.1",
            "C_FORCE_ROOT": "1",
        }
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for name, value in environment.items():
            patch.setenv(name, value)
        # The pipelines' own process has imported the shop already.
        record_shop.app.conf.update(
            broker_url=broker.url, result_backend=redis.url, rabbitdelay_registry_url=redis.url
        )
        stack.callback(record_shop.app.close)
        celery = ["celery", "-A", "example_project.shop", "worker", "--concurrency", "4"]
        included = ["-I", "example_project.pipelines.delivered_log", "--loglevel", "WARNING"]
        worker = ChildProcess("worker", [*celery, *included], folder, environment)
        yield Shop(gateway, stack.enter_context(worker), log)


@pytest.fixture(scope="module")
def spark(shop: Shop) -> Iterator[SparkSession]:
    with spark_session(QUICK_JAVA) as session:
        yield session


@pytest.fixture
def orders_of(tmp_path: Path) -> OrdersOf:
    """Returns a function that writes the orders of some days to ``orders.txt``.

    Each test uses days of its own.
    """

    def write(*days: str) -> dict[str, str]:
        header, *lines = gzip.decompress(spark_job.ORDERS.read_bytes()).decode().splitlines()
        # One order per customer and day, so its number within the day is always 1.
        first = {line[:15]: line for line in lines if line[7:15] in days}
        (tmp_path / "orders.txt").write_text("\r\n".join([header, *first.values(), ""]))
        return {f"{line[1:6]}-{line[7:15]}-1": line[7:15] for line in first.values()}

    return write


def replay(folder: Path, day: str, due_in: timedelta = timedelta()) -> list[str]:
    """Return the options of a replay in which a day's first reminder is due after ``due_in``."""
    days = datetime.strptime(f"{day}Z", "%Y%m%d%z").date() - spark_job.FIRST_DAY
    after = (days + spark_job.REMIND_AFTER).days * timedelta(minutes=1)
    begins = (datetime.now(UTC) - after + due_in).isoformat()
    return ["--orders", str(folder / "orders.txt"), "--begins", begins]


def in_queues(*, but: str = "none") -> dict[str, int]:
    """Return the number of ready messages in each queue of the levels and in the tasks' queue.

    Args:
        but: The end of a queue's name that is left out.
    """
    names = [queue.name for queue in record_shop.app.rabbitdelay.topology.digit_queues]
    found = {}
    with Connection(os.environ["CELERY_BROKER_URL"]) as connection:
        for name in [*names, TASKS]:
            with connection.channel() as opened, suppress(NotFound):
                channel: Any = opened
                found[name] = channel.queue_declare(name, passive=True).message_count
    return {name: count for name, count in found.items() if count and not name.endswith(but)}


def lose(queues: list[str]) -> None:
    """Purge queues of the levels. They stay: a retry may need one that has held a probe only."""
    with Connection(os.environ["CELERY_BROKER_URL"]) as connection:
        channel: Any = connection.default_channel
        for queue in queues:
            channel.queue_purge(queue)


def states(printed: str) -> dict[str, int]:
    """Return the number of orders in each state, from the output of the reconciliation."""
    counts = {}
    for line in printed.splitlines():
        number, _, state = line.strip().partition(" ")
        if state in reconciliation.STATES:
            counts[state] = int(number.replace(",", ""))
    return {state: number for state, number in counts.items() if number}


def test_each_order_has_an_id_of_its_own_and_a_reminder_at_its_own_time_a_fortnight_later(
    spark: SparkSession,
) -> None:
    orders = spark_job.read_orders(spark).cache()
    header, *lines = gzip.decompress(spark_job.ORDERS.read_bytes()).decode().splitlines()
    assert not re.match(spark_job.ORDER_LINE, header)
    assert len(lines) == orders.select("order_id").distinct().count() == 69_659
    for line in lines:
        # At the columns, counted from 1, as Spark's ``substring`` does.
        cut = [line[start - 1 :][:width].strip() for start, width in spark_job.COLUMNS.values()]
        assert cut == line.split()
    begins = datetime(2026, 1, 1, tzinfo=UTC)
    early = orders.where("ordered_on < date '1997-01-04'")
    due, again = (
        {row.order_id: row.eta for row in spark_job.reminders(each, begins, DAY).collect()}
        for each in (early, early.repartition(3))
    )
    assert due == again, "the same in every run"
    assert len({*due.values()}) == len(due) > 500
    for order, eta in due.items():
        days = int(order.split("-")[1]) - 19970101 + 14
        assert days * DAY <= eta.astimezone(UTC) - begins < (days + 1) * DAY, order


def test_reminders_that_are_sent_twice_arrive_once_and_the_report_has_each(
    shop: Shop, orders_of: OrdersOf, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    orders = orders_of("19970301")
    options = [*replay(tmp_path, "19970301"), "--day", "0.1", "--tolerance", "1"]
    for _ in range(2):
        reminders.main(options)
    shop.wait_for(orders)
    # The notes of two commits wait until shortly before the jobs would have expired.
    # A worker's probe waits for a minute most of the time.
    wait_for(lambda: sum(in_queues(but=".minutes.1").values()) == 2, "two notes alone")
    shop.worker.stop()  # it finishes the tasks that it has received
    shop.worker.start()
    assert shop.delivered(orders) == dict.fromkeys(orders, 1)
    assert shop.gateway.mails() == dict.fromkeys(orders, 1)

    capsys.readouterr()
    lateness.main(["--log", str(shop.log)])
    printed = capsys.readouterr().out
    assert f"{len(orders):,} reminders delivered, of {len(orders):,} different ids" in printed
    rows = [line.split("|")[1:-1] for line in printed.splitlines() if line.startswith("|20")]
    assert sum(int(row[1]) for row in rows) == len(orders)
    for _, _, early, p50, p99, latest in rows:
        assert int(early) == 0
        assert 0 <= int(p50) <= int(p99) <= int(latest)


def test_the_forecast_counts_each_waiting_reminder_in_the_minute_when_it_is_due(
    shop: Shop, orders_of: OrdersOf, tmp_path: Path
) -> None:
    orders = orders_of("19980601", "19980604")
    reminders.main(replay(tmp_path, "19980601", timedelta(hours=3)))
    forecast.main(["--output", str(tmp_path / "load.png")])
    assert (tmp_path / "load.png").read_bytes().startswith(b"\x89PNG")
    with (tmp_path / "load.csv").open() as file:
        _, *rows = csv.reader(file)
    load = [(datetime.fromisoformat(due), int(tasks)) for due, tasks in rows]
    first, last = load[0][0], load[-1][0]
    days = Counter(orders.values())
    assert sum(tasks for _, tasks in load) == len(orders)
    # A replayed day lasts a minute and begins in the middle of one.
    on_first_day = sum(tasks for due, tasks in load if due - first < timedelta(minutes=2))
    assert on_first_day == days["19980601"]
    assert timedelta(minutes=3) <= last - first <= timedelta(minutes=4)
    assert all(due.second == 0 for due, _ in load)
    lose(list(in_queues()))


def test_what_was_lost_is_found_and_sent_again_and_each_reminder_arrives_once(
    shop: Shop, orders_of: OrdersOf, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    orders = orders_of("19970401", "19970430", "19980315")
    now, lost, waiting = (
        {order: day for order, day in orders.items() if day == each}
        for each in ("19970401", "19970430", "19980315")
    )
    # They are due now, in half an hour, and in six hours.
    reminders.main(replay(tmp_path, "19970401", due_in=timedelta(minutes=-1)))
    shop.wait_for(now)
    lose([name for name in in_queues() if ".minutes." in name])
    # To avoid waiting for half an hour, reminders that are due in the next two hours count as
    # overdue, and the replay begins an hour earlier, so that those sent again are due at once.
    options = [*replay(tmp_path, "19970401", due_in=timedelta(hours=-1)), "--grace", "-7200"]
    capsys.readouterr()
    reconciliation.main(options)
    printed = capsys.readouterr().out
    assert states(printed) == {
        "delivered": len(now),
        "waiting": len(waiting),
        "missing": len(lost),
    }
    assert f"{len(lost)} were sent again" in printed
    arrived = {**now, **lost}
    shop.wait_for(arrived)
    assert shop.delivered(orders) == dict.fromkeys(arrived, 1)
    assert shop.gateway.mails().items() >= dict.fromkeys(arrived, 1).items()
    reconciliation.main(options)
    printed = capsys.readouterr().out
    assert states(printed) == {"delivered": len(arrived), "waiting": len(waiting)}
    assert "\n0 were sent again" in printed
