"""What a worker serves to Prometheus, and what a producer counts."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any
from uuid import uuid4

import celery
import httpx
import pytest
from kombu import Connection, Exchange
from prometheus_client import CollectorRegistry

from celery_rabbitdelay import PublishError, Row, RowsNotConfirmed
from celery_rabbitdelay.testing import RabbitMQServer, wait_for
from celery_rabbitdelay.testing.servers import free_port
from tests.kernel.integration.notes import Notes
from tests.kernel.integration.shop import LOST, PATIENCE, named
from tests.kernel.integration.test_early import release
from tests.kernel.integration.worker import Worker, run_celery
from tests.metrics.integration.metrics import Scraped, is_served


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def measured(serve: Callable[..., Any], port: int) -> Callable[..., Any]:
    """Serves an application, whose worker shows its metrics on that port."""
    return partial(serve, rabbitdelay_metrics_port=port)


def scraped(port: int, condition: Callable[[Scraped], object], what: str) -> Scraped:
    """Read a worker's metrics until they say what is expected, and return them."""
    latest: list[Scraped] = []

    def is_true() -> object:
        latest[:] = [Scraped.of_port(port)]
        return condition(latest[0])

    wait_for(is_true, what, PATIENCE, interval=0.2)
    return latest[0]


def due_together(number: int) -> list[Row]:
    """Return rows that travel in one envelope."""
    return [Row(eta=datetime.now(UTC) + timedelta(seconds=5))] * number


def test_nothing_is_counted_and_no_library_imported_unless_a_port_is_set(
    shop: Any, configuration: dict[str, Any]
) -> None:
    shop.tasks["look"].apply_async(delay=5)
    assert Scraped(shop.rabbitdelay.metrics.collect()).values("sent_total") == {}
    # Without Redis: redis-py imports OpenTelemetry's SDK, if it is installed.
    settings = {k: v for k, v in configuration.items() if k != "result_backend"}
    program = (
        "import sys, tests.kernel.integration.shop as shop; shop.app.send_task('look', delay=60); "
        "print(*sys.modules)"
    )
    imported = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **Worker.environment(settings)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert "celery_rabbitdelay.app.instruments" in imported
    collector = "celery_rabbitdelay.metrics.collector"
    assert {collector, "prometheus_client", "opentelemetry.sdk.metrics"}.isdisjoint(imported)


def test_processes_of_the_pool_tell_what_they_send_also_when_they_are_killed(
    measured: Callable[..., Any], port: int, noted: Notes
) -> None:
    shop = measured(worker_max_tasks_per_child=2)
    # Two of them send and live on; others are killed, by a task that is redelivered or retries.
    for number in range(3):
        note = {"args": [number], "kwargs": {"key": noted.key}, "delay": 0.3}
        shop.tasks["send"].apply_async(("note", note)).get(timeout=PATIENCE)
    shop.tasks["retry"].apply_async(([], 2, {"countdown": 0.3})).get(timeout=PATIENCE)
    for name in LOST:
        shop.tasks[name].apply_async((uuid4().hex,)).get(timeout=PATIENCE)
    default = named(shop, "default")
    # A task that is only redelivered is not sent again.
    sent = {"note": 3, "retry": 2, **{name: 1 for name in LOST if name != "lost"}}
    number = sum(sent.values())
    found = scraped(port, lambda now: now.total("lateness_seconds_count") >= number, "arrivals")
    assert found.values("sent_total") == {(default, name): count for name, count in sent.items()}
    assert found.values("confirmed_total") == found.values("sent_total")
    assert found.values("lateness_seconds_count") == found.values("sent_total")
    assert found.total("refused_total") == 0


