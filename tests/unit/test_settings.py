"""The ``rabbitdelay_*`` keys: what they take, and what a wrong one says."""

from __future__ import annotations

from typing import Any

import celery
import pytest

from celery_rabbitdelay.app.settings import Settings
from celery_rabbitdelay.exceptions import InvalidSetting
from celery_rabbitdelay.kombu import Layout, binary, clock, custom, geometric


def test_without_any_key_there_is_a_clock_on_quorum_queues() -> None:
    topology = Settings.of({"broker_url": "amqp://"}).topology
    assert (topology.prefix, topology.layout.name) == ("rabbitdelay", "clock")
    assert (topology.queue_type, len(topology.digit_queues)) == ("quorum", 180)


@pytest.mark.parametrize(
    ("layout", "levels"),
    [
        ("binary", 28),
        ("geometric", 9),
        ({"name": "geometric", "factor": 60, "levels": 4}, 4),
        ({"name": "binary", "levels": 10, "zeros": "skip"}, 10),
        ({"name": "custom", "levels": [("hours", 24, 3600)], "zeros": "queue"}, 1),
        ([("hours", 24, 3600), ("minutes", 60, 60)], 2),
    ],
)
def test_every_kind_of_layout_can_be_set(layout: Any, levels: int) -> None:
    settings = Settings.of({"rabbitdelay_layout": layout})
    assert len(settings.topology.layout.levels) == levels


@pytest.mark.parametrize(
    "layout",
    [clock(tick=1), binary(levels=5), geometric(levels=3), custom([("hours", 24, 3600)])],
    ids=lambda layout: layout.name,
)
def test_a_layout_can_be_set_and_keeps_its_own_tick(layout: Layout) -> None:
    settings = Settings.of({"rabbitdelay_layout": layout, "rabbitdelay_tick": 0.001})
    assert settings.topology.layout is layout


#: What each setting does not take.
WRONG: dict[str, list[Any]] = {
    "prefix": ["", "a b", "p" * 101, 7, "amq.delays"],
    "layout": [
        *("sundial", {"name": "binary", "factor": 3}, {"factor": 3}, 7, [("minutes",)]),
        *([("minutes", 60, 60), ("seconds", 59, 1)], [(5, 60, 1)], [("m" * 51, 60, 1)]),
    ],
    "tick": [0, 0.0005, 1e-10, 10**400, "0.1", True, float("nan"), 0.25],
    "queue_type": ["stream"],
    "takeover": ["yes"],
    "declare": ["sometimes"],
    "confirm_timeout": [0, None],
    "web": ["users", [], True],
    "metrics_port": [True, 65_536, ":9808", "127.0.0.1", "127.0.0.1:0"],
    "early_tolerance": [0, -1.0, None, "1", float("inf")],
}


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in WRONG.items() for value in values]
)
def test_a_wrong_value_is_an_error_with_key_value_and_what_it_takes(key: str, value: Any) -> None:
    with pytest.raises(InvalidSetting) as caught:
        Settings.of({f"rabbitdelay_{key}": value})
    text = str(caught.value)
    assert f"rabbitdelay_{key}" in text
    assert repr(value) in text
    assert len(text) > len(f"rabbitdelay_{key} = {value!r}: ") + 10


def test_a_key_that_does_not_exist_is_an_error_that_lists_those_that_do() -> None:
    with pytest.raises(InvalidSetting, match="rabbitdelay_layout") as caught:
        Settings.of({"rabbitdelay_layouts": "clock"})
    assert caught.value.key == "rabbitdelay_layouts"


@pytest.mark.parametrize("namespace", ["CELERY", "CELERY_"])
def test_keys_are_read_from_django_s_namespace(namespace: str) -> None:
    app: Any = celery.Celery("shop", set_as_current=False)
    source = {
        "CELERY_RABBITDELAY_PREFIX": "shop",
        "CELERY_RABBITDELAY_TICK": 1,
        "RABBITDELAY_ELSE": "not ours: it has no namespace",
    }
    app.config_from_object(source, namespace=namespace)
    settings = Settings.of(app.conf, app.namespace)
    assert (settings.prefix, settings.tick) == ("shop", 1)


@pytest.mark.parametrize(
    ("namespace", "key", "right"),
    [
        ("CELERY", "RABBITDELAY_PREFIX", "CELERY_RABBITDELAY_PREFIX"),
        ("shop_", "RABBITDELAY_PREFIX", "shop_rabbitdelay_prefix"),
        (None, "RABBITDELAY_PREFIX", "rabbitdelay_prefix"),
        (None, "CELERY_RABBITDELAY_PREFIX", "rabbitdelay_prefix"),
    ],
)
def test_a_key_that_celery_ignores_is_an_error(namespace: str | None, key: str, right: str) -> None:
    app: Any = celery.Celery("shop", broker="amqp://", set_as_current=False)
    app.config_from_object({key: "mine"}, namespace=namespace)
    with pytest.raises(InvalidSetting, match=f"write {right}$") as caught:
        Settings.of(app.conf, app.namespace)
    assert (caught.value.key, caught.value.value) == (key, "mine")


def test_beside_the_right_key_one_in_capitals_is_a_variable_of_the_user_s_own() -> None:
    source = {"RABBITDELAY_PREFIX": "mine", "CELERY_RABBITDELAY_PREFIX": "mine"}
    assert Settings.of(source, "CELERY").prefix == "mine"
    app = celery.Celery("shop", set_as_current=False, rabbitdelay_prefix="mine")
    app.config_from_object({"RABBITDELAY_PREFIX": "other"})
    assert Settings.of(app.conf).prefix == "mine"


def test_another_application_s_namespace_is_no_business_of_this_one() -> None:
    source = {"CELERY_RABBITDELAY_PREFIX": "other", "OTHER_RABBITDELAY_TICK": 1}
    assert Settings.of(source, "SHOP").prefix == "rabbitdelay"


def test_a_namespace_in_small_letters_is_celery_s_case() -> None:
    app: Any = celery.Celery("shop", set_as_current=False)
    app.config_from_object({"shop_rabbitdelay_tick": 1}, namespace="shop")
    assert Settings.of(app.conf, app.namespace).tick == app.conf.rabbitdelay_tick == 1


def test_a_wrong_key_in_the_namespace_is_an_error_too() -> None:
    with pytest.raises(InvalidSetting, match="CELERY_RABBITDELAY_LAYOUTS"):
        Settings.of({"CELERY_RABBITDELAY_LAYOUTS": "clock"}, "CELERY")


@pytest.mark.parametrize(("name", "value"), [("TICK", -1), ("LAYOUT", [("seconds", 1, 1)])])
def test_a_wrong_value_in_the_namespace_is_named_as_it_is_written(name: str, value: Any) -> None:
    key = f"CELERY_RABBITDELAY_{name}"
    app: Any = celery.Celery("shop", set_as_current=False)
    app.config_from_object({key: value}, namespace="CELERY")
    with pytest.raises(InvalidSetting, match=f"^{key} = ") as caught:
        Settings.of(app.conf, app.namespace)
    assert (caught.value.key, caught.value.value) == (key, value)


def test_what_is_set_on_the_configuration_itself_counts() -> None:
    app = celery.Celery("shop", set_as_current=False, rabbitdelay_prefix="one")
    app.conf.rabbitdelay_tick = 1
    settings = Settings.of(app.conf)
    assert (settings.prefix, settings.tick) == ("one", 1)
