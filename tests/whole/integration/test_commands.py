"""What all commands have in common: help without a broker, and one line if it is down."""

import shlex
from collections.abc import Iterator
from itertools import chain
from typing import Any

import click
import pytest
from celery.platforms import EX_UNAVAILABLE
from click.testing import Result

from celery_rabbitdelay import Celery
from celery_rabbitdelay.app.additions import commands as all_commands
from celery_rabbitdelay.command.group import rabbitdelay
from tests import json_schemas
from tests.kernel.integration.worker import run_command

#: Nothing listens there.
AWAY = "amqp://guest:secret@127.0.0.1:1//"

#: Each command with the least that it takes to reach for the broker or for Redis, by the beginning
#: of the line that it prints if neither answers; None: those that need neither.
LEAST: dict[str | None, tuple[str, ...]] = {
    "Error: the registry cannot be used: ": (
        *("cancel some-id", "job show some-job", "pause --task some-task", "pending"),
        *("postpone some-id --delay 5", "resume --task some-task"),
        "show some-id",
        *("schedules delete some-name", "schedules list"),
        *("schedules next some-name", "schedules pause some-name", "schedules put-beat"),
        *("schedules resume some-name", "schedules show some-name", "schedules trigger some-name"),
    ),
    "Error: cannot reach a broker: ": (
        "adopt",
        "migrate --from-prefix other --ignore-registry",
        "transfer --from amqp://guest:secret@127.0.0.1:2//",
    ),
    "Error: a request to the broker amqp://guest": (
        *("declare", "delete --yes", "status"),
        *("undeliverable export", "undeliverable list", "verify"),
        *("undeliverable purge --yes", "undeliverable redrive"),
    ),
    None: (
        "capacity --tasks 1 --rate 1",
        *("export --format definitions", "permissions producer --user web", "route 5"),
        "web",
    ),
}


def commands(group: click.Group, before: str = "") -> Iterator[str]:
    """Yield the names of all commands, those of groups behind the group's."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from commands(command, f"{before}{name} ")
        else:
            yield f"{before}{name}"


CONFIGURATION: dict[str, Any] = {
    "prefix": "test-commands",
    "broker_url": AWAY,
    "rabbitdelay_registry_url": "redis://:secret@127.0.0.1:1/0",
    "rabbitdelay_confirm_timeout": 1,
}


def test_the_table_has_all_commands() -> None:
    names, lines = sorted(commands(rabbitdelay)), sorted(chain(*LEAST.values()))
    assert len(names) == len(lines)
    for name, line in zip(names, lines, strict=True):
        assert line.split()[: len(name.split())] == name.split()


def invoke(line: str, **settings: Any) -> Result:
    """Run a command of an application with these settings in this process."""
    app = Celery("shop", set_as_current=False)
    app.conf.update({**CONFIGURATION, **settings})
    told = json_schemas.invoke(app, shlex.split(line))
    app.close()
    return told


@pytest.mark.parametrize("command", [*commands(rabbitdelay), *all_commands])
def test_the_help_needs_no_broker(command: str) -> None:
    told = invoke(f"{command} --help")
    assert (told.exit_code, told.stderr) == (0, "")
    assert told.stdout.startswith("Usage: ")


@pytest.mark.parametrize(
    ("line", "says", "url"),
    [
        *((line, says, AWAY) for says, lines in LEAST.items() if says for line in lines),
        ("status", "Error: a request to the broker amqp://guest", "amqp://guest@nowhere.invalid"),
    ],
)
def test_without_a_broker_a_command_ends_with_one_line(line: str, says: str, url: str) -> None:
    told = invoke(f"{line} --json", broker_url=url)
    assert told.exit_code == EX_UNAVAILABLE, told.stderr
    error, *page = told.stderr.splitlines()
    of_registry = "See how-to/registry in the documentation of celery_rabbitdelay."
    assert page == ([of_registry] if says.startswith("Error: the registry") else [])
    assert error.startswith(says)
    assert "secret" not in error
    assert json_schemas.checked("error", told.stdout) == {"error": error.removeprefix("Error: ")}


@pytest.mark.parametrize(
    ("command", "settings", "named"),
    [
        *(
            (line, {setting: "http://:secret@host"}, setting)
            for line in chain(*LEAST.values())
            for setting in ("broker_url", "rabbitdelay_registry_url")
        ),
        ("status", {"broker_url": "memory://"}, "broker_url"),
        ("transfer --from sqs://:secret@host", {}, "'sqs://:**@host' is not RabbitMQ"),
    ],
)
def test_a_url_of_something_else_is_a_usage_error(
    command: str, settings: dict[str, Any], named: str
) -> None:
    told = invoke(command, **settings)
    assert told.exit_code == 2, told.exception
    assert "Usage: " in told.output
    assert "secret" not in told.output
    assert named in told.output


@pytest.mark.parametrize(
    ("settings", "command", "says"),
    [
        ({"rabbitdelay_tick": "soon"}, "status", "takes a positive number"),
        ({"rabbitdelay_registry_url": "unix://"}, "status", "begins with one of redis, rediss"),
        ({"rabbitdelay_web": {"management": "ftp://h"}}, "web", "URL such as http://user"),
    ],
)
def test_what_a_setting_causes_is_one_line(
    settings: dict[str, Any], command: str, says: str
) -> None:
    told = invoke(command, **settings)
    assert told.exit_code in (1, 2)
    *_, line, page = told.stderr.splitlines()
    assert line.startswith("Error: ")
    assert says in line
    assert page == "See reference/settings in the documentation of celery_rabbitdelay."


def test_a_traceback_is_printed_if_it_is_asked_for() -> None:
    told = run_command(CONFIGURATION, "--traceback pending")
    assert "Traceback" in told.stderr
    *_, line, page = told.stderr.splitlines()
    assert line.startswith("celery_rabbitdelay.exceptions.RegistryUnavail")
    assert page == "See how-to/registry in the documentation of celery_rabbitdelay."