def test_each_verdict_of_the_registry_is_counted(
    make_shop: Callable[..., Any], configuration: dict[str, Any], redis_url: str, port: int
) -> None:
    settings = {**configuration, "rabbitdelay_registry_url": redis_url}
    shop = make_shop(**settings)
    delays, look, queue = shop.rabbitdelay, shop.tasks["look"], named(shop, "default")
    delays.cancel("cancelled")
    delays.open_job("aborted", expires=3600)
    delays.open_job("expired", expires=0.1)
    delays.open_job("open", expires=3600)
    for options in (
        {"task_id": "cancelled"},
        {"key": "order"},
        {"key": "order"},
        {"job": "aborted"},
        {"job": "open"},
        {"task_id": "once", "once": True},
        {"task_id": "once", "once": True},
    ):
        look.apply_async(delay=1, **options)
    eta = datetime.now(UTC) + timedelta(seconds=1)
    # Distribution drops the tasks of an envelope.
    report = delays.send_many(look, [{"eta": eta}] * 3, job="aborted", queue=queue)
    assert (report.confirmed, report.messages) == (3, 1)
    delays.abort_job("aborted")
    # All have come due by the time that the worker begins.
    names = ("cancelled", "superseded", "expired", "duplicates")
    with Worker({**settings, "rabbitdelay_metrics_port": port}):
        found = scraped(
            port,
            lambda now: (
                now.total("lateness_seconds_count") >= 2
                and now.total("returned_total") >= 1
                and all(now.total(f"{name}_total") for name in names)
                and now.total("expired_total") >= 4
            ),
            "all verdicts",
        )
        for name in names:
            number = 4 if name == "expired" else 1
            assert found.values(f"{name}_total") == {(queue, "look"): number}, name
        assert found.values("lateness_seconds_count") == {(queue, "look"): 2}
        assert found.values("registry_breaker_open") == {(): 0}
        assert found.total("registry_seconds_count") > 0
        assert found.total("registry_failures_total") == 0


def test_what_waits_is_told_by_level_and_missing_queues_are(
    shop: Any, measured: Callable[..., Any], port: int, channel: Any
) -> None:
    measured(rabbitdelay_modules=["probe"])
    topology = shop.rabbitdelay.topology
    for _ in range(3):
        shop.tasks["look"].apply_async(delay=5)
    # An envelope is one message, and nobody serves distribution.
    shop.rabbitdelay.send_many("look", due_together(2))
    distribution = topology.module_queues.distribution.name
    found = scraped(
        port,
        lambda now: now.values("backlog").get((distribution,)) and now.values("probe_late_seconds"),
        "an envelope, and a probe",
    )
    assert set(found.values("pending")) == {(level,) for level in topology.level_queues}
    assert found.values("missing_queues") == {(): 0}
    assert found.values("module_received_total") == {}
    # The next look at the broker finds what was deleted meanwhile.
    channel.queue_delete(topology.module_queues.meditation.name)
    found = scraped(port, lambda now: now.total("missing_queues"), "a missing queue")
    assert found.values("missing_queues") == {(): 1}


def test_modules_undeliverable_early_and_other_producers_messages_are_counted(
    measured: Callable[..., Any], port: int, connection: Connection
) -> None:
    shop = measured(rabbitdelay_retry_for=0)
    look, queues = shop.tasks["look"], shop.rabbitdelay.topology.module_queues
    distribution, default = queues.distribution.name, named(shop, "default")
    # As if a policy had released them early: one comes to a worker, one to distribution.
    for given, priority in (("default", 0), ("mirror", 9)):
        result = look.apply_async(delay=5, queue=named(shop, given), priority=priority)
        release(connection, shop)
        assert result.get(timeout=PATIENCE)
    plain: Any = celery.Celery("plain", broker=shop.conf.broker_url, set_as_current=False)
    plain.send_task("look", countdown=15, exchange=named(shop, "direct"), routing_key="second")
    nowhere = Exchange("test-nowhere", no_declare=True)
    look.apply_async(delay=0.2, exchange=nowhere, routing_key="none")
    shop.rabbitdelay.send_many("look", due_together(4))
    found = scraped(
        port,
        lambda now: (
            now.values("module_published_total").get((distribution,)) == 4 + 1 + 2
            and now.total("lateness_seconds_count") == 4 + 2 + 1
            and now.values("backlog").get((queues.undeliverable.name,)) == 1
        ),
        "all of them",
    )
    assert found.values("undeliverable_total") == {(distribution,): 1, (queues.checkin.name,): 0}
    # The envelope, the one that is undeliverable, and the early one twice.
    assert found.values("module_received_total")[distribution,] == 1 + 1 + 2
    assert found.values("early_total") == {(default, "look"): 1, (distribution, ""): 1}
    assert found.values("taken_over_total") == {(named(shop, "second"), "look"): 1}


