"""Counts, how they travel from a process of the pool to its parent, and what is written of them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from celery_rabbitdelay.app import child_counts, counts
from celery_rabbitdelay.app.child_counts import ATOMIC, ChildCounts
from celery_rabbitdelay.app.counts import OTHER, Counts, decoded, encoded
from celery_rabbitdelay.app.instruments import (
    INSTRUMENTS,
    JOBS_EXPIRED,
    LATENESS,
    PENDING,
    SENT,
    Instrument,
    Sample,
)
from celery_rabbitdelay.app.metrics import Metrics, opentelemetry_is_set_up
from celery_rabbitdelay.testing import wait_for

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "metrics.md"

#: The names that a label may have. ``level`` has one value for each level of the layout.
LABELS = {"task", "queue", "level"}


def by_name(metrics: Metrics) -> dict[str, Any]:
    return {family.name: family for family in metrics.collect()}


def test_names_are_unique_and_labels_are_few() -> None:
    assert len({each.metric for each in INSTRUMENTS}) == len(INSTRUMENTS)
    for each in INSTRUMENTS:
        assert set(each.labels) <= LABELS
        assert ("level" in each.labels) == (each is PENDING)
        assert list(each.buckets) == sorted(set(each.buckets))
        assert bool(each.buckets) == (each.kind == "histogram")


def test_the_page_has_every_metric_with_its_kind_labels_and_meaning() -> None:
    rows = re.findall(r"^\| `(celery_rabbitdelay_\w+)` \| (.+?) \| (.*?) \| (.+?) \|$",
                      PAGE.read_text(), re.MULTILINE)  # fmt: skip
    assert rows == [
        (each.metric, each.kind, ", ".join(f"`{label}`" for label in each.labels), each.help)
        for each in INSTRUMENTS
    ]


def test_a_value_falls_into_the_bucket_whose_bound_it_does_not_exceed() -> None:
    metrics = Metrics()
    for seconds in (0.05, 0.06, 10_000.0):
        metrics.record(LATENESS, seconds, "remind", "mail")
    samples = {
        (sample.name.removeprefix("celery_rabbitdelay_lateness_seconds"), sample.labels.get("le")):
            sample.value
        for sample in by_name(metrics)["celery_rabbitdelay_lateness_seconds"].samples
    }  # fmt: skip
    assert samples["_bucket", "0.05"] == 1
    assert samples["_bucket", "0.1"] == samples["_bucket", "7200.0"] == 2
    assert samples["_bucket", "+Inf"] == samples["_count", None] == 3
    assert samples["_sum", None] == pytest.approx(10_000.11)


def test_metrics_without_labels_begin_with_zero_and_others_with_their_first_event() -> None:
    families = by_name(Metrics())
    assert [sample.value for sample in families["celery_rabbitdelay_jobs_expired"].samples] == [0]
    assert families["celery_rabbitdelay_sent"].samples == []
    assert families["celery_rabbitdelay_pending"].samples == []


def test_sources_are_asked_each_time() -> None:
    metrics, waiting = Metrics(), [5.0]
    metrics.observe(lambda: [Sample(PENDING, ("hours.x1",), waiting[0])])
    for expected in (5.0, 7.0):
        waiting[0] = expected
        (sample,) = by_name(metrics)["celery_rabbitdelay_pending"].samples
        assert (sample.labels, sample.value) == ({"level": "hours.x1"}, expected)
    metrics.forget_sources()
    assert by_name(metrics)["celery_rabbitdelay_pending"].samples == []


def test_prometheus_reads_what_is_shown_whatever_a_task_is_called() -> None:
    from prometheus_client import generate_latest

    metrics, registry = Metrics(), CollectorRegistry()
    registry.register(metrics)
    name = 'shop."remind"\\\n{é}'
    metrics.record(SENT, 2, name, "mail")
    text = generate_latest(registry).decode()
    (sent,) = [each for each in text_string_to_metric_families(text) if each.name.endswith("_sent")]
    (sample,) = sent.samples
    assert (sample.labels, sample.value) == ({"task": name, "queue": "mail"}, 2)


def test_a_metric_with_too_many_labels_counts_the_rest_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(counts, "MAX_SERIES", 2)
    counted = Counts()
    for queue in ("a", "b", "c", "d", "a"):
        counted.record(SENT, 1, ("remind", queue))
    counted.record(JOBS_EXPIRED, 1, ())
    assert [(labels, numbers) for _, labels, numbers in counted.all()] == [
        (("remind", "a"), [2]),
        (("remind", "b"), [1]),
        ((OTHER, OTHER), [2]),
        ((), [1]),
    ]


Series = tuple[Instrument, tuple[str, ...], list[float]]


@st.composite
def series(draw: st.DrawFn) -> Series:
    instrument = draw(st.sampled_from([SENT, LATENESS, JOBS_EXPIRED]))
    labels = tuple(draw(st.text()) for _ in instrument.labels)
    numbers = counts.zeros(instrument)
    return instrument, labels, [draw(st.integers(0, 2**40)) / 8 for _ in numbers]


@given(st.lists(series()))
def test_counts_survive_the_pipe(given: list[Series]) -> None:
    lines = b"".join(encoded(*each, 100_000) for each in given)
    assert [*decoded(lines)] == given


@given(series())
def test_labels_that_are_too_long_become_others_and_the_numbers_stay(given: Series) -> None:
    instrument, labels, numbers = given
    line = encoded(
        instrument, tuple(label * 5000 + "x" * 5000 for label in labels), numbers, ATOMIC
    )
    assert len(line) <= ATOMIC
    assert [*decoded(line)] == [(instrument, (OTHER,) * len(labels), numbers)]


@pytest.mark.parametrize(
    "line",
    [b"", b"x", b"[]", b"null", b'["sent"]', b'["none", [], [1]]', b'["sent", ["a"], [1]]',
     b'["sent", ["a", "b"], ["c"]]', b'["sent", ["a", "b"], [1, 2]]', b"\xff"],
)  # fmt: skip
def test_a_line_that_nobody_has_written_is_left_out(line: bytes) -> None:
    good = encoded(SENT, ("a", "b"), [1.0], ATOMIC)
    assert [*decoded(good + line + b"\n" + good)] == [(SENT, ("a", "b"), [1.0])] * 2


@pytest.fixture
def heard() -> Counts:
    return Counts()


@pytest.fixture
def pipe(heard: Counts) -> Iterator[ChildCounts]:
    pipe = ChildCounts(heard.merge)
    yield pipe
    pipe.stop()


def total(counted: Counts) -> float:
    return sum(numbers[0] for _, _, numbers in counted.all())


def test_a_full_pipe_keeps_the_counts_until_there_is_room(
    pipe: ChildCounts, heard: Counts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_counts, "PATIENCE", 0.01)
    counted, sent = Counts(), 0
    # Nobody reads yet.
    while not counted.all():
        counted.record(SENT, 1, ("remind", f"queue-{sent}"))
        pipe.tell(counted)
        sent += 1
    assert sent > 100
    monkeypatch.undo()
    pipe.start()
    counted.record(SENT, 1, ("remind", "one more"))

    def has_told() -> bool:
        pipe.tell(counted)
        return not counted.all()

    wait_for(has_told, "room")
    wait_for(lambda: total(heard) == sent + 1, "all counts")


def test_what_several_processes_write_at_once_is_never_mixed(
    pipe: ChildCounts, heard: Counts
) -> None:
    pipe.start()
    children = []
    for number in range(4):
        child = os.fork()
        if not child:
            counted = Counts()
            for _ in range(500):
                counted.record(SENT, 1, (f"remind-{number}", "queue" * 100))
                pipe.tell(counted)
            os._exit(len(counted.all()))
        children.append(child)
    assert {os.waitpid(child, 0)[1] for child in children} == {0}
    wait_for(lambda: total(heard) == 2000, "all counts")
    assert len(heard.all()) == 4


def test_what_was_written_before_the_end_is_read(pipe: ChildCounts, heard: Counts) -> None:
    pipe.start()
    counted = Counts()
    counted.record(SENT, 3, ("remind", "mail"))
    pipe.tell(counted)
    pipe.stop()
    assert total(heard) == 3
    # A worker that has ended hears nothing, and a child may go on all the same.
    counted.record(SENT, 1, ("remind", "mail"))
    pipe.tell(counted)
    assert total(heard) == 3
    assert counted.all() == []


def test_opentelemetry_counts_as_set_up_only_with_a_provider_of_its_sdk() -> None:
    import opentelemetry.sdk.metrics  # noqa: F401 - redis-py imports it as well

    assert not opentelemetry_is_set_up()
