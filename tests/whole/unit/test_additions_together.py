"""Additions beside one another: their settings and options, no password in an error, recording."""

from collections.abc import Callable
from typing import Any

import pytest

from celery_rabbitdelay import Celery
from celery_rabbitdelay.app.settings import read_settings
from celery_rabbitdelay.exceptions import InvalidOption, InvalidSetting, NotRecorded
from celery_rabbitdelay.registry.application import RegistrySettings
from celery_rabbitdelay.spark.options import ApplicationOptions
from celery_rabbitdelay.testing import recorded
from tests.told import told

PLANTED = "opensesame"


@pytest.mark.parametrize("value", [True, 65_536, ":9808", "127.0.0.1", "127.0.0.1:0"])
def test_a_port_that_metrics_do_not_take_is_an_error(value: Any) -> None:
    with pytest.raises(InvalidSetting, match="rabbitdelay_metrics_port") as caught:
        read_settings({"rabbitdelay_metrics_port": value})
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("value", ["users", [], True])
def test_what_the_page_does_not_take_is_an_error(value: Any) -> None:
    with pytest.raises(InvalidSetting, match="rabbitdelay_web") as caught:
        read_settings({"rabbitdelay_web": value})
    assert repr(value) in str(caught.value)


#: What refuses each of these, whatever they hold.
REFUSED: list[tuple[Callable[[Any], Any], type[Exception], Any]] = [
    *(
        (read_settings, InvalidSetting, {f"rabbitdelay_{name}": value})
        for name, value in [
            ("registry_url", f"redis:/:{PLANTED}@host"),
            ("registry_url", f"redis://:{PLANTED}@host".encode()),
            ("registry_options", [("password", PLANTED)]),
        ]
    ),
    *(
        (ApplicationOptions.of, InvalidOption, options)
        for options in [
            {"broker": "amqp://user@host", "registry": f"redis://host?password={PLANTED}"},
            {"app": "shop", "brokerpassword": PLANTED},
        ]
    ),
]


@pytest.mark.parametrize(("make", "error", "given"), REFUSED)
def test_what_is_refused_is_told_without_a_password(
    make: Callable[[Any], Any], error: type[Exception], given: Any
) -> None:
    with pytest.raises(error) as refused:
        make(given)
    # Lines of source code, which a traceback has, are this file's own.
    lines = told(refused.value).splitlines()
    assert PLANTED not in "".join(line for line in lines if "PLANTED" not in line)


def test_the_settings_are_shown_without_passwords() -> None:
    options = {"password": PLANTED, "sentinel_kwargs": {"password": PLANTED}}
    shown = repr(
        RegistrySettings(registry_url=f"redis://:{PLANTED}@host/0", registry_options=options)
    )
    assert PLANTED not in shown
    assert "registry_url='redis://:**@host/0', registry_options='**'" in shown


def test_schedules_are_not_recorded_and_the_error_names_what_tries_them() -> None:
    app = Celery("shop", broker="amqp://localhost")
    app.conf.rabbitdelay_registry_url = "redis://localhost"
    with recorded(app), pytest.raises(NotRecorded, match=r"testing\.travel"):
        app.rabbitdelay.schedules.all()