def test_a_producer_shows_its_counts_in_a_registry_of_its_own(shop: Any) -> None:
    registry = CollectorRegistry()
    registry.register(shop.rabbitdelay.metrics)
    look, queue = shop.tasks["look"], named(shop, "default")
    look.apply_async(delay=5)
    with pytest.raises(PublishError):
        look.apply_async(delay=5, headers={"x-broken": object()})
    shop.tasks["celery-own"].apply_async(countdown=5)
    look.apply_async()
    # No queue of the application is bound to the exchange with this key.
    topic = {"exchange": named(shop, "topic"), "routing_key": "none"}
    shop.tasks["note"].apply_async(kwargs={"key": "none"}, delay=5, **topic)
    rows = [*[Row(delay=5)] * 7, Row(delay=5, task_id="x" * 300)]
    with pytest.raises(RowsNotConfirmed):
        shop.rabbitdelay.send_many(look, rows)
    found = Scraped(registry.collect())
    assert found.values("sent_total")[queue, "look"] == 2 + 7
    assert found.values("confirmed_total")[queue, "look"] == 1 + 7
    assert found.values("refused_total") == {(queue, "look"): 1}
    assert found.total("resent_total") == 0
    assert set(found.values("sent_total")) == {(queue, "look"), ("", "note")}


def test_the_port_is_a_setting_or_an_option_with_an_address_and_a_wrong_one_ends_the_worker(
    serve: Callable[..., Any], configuration: dict[str, Any], port: int
) -> None:
    serve(f"--rabbitdelay-metrics-port=127.0.0.2:{port}", rabbitdelay_metrics_port=port)
    assert not is_served(port)
    with socket.create_connection(("127.0.0.2", port)):
        pass
    taken = f"127.0.0.2:{port}"
    for given, why in (("70000", ""), (taken, "Address already in use")):
        run = run_celery(configuration, f"worker -c 1 --rabbitdelay-metrics-port={given}")
        assert run.returncode != 0
        told = run.stdout + run.stderr
        assert all(each in told for each in ("rabbitdelay_metrics_port = ", given, why))


READY = "200: ok\n"


def readiness(port: int) -> str:
    """Return what a worker says of itself to an orchestrator, which must not restart it."""
    alive, ready = (
        httpx.get(f"http://127.0.0.1:{port}/{path}", timeout=PATIENCE)
        for path in ("healthz", "readyz")
    )
    assert alive.text == "ok\n"
    return f"{ready.status_code}: {ready.text}"


def test_a_worker_is_ready_while_it_is_connected(
    private_rabbitmq: RabbitMQServer, measured: Callable[..., Any], port: int
) -> None:
    measured(broker_connection_max_retries=None)
    wait_for(lambda: readiness(port) == READY, "a worker that is ready", PATIENCE)
    # Not killed: RabbitMQ 3.10 may never serve a quorum queue again that is a moment old then.
    private_rabbitmq.ctl("stop_app")
    try:
        why = "503: not connected to the broker"
        wait_for(lambda: readiness(port).startswith(why), "a worker that is not", PATIENCE)
    finally:
        private_rabbitmq.ctl("start_app")
    wait_for(lambda: readiness(port) == READY, "a worker that is ready again", PATIENCE)


def test_metrics_are_served_until_the_pool_has_finished_and_a_killed_worker_frees_its_port(
    shop: Any, configuration: dict[str, Any], port: int
) -> None:
    key = uuid4().hex
    redis: Any = shop.backend.client
    worker = Worker({**configuration, "rabbitdelay_metrics_port": port})
    with worker:
        shop.tasks["retry-when"].apply_async((key,))
        wait_for(lambda: redis.get(key) == b"first", "a task that runs")
        os.kill(worker.pid, signal.SIGTERM)
        wait_for(lambda: "Warm shutdown" in worker.log, "the shutdown")
        assert is_served(port)
        wait_for(lambda: readiness(port) != READY, "a worker that takes no tasks")
        redis.set(key, "go on")
        wait_for(lambda: not worker.running, "the worker's end")
        assert not is_served(port)
        worker.start()
        shop.tasks["look"].apply_async(delay=0.3).get(timeout=PATIENCE)
        os.kill(worker.pid, signal.SIGKILL)
        wait_for(lambda: not worker.running, "the worker's end")
        wait_for(lambda: not is_served(port), "a free port")
