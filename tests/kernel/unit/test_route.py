"""``celery rabbitdelay route`` and the route that it explains."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import Result
from hypothesis import given
from hypothesis import strategies as st

from celery_rabbitdelay.command.levels import explain
from celery_rabbitdelay.kombu import Layout, Route, Topology
from celery_rabbitdelay.levels.delay import Due
from tests.json_schemas import checked
from tests.kernel.unit.broker_model import BrokerModel
from tests.kernel.unit.strategies import custom_layouts

SEED = '[["a",2,8],["b",2,4],["c",2,2],["d",2,1]]'


@given(layout=custom_layouts(), delay_ms=st.integers(0, 10**8), shards=st.integers(1, 3))
def test_the_explained_route_is_the_one_taken(layout: Layout, delay_ms: int, shards: int) -> None:
    topology = Topology("p", layout, shards=shards)
    delay_ms %= 4 * layout.capacity_ms
    found = explain(topology, delay_ms / 1000, "reports", task_id="t")

    walk = BrokerModel(topology, ("reports",)).walk(Route(**found["entered"], stops=()))
    levels = found["stops"][1:] if found["meditations"] else found["stops"]
    assert tuple(stop["queue"] for stop in levels) == walk.stops
    assert walk.delivered_to == {"reports"}
    looped = found["stops"][0]["ttl_ms"] * found["meditations"] if found["meditations"] else 0
    assert looped + walk.waited_ms == found["total_ms"]
    passed = walk.waited_ms if layout.zeros == "queue" else 0
    assert 0 <= found["total_ms"] - delay_ms < layout.tick_ms + (passed and len(layout.levels))


def test_a_tolerance_saves_stops() -> None:
    topology, delay = Topology("p"), 3 * 3600 + 45 * 60 + 30
    assert len(topology.route(delay, "reports").stops) == 3
    for route in (
        topology.route(delay, "reports", tolerance=3600),
        topology.route(Due.after(delay, 3_600_000), "reports"),
    ):
        assert route.stops == ("p.hours.4",)


def test_the_command_says_it_in_words_and_as_a_table(offline: Callable[..., Result]) -> None:
    # A module that nobody serves is named.
    without = offline("route", "5000d", rabbitdelay_modules=["distribution"])
    assert "rabbitdelay_modules lacks 'check-in'" in without.stdout
    told = offline("route", "3d7h45m30s", "-Q", "reminders")
    assert told.exit_code == 0
    assert "3 days 7:45:30 to the queue reminders: 4 stops" in told.stdout
    assert "the routing key 0.0.0.3.7.45.30.0.reminders" in told.stdout
    row = "2     rabbitdelay.hours.7     7:00:00  rabbitdelay.minutes.x1"
    assert row in told.stdout.splitlines()


def test_the_command_takes_any_layout(offline: Callable[..., Result]) -> None:
    found = checked("route", offline("route", "27", "--layout", SEED, "-Q", "my-key", "-j").stdout)
    assert (found["meditations"], found["entered"]["routing_key"]) == (1, "1.1.0.0.my-key")
    assert [stop["ttl_ms"] for stop in found["stops"]] == [15_000, 8000, 4000]
    words = offline("route", "27", "--layout", SEED, "-Q", "my-key").stdout
    assert "meditates first. Then check-in publishes it to rabbitdelay.a.x1 with the" in words
    assert "1     rabbitdelay.meditation  0:00:15" in words

    told = offline("route", "5", "--tick", "1", "--prefix", "p", "--shards", "2", "--task-id", "x")
    assert re.search(r"p\.seconds\.5\.s[01]", told.stdout)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["soon"], "takes seconds (90"),
        (["5", "--layout", "[["], "is not JSON"),
        (["5", "--shards", "0"], "takes a whole number from 1"),
    ],
)
def test_what_is_wrong_is_said(offline: Any, arguments: list[str], said: str) -> None:
    told = offline("route", *arguments)
    assert told.exit_code == 2
    assert said in told.output
