"""The ``rabbitdelay_*`` keys: what they take, and what a wrong one says."""

from typing import Any

import celery
import pytest

from celery_rabbitdelay.app import additions
from celery_rabbitdelay.app.settings import Settings, read_settings
from celery_rabbitdelay.exceptions import AdditionMissing, InvalidSetting
from celery_rabbitdelay.kombu import clock
from celery_rabbitdelay.worker.bootsteps import service_maker


@pytest.mark.parametrize(
    ("layout", "levels"),
    [
        ("clock", 8),
        ("binary", 28),
        ({"name": "geometric", "factor": 60, "levels": 4}, 4),
        ({"name": "custom", "levels": [("hours", 24, 3600)], "zeros": "queue"}, 1),
        ([("hours", 24, 3600), ("minutes", 60, 60)], 2),
        (clock(tick=1), 7),  # it keeps its own tick
    ],
)
def test_every_kind_of_layout_can_be_set(layout: Any, levels: int) -> None:
    settings: Any = read_settings({"rabbitdelay_layout": layout, "rabbitdelay_tick": 0.1})[Settings]
    assert len(settings.topology.layout.levels) == levels


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
    "early_tolerance": [0, -1.0, None, "1", float("inf")],
}


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in WRONG.items() for value in values]
)
def test_a_wrong_value_is_an_error_with_key_value_and_what_it_takes(key: str, value: Any) -> None:
    with pytest.raises(InvalidSetting) as caught:
        read_settings({f"rabbitdelay_{key}": value})
    text = str(caught.value)
    assert f"rabbitdelay_{key}" in text
    assert repr(value) in text
    assert len(text) > len(f"rabbitdelay_{key} = {value!r}: ") + 10


def of_an_application(source: dict[str, Any], namespace: str | None) -> Any:
    app: Any = celery.Celery("shop", broker="amqp://", set_as_current=False)
    app.config_from_object(source, namespace=namespace)
    return read_settings(app.conf, app.namespace)[Settings]


@pytest.mark.parametrize(
    ("source", "namespace", "expected"),
    [
        *(({"CELERY_RABBITDELAY_TICK": 1}, each, 1) for each in ("CELERY", "CELERY_")),
        ({"shop_rabbitdelay_tick": 1}, "shop", 1),
        # It is no key of Celery's, and may be a variable of the user's own.
        ({"RABBITDELAY_TICK": 2, "CELERY_RABBITDELAY_TICK": 1}, "CELERY", 1),
        # Another application's.
        ({"CELERY_RABBITDELAY_TICK": 2, "OTHER_RABBITDELAY_TICK": 2}, "SHOP", 0.1),
    ],
)
def test_keys_are_read_from_django_s_namespace(
    source: dict[str, Any], namespace: str, expected: float
) -> None:
    assert of_an_application(source, namespace).tick == expected


@pytest.mark.parametrize(
    ("source", "namespace", "told"),
    [
        ({"rabbitdelay_layouts": 1}, None, "rabbitdelay_layouts.*did you mean rabbitdelay_layout"),
        ({"CELERY_RABBITDELAY_LAYOUTS": 1}, "CELERY", "CELERY_RABBITDELAY_LAYOUTS"),
        ({"CELERY_RABBITDELAY_TICK": -1}, "CELERY", "^CELERY_RABBITDELAY_TICK = -1"),
        ({"RABBITDELAY_PREFIX": "p"}, "shop_", "use shop_rabbitdelay_prefix\n"),
        ({"CELERY_RABBITDELAY_PREFIX": "p"}, None, "use rabbitdelay_prefix\n"),
    ],
)
def test_a_wrong_key_is_an_error_that_names_it_as_it_is_written(
    source: dict[str, Any], namespace: str | None, told: str
) -> None:
    with pytest.raises(InvalidSetting, match=told) as caught:
        of_an_application(source, namespace)
    assert caught.value.key in source


def test_what_is_set_on_the_configuration_itself_counts() -> None:
    app = celery.Celery("shop", set_as_current=False, rabbitdelay_prefix="one")
    app.conf.rabbitdelay_tick = 1
    # Beside the right key, one in capitals is a variable of the user's own.
    app.config_from_object({"RABBITDELAY_PREFIX": "other"})
    settings: Any = read_settings(app.conf)[Settings]
    assert (settings.prefix, settings.tick) == ("one", 1)


def test_a_service_whose_addition_was_deleted_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(additions.services, "probe", "celery_rabbitdelay.gone.probe:service")
    with pytest.raises(AdditionMissing, match="no folder 'gone'"):
        service_maker("probe")
