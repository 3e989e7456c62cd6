"""The table of metrics, what Prometheus reads, and how counts travel from a child to its parent."""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from kombu import Connection

from celery_rabbitdelay.app import instruments
from celery_rabbitdelay.app import metrics as recording
from celery_rabbitdelay.app.metrics import (
    MAX_BYTES,
    OTHER,
    ChildCounts,
    Metrics,
    opentelemetry_is_set_up,
)
from celery_rabbitdelay.kombu import Topology
from celery_rabbitdelay.testing import wait_for
from celery_rabbitdelay.worker import metrics as worker_metrics

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "metrics.md"


@pytest.fixture(autouse=True, scope="module")
def patience() -> Iterator[None]:
    """Let the thread that reads the pipe take its time to end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recording, "PATIENCE", 60.0)
        yield


@pytest.fixture
def metrics() -> Metrics:
    metrics = Metrics()
    metrics.begin()
    return metrics


def by_name(metrics: Metrics) -> dict[str, Any]:
    return {family.name: family for family in metrics.collect()}


def test_the_page_has_every_metric_with_its_kind_labels_and_meaning() -> None:
    rows = re.findall(r"^\| `(celery_rabbitdelay_\w+)` \| (.+?) \| (.*?) \| (.+?) \|$",
                      PAGE.read_text(), re.MULTILINE)  # fmt: skip
    assert rows == [
        (each.metric, each.kind, ", ".join(f"`{label}`" for label in each.labels), each.help)
        for each in instruments.INSTRUMENTS
    ]


def test_the_source_is_asked_each_time(metrics: Metrics) -> None:
    waiting = [5.0]
    metrics.observe(lambda: [(instruments.PENDING, ("hours.x1",), waiting[0])])
    for expected in (5.0, 7.0):
        waiting[0] = expected
        (sample,) = by_name(metrics)["celery_rabbitdelay_pending"].samples
        assert (sample.labels, sample.value) == ({"level": "hours.x1"}, expected)
    metrics.observe()
    assert by_name(metrics)["celery_rabbitdelay_pending"].samples == []


def test_labels_are_bounded_in_number(metrics: Metrics, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "MAX_SERIES", 2)
    for queue in ("a", "b", "c", "d", "a"):
        metrics.record({instruments.SENT: 1}, "remind", queue)
    metrics.record({instruments.JOBS_EXPIRED: 1})
    assert totals(metrics) == {("remind", "a"): 2, ("remind", "b"): 1, (OTHER, OTHER): 2}


def totals(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """Return the values of ``sent``, by labels."""
    samples = by_name(metrics)["celery_rabbitdelay_sent"].samples
    return {tuple(sample.labels.values()): sample.value for sample in samples}


@pytest.fixture
def children(metrics: Metrics) -> Iterator[ChildCounts]:
    """The pipe by which forked processes send their counts to ``metrics``."""
    metrics.children = ChildCounts(metrics.count)
    yield metrics.children
    metrics.children.stop()


def unread(children: ChildCounts) -> int:
    """Return how many bytes are in the pipe."""
    number = fcntl.ioctl(children._reading.fileno(), termios.FIONREAD, bytes(4))
    return int.from_bytes(number, sys.byteorder)


def wait_for_total(metrics: Metrics, number: int) -> None:
    wait_for(lambda: sum(totals(metrics).values()) == number, f"{number} counts")


def test_counts_survive_the_pipe_and_labels_that_are_too_long_become_others() -> None:
    counted: list[Any] = []
    children = ChildCounts(lambda values, labels: counted.append((dict(values), labels)))
    children.start()
    sent: list[tuple[dict[instruments.Instrument, float], tuple[str, ...]]] = [
        ({instruments.SENT: 1.0, instruments.LATENESS: 2**40 / 8}, ("remind\n\ud800", "é")),
        ({instruments.JOBS_EXPIRED: 1.0}, ()),
        ({instruments.SENT: 3.0}, ("x" * MAX_BYTES, "mail")),
    ]
    for values, labels in sent:
        children.send(values, labels)
    children.stop()
    assert counted == [*sent[:2], (sent[2][0], (OTHER, OTHER))]


def forked(work: Callable[[], object]) -> int:
    """Run something in a process of its own, which is forked; return its id."""
    child = os.fork()
    if not child:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return child


def record(metrics: Metrics, times: int, task: str, *queues: str) -> None:
    for number in range(times):
        metrics.record({instruments.SENT: 1}, task, queues[number % len(queues)])


def test_a_full_pipe_waits_until_the_parent_reads(metrics: Metrics, children: ChildCounts) -> None:
    queues = [f"queue-{number}" for number in range(10)]
    child = forked(lambda: record(metrics, 5000, "remind", *queues))
    # Nobody reads yet, and the pipe has no room for all of them.
    wait_for(lambda: unread(children) > 60_000, "a full pipe")
    assert os.waitpid(child, os.WNOHANG) == (0, 0)
    children.start()
    assert os.waitpid(child, 0)[1] == 0
    wait_for_total(metrics, 5000)


def test_what_was_written_is_read_and_a_child_goes_on_without_a_parent(metrics: Metrics) -> None:
    children = metrics.children = ChildCounts(metrics.count)
    told, go_on = os.pipe(), os.pipe()

    def work() -> None:
        os.close(go_on[1])  # it ends with its parent
        record(metrics, 3, "remind", "mail")
        os.write(told[1], b"x")
        os.read(go_on[0], 1)
        record(metrics, 1, "remind", "mail")

    child = forked(work)
    os.read(told[0], 1)
    children.start()
    children.stop()
    assert totals(metrics) == {("remind", "mail"): 3}
    os.write(go_on[1], b"x")
    assert os.waitpid(child, 0)[1] == 0
    for descriptor in (*told, *go_on):
        os.close(descriptor)


def test_a_forked_process_counts_for_itself_and_begins_with_nothing(metrics: Metrics) -> None:
    record(metrics, 5, "remind", "mail")

    def work() -> None:
        assert totals(metrics) == {}
        record(metrics, 1, "remind", "mail")
        assert totals(metrics) == {("remind", "mail"): 1}

    assert os.waitpid(forked(work), 0)[1] == 0
    assert totals(metrics) == {("remind", "mail"): 5}


def test_a_broker_that_does_not_answer_holds_up_no_scrape(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Event()
    monkeypatch.setattr(worker_metrics, "PATIENCE", 0.01)
    monkeypatch.setattr(worker_metrics, "connect", lambda connection: answers.wait(30))
    reader = worker_metrics.BacklogReader(Connection("amqp://"), Topology())
    assert reader.read() is None
    asking = reader._asking
    assert asking is not None
    assert asking.is_alive()
    answers.set()
    asking.join()


def test_the_multiprocess_mode_of_prometheus_counts_all_processes(tmp_path: Path) -> None:
    program = """
import os
from celery_rabbitdelay.app.instruments import SENT
from celery_rabbitdelay.app.metrics import Metrics
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector

metrics = Metrics()
metrics.begin()
for _ in range(3):
    child = os.fork()
    metrics.record({SENT: 2}, "remind", "mail")
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
registry = CollectorRegistry()
MultiProcessCollector(registry)
labels = {"task": "remind", "queue": "mail"}
print(registry.get_sample_value("celery_rabbitdelay_sent_total", labels))
"""
    run = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (run.stdout, run.stderr) == ("12.0\n", "")


def test_opentelemetry_counts_as_set_up_only_with_a_provider_of_its_sdk() -> None:
    import opentelemetry.sdk.metrics  # noqa: F401 - redis-py imports it as well

    assert not opentelemetry_is_set_up()
