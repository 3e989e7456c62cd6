"""The estimate of what waiting tasks take: proportions that hold whatever a message costs."""

from collections.abc import Callable
from typing import Any

import pytest
from click.testing import Result

from tests.json_schemas import checked

Offline = Callable[..., Result]

#: Ten million tasks, of which a thousand come due each second.
LOAD = ("capacity", "--tasks", "10M", "--rate", "1k")


@pytest.fixture
def estimate(offline: Offline) -> Callable[..., dict[str, Any]]:
    """Return what the command finds for a load and further options."""
    return lambda *options: checked("capacity", offline(*LOAD, *options, "--json").stdout)


def test_replicas_are_spread_over_the_nodes(estimate: Any) -> None:
    one, three, six = (estimate("--nodes", str(number)) for number in (1, 3, 6))
    assert [each["replicas"] for each in (one, three, six)] == [1, 3, 3]
    assert one["messages"] == 10_000_000
    for taken in ("disk_bytes", "memory_bytes", "cores"):
        assert three[taken] == 2 * six[taken] > 0
    assert (one["disk_bytes"], one["memory_bytes"]) == (three["disk_bytes"], three["memory_bytes"])
    # A replicated message costs each of its nodes more.
    assert one["cores"] < three["cores"] < 2 * one["cores"]


def test_envelopes_take_less(estimate: Any) -> None:
    plain, enveloped = estimate(), estimate("--per-message", "10")
    assert enveloped["messages"] == plain["messages"] / 10
    assert enveloped["cores"] == pytest.approx(plain["cores"] / 10)
    assert plain["disk_bytes"] / 11 < enveloped["disk_bytes"] < plain["disk_bytes"] / 8
    assert enveloped["memory_bytes"] < plain["memory_bytes"] / 2
    # Celery repeats the beginning of the arguments in a header.
    for size, taken in ((500, 1000), (5000, 6024)):
        with_text = estimate("--argument-bytes", str(size))
        assert with_text["disk_bytes"] - plain["disk_bytes"] == taken * 10_000_000


def test_the_layout_says_how_often_a_message_stops_and_where_most_do(estimate: Any) -> None:
    # Of a delay up to 2 ** 10 ticks, half of the bits are ones, and each queue has half of them.
    found = estimate("--layout", "binary", "--tick", "1s", "--longest", "1024s")
    assert found["stops"] == pytest.approx(5, rel=0.01)
    assert found["busiest_rate"] == pytest.approx(500, rel=0.01)
    assert found["shards"] == 1
    busy = estimate("--layout", "binary", "--tick", "1s", "--longest", "1024s", "--rate", "11k")
    assert busy["shards"] == 3


def test_the_text_and_a_number_that_is_none(offline: Offline) -> None:
    told = offline(*LOAD, "--nodes", "3").stdout
    assert told.startswith("10,000,000 tasks in 10,000,000 messages, in 185 queues of 3 replicas")
    for number in ("no", "0", "-1", "inf", "nan", "k"):
        refused = offline("capacity", "--tasks", number, "--rate", "1")
        assert refused.exit_code == 2
        assert f"tasks = '{number}': takes a number above 0" in refused.output
