"""The table of metrics, how counts travel from a child to its parent, and a worker's health."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from celery_rabbitdelay import Celery
from celery_rabbitdelay.app.delays import Delays
from celery_rabbitdelay.app.instruments import LATENESS, SENT
from celery_rabbitdelay.metrics import bootstep, collector, instruments
from celery_rabbitdelay.metrics.collector import MAX_BYTES, OTHER, ChildCounts, HasMetrics, Metrics
from celery_rabbitdelay.metrics.instruments import PENDING

PAGE = Path(__file__).resolve().parents[3] / "docs" / "how-to" / "metrics.md"


@pytest.fixture(autouse=True, scope="module")
def patience() -> Iterator[None]:
    """Let the thread that reads the pipe take its time to end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collector, "PATIENCE", 60.0)
        yield


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


def samples(metrics: Metrics, name: str = "sent") -> dict[tuple[str, ...], float]:
    """Return the values of a metric, by labels."""
    families = {family.name: family for family in metrics.collect()}
    found = families[f"celery_rabbitdelay_{name}"].samples
    return {tuple(sample.labels.values()): sample.value for sample in found}


def test_nothing_is_recorded_until_metrics_are_in_use() -> None:
    delays = Delays(Celery())
    delays.recorder.record_send("remind", "mail", True, 0)
    assert samples(HasMetrics(delays).metrics) == {}
    delays.recorder.record_send("remind", "mail", True, 0)
    # As after a reset, which makes the parts of an application anew.
    assert samples(HasMetrics(delays).metrics) == {("remind", "mail"): 1}


def test_the_instruments_of_an_addition_that_was_taken_out_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernel = "celery_rabbitdelay.app.instruments"
    monkeypatch.setattr(instruments, "DEFINED_IN", ("celery_rabbitdelay.gone.its", kernel))
    assert SENT in tuple(instruments.defined())


def test_labels_are_bounded_in_number_and_what_waits_is_read_each_time(
    metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collector, "MAX_SERIES", 2)
    for queue in ("a", "b", "c", "d", "a"):
        metrics({SENT: 1}, "remind", queue)
    assert samples(metrics) == {("remind", "a"): 2, ("remind", "b"): 1, (OTHER, OTHER): 2}
    waiting = [5.0]
    metrics.observe(lambda: [(PENDING, ("hours.x1",), waiting[0])])
    assert samples(metrics, "pending") == {("hours.x1",): 5.0}
    waiting[0] = 7.0
    assert samples(metrics, "pending") == {("hours.x1",): 7.0}
    metrics.observe()
    assert samples(metrics, "pending") == {}


def test_counts_survive_the_pipe_and_labels_that_are_too_long_become_others() -> None:
    counted: list[Any] = []
    children = ChildCounts(lambda values, labels: counted.append((dict(values), labels)))
    children.start()
    values = {SENT: 1.0, LATENESS: 2**40 / 8}
    for labels in (("remind\n\ud800", "é"), (), ("x" * MAX_BYTES, "mail")):
        children.send(values, labels)
    children.stop()
    assert counted == [(values, each) for each in (("remind\n\ud800", "é"), (), (OTHER, OTHER))]


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


def test_what_was_written_is_read_and_a_child_goes_on_without_a_parent(metrics: Metrics) -> None:
    children = metrics.children = ChildCounts(metrics.count)
    told, go_on = os.pipe(), os.pipe()
    # More than the pipe has room for: it waits until they are read.
    before = 5000

    def work() -> None:
        os.close(go_on[1])  # it ends with its parent
        for _ in range(before):
            metrics({SENT: 1}, "remind", "mail")
        os.write(told[1], b"x")
        os.read(go_on[0], 1)
        metrics({SENT: 1}, "remind", "mail")

    child = forked(work)
    children.start()
    os.read(told[0], 1)
    children.stop()
    assert samples(metrics) == {("remind", "mail"): before}
    os.write(go_on[1], b"x")
    assert os.waitpid(child, 0)[1] == 0
    for descriptor in (*told, *go_on):
        os.close(descriptor)


def test_a_forked_process_counts_for_itself_and_begins_with_nothing(metrics: Metrics) -> None:
    metrics({SENT: 5}, "remind", "mail")

    def work() -> None:
        assert samples(metrics) == {}
        metrics({SENT: 1}, "remind", "mail")
        assert samples(metrics) == {("remind", "mail"): 1}

    assert os.waitpid(forked(work), 0)[1] == 0
    assert samples(metrics) == {("remind", "mail"): 5}


def test_the_multiprocess_mode_of_prometheus_counts_all_processes(tmp_path: Path) -> None:
    program = """
import os
from celery_rabbitdelay.app.instruments import SENT
from celery_rabbitdelay.metrics.collector import Metrics
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector

metrics = Metrics()
for _ in range(3):
    child = os.fork()
    metrics({SENT: 2}, "remind", "mail")
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


# What ``/healthz`` and ``/readyz`` answer, and why a worker is not ready.


@pytest.mark.parametrize(
    ("consuming", "is_blocked", "registry", "answer"),
    [
        ("", False, "", "ok\n"),
        ("not connected to the broker", True, "", "not connected to the broker\n"),
        ("", True, "", "RabbitMQ blocks publishers"),
        ("", False, "Redis is away", "Redis is away\n"),
    ],
)
def test_a_worker_is_alive_as_long_as_it_answers_and_ready_if_it_takes_and_sends_tasks(
    monkeypatch: pytest.MonkeyPatch,
    consuming: str,
    is_blocked: bool,
    registry: str,
    answer: str,
) -> None:
    monkeypatch.setattr(bootstep, "why_not_consuming", lambda worker: consuming)
    worker = mock.Mock()
    worker.app.rabbitdelay.is_blocked.return_value = is_blocked
    addition = mock.Mock()
    addition.why_not_ready.return_value = registry
    worker.app.rabbitdelay.part.return_value = [addition]
    application = bootstep.with_health(lambda *_: [b"metrics"], worker)

    def ask(path: str) -> tuple[str, str | None]:
        started: Any = mock.Mock()
        (body,) = application({"PATH_INFO": path}, started)
        return body.decode(), started.call_args and started.call_args.args[0]

    said, status = ask("/readyz")
    assert said.startswith(answer)
    assert said.count("\n") == 1
    assert status == ("200 OK" if answer == "ok\n" else "503 Service Unavailable")
    assert ask("/healthz") == ("ok\n", "200 OK")
    assert ask("/metrics") == ("metrics", None)
