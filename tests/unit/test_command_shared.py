"""The connection to another broker, times, usage errors of all commands, and the version."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import click
import pytest
from click.testing import Result

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


@pytest.mark.parametrize(
    ("kind", "text", "takes"),
    [
        (seconds_type, "0", "a duration above 0 to 100 years"),
        (seconds_type, "99999999999d", "a duration from 0 to 100 years"),
        (instant_type, "9999-12-31T23:59:59-12:00", "a datetime or ISO 8601, such as"),
        (instant_type, "2030-02-30", "a datetime or ISO 8601, such as"),
    ],
)
def test_a_time_that_nobody_can_wait_for_is_named(kind: Any, text: str, takes: str) -> None:
    with pytest.raises(click.BadParameter, match=f"{text}': takes {takes}"):
        kind.convert(text, None, None)


#: Settings with a registry, which is not asked.
REGISTRY = {"rabbitdelay_registry_url": "redis://127.0.0.1:1"}


@pytest.mark.parametrize(
    ("command", "settings", "says"),
    [
        ("status", {"rabbitdelay_tick": "soon"}, "rabbitdelay_tick"),
        ("status --watch", {}, "cannot be used with --watch"),
        ("verify --management amqp://guest:secret@host", {}, "a URL such as http://host:15672"),
        ("verify --management secret@host:x", {}, "a URL such as http://host:15672"),
        ("delete", {}, "give --yes"),
        ("export -f svg", {}, "'svg' is not one of"),
        ("export -f mermaid --max-delay 9999999d", {}, "above the layout's capacity"),
        ("export -f mermaid -o /nowhere/at/all", {}, "--output: "),
        ("send look --tolerance -1", {}, "takes a duration"),
        ("send look --priority 256", {}, "256 is not in the range"),
        ("send look no-such-file", {}, "No such file"),
        ("send celery.chnk", {}, "is it 'celery.chunks'? use --by-name to send it anyway"),
        ("migrate --from-layout [[", {}, "is not JSON"),
        ("migrate --from-layout hexadecimal", {}, "rabbitdelay_layout"),
        ("migrate --from-shards 0", {}, "rabbitdelay_shards"),
        ("migrate --rate 0", {}, "--rate"),
        ("migrate --from-prefix old", REGISTRY, "those that are cancelled would run"),
        ("adopt nservicebus", {"rabbitdelay_modules": []}, "it needs distribution"),
        ("undeliverable redrive --to x.celery.pidbox", {}, "belongs to the levels, to the broker"),
        ("undeliverable redrive --max-attempts 0", {}, "0 is not in the range"),
        ("undeliverable purge", {}, "give --yes"),
        ("pause", REGISTRY, "give --task, or --queue"),
        ("pause --task x --queue y", REGISTRY, "give --task, or --queue"),
        ("resume --task=", REGISTRY, "give --task, or --queue"),
        ("postpone x", REGISTRY, "give --delay, or --eta"),
        ("show x --key y", REGISTRY, "give the id of a task, or --key"),
        *(
            (command, {}, "set rabbitdelay_registry_url")
            for command in (
                *("pending", "show x", "forecast", "cancel x", "cancel --task x -y", "run-now x"),
                *("postpone x --delay 1", "job show x", "pause --task x", "resume --queue x"),
                "schedules list",
            )
        ),
    ],
)
def test_what_is_wrong_in_a_command_line_or_a_setting_is_a_usage_error(
    offline: Callable[..., Result], command: str, settings: dict[str, Any], says: str
) -> None:
    told = offline(*command.split(), "--json", **settings)
    assert (told.exit_code, told.stdout) == (2, "")
    assert says in " ".join(told.stderr.split())
    assert "secret" not in told.stderr


@pytest.mark.parametrize("error", [OSError, ValueError])
def test_an_error_shows_no_password_whoever_wrote_its_text(
    offline: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    refused = mock.Mock(side_effect=error("no way to amqp://guest:secret@host\nat all"))
    monkeypatch.setattr("celery_rabbitdelay.command.status.status_of", refused)
    told = offline("status", "--json")
    (line,) = told.stderr.splitlines()
    assert "no way to amqp://guest:**@host at all" in line
    assert "secret" not in told.output


def test_celery_says_which_version_this_is(offline: Callable[..., Result], tmp_path: Path) -> None:
    assert offline("--version").stdout == f"celery-rabbitdelay, version {__version__}\n"
    (tmp_path / "shop.py").write_text("from celery_rabbitdelay import Celery\napp = Celery()\n")
    report = [sys.executable, "-m", "celery", "-A", "shop", "report"]
    run = subprocess.run(report, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert f"package  -> celery-rabbitdelay:{__version__}" in run.stdout.splitlines()
