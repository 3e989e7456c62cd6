"""The connection to another broker than the application's, times, and the version."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from celery_rabbitdelay import Celery, __version__
from celery_rabbitdelay.command.group import rabbitdelay
from celery_rabbitdelay.command.shared import broker_at, instant_type, seconds_type


@pytest.fixture
def app() -> Iterator[Any]:
    """An application whose broker takes TLS."""
    made = Celery("shop", broker="amqps://here.example.com//", set_as_current=False)
    yield made
    made.close()


def names_asked_for(app: Any, url: str) -> tuple[str, str]:
    """Return whose certificates the brokers have to have: the application's, and the other one."""
    other, here = broker_at(app, url), app.connection_for_write()
    connections = [here, other, here.clone(), other.clone()]
    for connection in connections:
        # kombu decides it when it connects.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(connection.transport, "Connection", NotOpened)
            connection.transport.establish_connection()
    names = [connection.ssl["server_hostname"] for connection in connections]
    assert names[:2] == names[2:]
    return names[0], names[1]


class NotOpened:
    """Takes the place of py-amqp's connection, which would look for the host."""

    def __init__(self, **options: Any) -> None:
        self.client: Any = None

    def connect(self) -> None:
        """Connect to nothing."""


@pytest.mark.parametrize("named", [None, "here.example.com"])
def test_each_broker_s_certificate_is_for_its_own_host(app: Any, named: str | None) -> None:
    app.conf.broker_use_ssl = {"ca_certs": "ca.pem", "server_hostname": named}
    asked = names_asked_for(app, "amqps://there.example.com//")
    assert asked == ("here.example.com", "there.example.com")


@pytest.mark.parametrize(
    ("url", "settings", "ssl"),
    [
        ("amqps://there//", {"ca_certs": "ca.pem"}, {"ca_certs": "ca.pem"}),
        ("amqps://there//", True, True),
        ("amqps://there//", False, True),
        ("amqp://there//", {"ca_certs": "ca.pem"}, False),
    ],
)
def test_the_url_says_whether_it_is_tls(app: Any, url: str, settings: Any, ssl: Any) -> None:
    app.conf.broker_use_ssl = settings
    assert broker_at(app, url).ssl == ssl


#: How times are written, by the type of the option.
FORMS = {
    "delay": ["90", "1h30m", "1.5d", "-5"],
    "duration": ["90", "1h30m", "1.5d"],
    "instant": ["2030-01-31T09:00:00+01:00", "2030-01-31 09:00", "2030-01-31"],
}


def parameters(group: click.Group) -> Iterator[click.Parameter]:
    """Yield the parameters of all commands."""
    for command in group.commands.values():
        if isinstance(command, click.Group):
            yield from parameters(command)
        else:
            yield from command.params


def test_all_commands_take_times_in_the_same_forms() -> None:
    kinds: dict[str, set[str | None]] = {}
    for each in parameters(rabbitdelay):
        kinds.setdefault(each.type.name, set()).add(each.name)
        for text in FORMS.get(each.type.name, ()):
            assert each.type.convert(text, each, None)
        if each.type.name in FORMS:
            with pytest.raises(click.BadParameter, match=rf"{each.name} 'soon': takes .*\d"):
                each.type.convert("soon", each, None)
        if each.type.name == "duration":
            with pytest.raises(click.BadParameter, match=rf"{each.name} '-5': takes a duration"):
                each.type.convert("-5", each, None)
    assert kinds["float range"] == {"rate"}
    assert "float" not in kinds
    assert kinds["delay"] == {"delay", "max_delay"}
    assert kinds["instant"] == {"due_after", "due_before", "eta", "since", "until"}
    assert kinds["duration"] == {
        *("expires", "from_tick", "newer_than", "older_than", "step", "tick", "timeout"),
        *("tolerance", "watch"),
    }


@pytest.mark.parametrize("text", ["0", "99999999999d", "9" * 400])
def test_a_period_is_above_0_and_at_most_100_years(text: str) -> None:
    with pytest.raises(click.BadParameter, match=r"takes a duration (from|above) 0 to 100 years"):
        seconds_type.convert(text, None, None)


@pytest.mark.parametrize("text", ["0001-01-01", "9999-12-31T23:59:59-12:00", "2030-02-30"])
def test_an_instant_that_no_calendar_has_is_named(text: str) -> None:
    with pytest.raises(click.BadParameter, match=f"{text}': takes a datetime or ISO 8601, such as"):
        instant_type.convert(text, None, None)


@pytest.mark.parametrize(
    ("command", "line"),
    [
        (["rabbitdelay", "--version"], f"celery-rabbitdelay, version {__version__}"),
        (["-A", "shop", "report"], f"package  -> celery-rabbitdelay:{__version__}"),
    ],
)
def test_celery_says_which_version_this_is(command: list[str], line: str, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text("from celery_rabbitdelay import Celery\napp = Celery()\n")
    celery = [sys.executable, "-m", "celery", *command]
    run = subprocess.run(celery, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert line in run.stdout.splitlines()
